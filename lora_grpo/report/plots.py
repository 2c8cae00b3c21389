"""Select the curves to plot: metrics over training steps, each with a hint on what to look for, and pass@k over k."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.evaluation import read_report
from lora_grpo.runs import Line, RunFiles

MAX_POINTS = 600
"""Maximum number of points in a curve. In longer curves, each point is a mean over several steps."""


@dataclass(frozen=True)
class Curve:
    """One curve, y over x. NaN creates a gap."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    """Lower edge of a band around the curve."""
    high: list[float] | None = None
    """Upper edge of the band."""
    band: str = ""
    """A description of the band."""


@dataclass(frozen=True)
class Plot:
    """One plot."""

    key: str
    """The name of the plot's file."""
    group: str
    """The heading of the plot's section."""
    title: str
    unit: str
    """Unit of the y axis."""
    look_for: str
    """A sentence on what to look for."""
    curves: list[Curve] = field(default_factory=list)
    x_unit: str = "step"
    stacked: bool = False
    is_fraction: bool = False
    """Whether all values lie between 0 and 1."""
    averaged: int = 1
    """Number of steps averaged in each point."""

    @property
    def caption(self) -> str:
        """What to look for and what is plotted."""
        sentences = [self.look_for]
        if self.curves[0].band:
            sentences.append(f"The band is {self.curves[0].band}.")
        if self.averaged > 1:
            sentences.append(f"Each point is the mean of {self.averaged} steps.")
        return " ".join(sentences)


GROUPS = LEARNING, SIGNAL, COMPLETIONS, STABILITY, TIME, EVALUATION = (
    "Is it learning?",
    "Is there a learning signal?",
    "What does it write?",
    "Is training stable?",
    "Where does the time go?",
    "How good is it with more samples?",
)

_SINGLE_METRICS = (
    # group, key, metric, title, unit, is_fraction, what to look for
    (LEARNING, "validation-reward", "validation/reward", "Validation reward", "reward", False,
     "Should rise with the training reward; if it falls while the training reward rises, the reward is being hacked."),
    (LEARNING, "validation-accuracy", "validation/accuracy", "Validation accuracy", "fraction passed", True,
     "The best adapter is the one with the best validation results."),
    (SIGNAL, "zero-variance", "frac_reward_zero_std", "Groups without variance", "fraction of groups", True,
     "A group whose completions all get the same reward has no gradient; above 0.8 little signal is left."),
    (SIGNAL, "entropy", "entropy", "Entropy", "nats per token", False,
     "Falls as the model becomes more certain; near 0 it has stopped exploring."),
    (SIGNAL, "kl", "kl", "KL from the base", "nats per token", False,
     "How far the policy has moved; a sudden rise often comes with broken text."),
    (COMPLETIONS, "clipped", "completions/clipped_ratio", "Truncated completions", "fraction", True,
     "Near 1, answers do not fit: raise --sampling.max-completion-tokens."),
    (STABILITY, "mismatch", "sampling/sampling_logp_difference/mean", "Logprob mismatch", "nats per token", False,
     "Difference between the log-probabilities of sampler and trainer: should stay small."),
    (STABILITY, "grad-norm", "grad_norm", "Gradient norm", "before clipping", False,
     "Spikes come from single batches; at 0 a step changes nothing."),
    (STABILITY, "learning-rate", "learning_rate", "Learning rate", "rate", False, "The learning rate schedule."),
    (STABILITY, "loss", "loss", "Loss", "GRPO loss", False, "Says little in GRPO: it need not fall."),
)  # fmt: skip


def plots_of(run: RunFiles) -> list[Plot]:
    """Return the plots for which a run has values, by group."""
    every = max(1, math.ceil(len(run.metrics) / MAX_POINTS))
    lines = [*_base(run.validation), *run.metrics]
    plots = [*_rewards(lines, every)]
    for group, key, metric, title, unit, is_fraction, look_for in _SINGLE_METRICS:
        if curve := _curve(lines, metric, title.lower(), every):
            plots.append(Plot(key, group, title, unit, look_for, [curve], is_fraction=is_fraction, averaged=every))
    plots += [*_lengths(lines, every), *_step_time(lines, every), *_pass_at_k(run)]
    return sorted(plots, key=lambda plot: GROUPS.index(plot.group))


def common_plots(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Plot]:
    """Return the plots of any of the runs, with one curve for each run that has values."""
    by_title = [{plot.title: plot for plot in plots_of(run)} for run in runs]
    plots = []
    for title in dict.fromkeys(title for of_run in by_title for title in of_run):
        having = [(name, of_run[title]) for name, of_run in zip(names, by_title, strict=True) if title in of_run]
        curves = [_single(name, plot) for name, plot in having]
        averaged = max(plot.averaged for _, plot in having)
        plots.append(dataclasses.replace(having[0][1], curves=curves, stacked=False, averaged=averaged))
    return sorted(plots, key=lambda plot: GROUPS.index(plot.group))


def _single(name: str, plot: Plot) -> Curve:
    """Return the curve that represents a plot in a comparison with another run."""
    if plot.stacked:
        total = [sum(values) for values in zip(*(curve.y for curve in plot.curves), strict=True)]
        return Curve(name, plot.curves[0].x, total)
    curve = plot.curves[-1] if plot.group == EVALUATION else plot.curves[0]  # the trained model, or the mean
    return Curve(name, curve.x, curve.y)


def _base(validation: Sequence[Line]) -> Iterator[Line]:
    """Yield the validation results of the base model as metrics of step 0."""
    lines = [line for line in validation if line["step"] == 0]
    for metric, name in (("validation/reward", "reward"), ("validation/accuracy", "passed")):
        values = [line[name] for line in lines if isinstance(line.get(name), (int, float))]
        if values:
            yield {"step": 0, metric: sum(values) / len(values)}


def reward_names(lines: Sequence[Line]) -> list[str]:
    """Return the names of the rewards in the metrics."""
    names = dict.fromkeys(name for line in lines for name in line if name.startswith("rewards/"))
    return [name.removeprefix("rewards/").removesuffix("/mean") for name in names if name.endswith("/mean")]


def _rewards(lines: Sequence[Line], every: int) -> Iterator[Plot]:
    look_for = "Should rise. At a standard deviation near 0, a group teaches nothing."
    if curve := _curve(lines, "reward", "reward", every, "reward_std"):
        yield Plot("reward", LEARNING, "Reward", "weighted sum", look_for, [curve], averaged=every)
    for number, name in enumerate(reward_names(lines), start=1):
        if curve := _curve(lines, f"rewards/{name}/mean", name, every, f"rewards/{name}/std"):
            look_for = "One of the rewards, before its weight; if it never moves, it has no effect."
            key = f"reward-{number}-" + re.sub("[^A-Za-z0-9]+", "-", name)[:40].strip("-")
            is_fraction = all(0 <= value <= 1 for value in curve.y)
            yield Plot(key, LEARNING, name, "mean", look_for, [curve], is_fraction=is_fraction, averaged=every)


def _lengths(lines: Sequence[Line], every: int) -> Iterator[Plot]:
    metrics = (("mean", "mean_length"), ("longest", "max_length"), ("shortest", "min_length"))
    curves = [curve for name, key in metrics if (curve := _curve(lines, f"completions/{key}", name, every))]
    if curves:
        look_for = "A mean that runs to the limit, or to almost nothing, points to a reward that pays for length."
        yield Plot("length", COMPLETIONS, "Completion length", "tokens", look_for, curves, averaged=every)


def _step_time(lines: Sequence[Line], every: int) -> Iterator[Plot]:
    phases = ("rollouts", "rewards", "training")
    curves = [curve for name in phases if (curve := _curve(lines, f"time/{name}", name, every))]
    if len({tuple(curve.x) for curve in curves}) == 1:
        look_for = "Rollouts usually take most of it; if rewards are visible, make them faster."
        yield Plot("step-time", TIME, "Step time", "seconds", look_for, curves, stacked=True, averaged=every)


def _pass_at_k(run: RunFiles) -> Iterator[Plot]:
    report = read_report(run.folder / "evaluation")
    curves = [
        Curve(
            model.label,
            [point.k for point in model.curve],
            [point.value for point in model.curve],
            [point.interval[0] for point in model.curve],
            [point.interval[1] for point in model.curve],
            "the 95 % interval",
        )
        for model in (report.models if report else ())
        if len(model.curve) > 1
    ]
    if curves:
        look_for = "Curves that meet at the right: training made correct answers likelier, but solved no new problems."
        unit = "fraction"
        yield Plot("pass-at-k", EVALUATION, "pass@k", unit, look_for, curves, x_unit="k, samples", is_fraction=True)


def _curve(lines: Sequence[Line], metric: str, name: str, every: int, spread: str | None = None) -> Curve | None:
    """Return the curve of a metric over the lines that have it, with a band of one standard deviation."""
    having = [line for line in lines if _is_number(line.get(metric))]
    if not having:
        return None
    parts = [having[start : start + every] for start in range(0, len(having), every)]
    x, y = ([_mean(part, key) for part in parts] for key in ("step", metric))
    if spread is None or not all(_is_number(line.get(spread)) for line in having):
        return Curve(name, x, y)
    widths = [_mean(part, spread) for part in parts]
    low = [value - width for value, width in zip(y, widths, strict=True)]
    high = [value + width for value, width in zip(y, widths, strict=True)]
    return Curve(name, x, y, low, high, "one standard deviation")


def _mean(part: Sequence[Line], key: str) -> float:
    return sum(line[key] for line in part) / len(part)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
