"""What is drawn of a run: curves over its steps, each with what to look for, and pass@k over k."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.evaluation import read_report
from lora_grpo.runs import Line, RunFiles

MOST_POINTS = 600
"""Points of one curve; a longer one has the means of equally many steps."""


@dataclass(frozen=True)
class Curve:
    """One curve, y over x; NaN is a gap."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    """Lower edge of a band around it."""
    high: list[float] | None = None
    """Upper edge of the band."""
    band: str = ""
    """What the band is."""


@dataclass(frozen=True)
class Plot:
    """One plot."""

    key: str
    """Name of its file."""
    group: str
    title: str
    unit: str
    """What the y axis is in."""
    look_for: str
    """One sentence for whoever reads it."""
    curves: list[Curve] = field(default_factory=list)
    x_unit: str = "step"
    stacked: bool = False
    is_share: bool = False
    """Whether all values lie between 0 and 1."""
    averaged: int = 1
    """Steps that one point is the mean of."""

    @property
    def caption(self) -> str:
        """What to look for, and what is drawn."""
        said = [self.look_for]
        if self.curves[0].band:
            said.append(f"The band is {self.curves[0].band}.")
        if self.averaged > 1:
            said.append(f"A point is the mean of {self.averaged} steps.")
        return " ".join(said)


LEARNS, CAN_LEARN, WRITES, SOUND, TIME, EVALUATED = (
    "Does it learn?",
    "Can it still learn?",
    "What does it write?",
    "Is training sound?",
    "Where does the time go?",
    "How good is it with more attempts?",
)

_OF_ONE_METRIC = (
    # group, key, metric, title, unit, share, what to look for
    (LEARNS, "held-out-reward", "validation/reward", "Held-out reward", "reward", False,
     "Should rise with the training reward; falling while that one rises is reward hacking."),
    (LEARNS, "held-out-accuracy", "validation/accuracy", "Held-out accuracy", "share passed", True,
     "The best adapter is where the held-out figures are highest."),
    (CAN_LEARN, "zero-variance", "frac_reward_zero_std", "Groups without variance", "share of groups", True,
     "A group whose completions all earn the same teaches nothing; above 0.8 hardly any signal is left."),
    (CAN_LEARN, "entropy", "entropy", "Entropy", "nats a token", False,
     "Falls as the model makes up its mind; near 0 it has stopped exploring."),
    (CAN_LEARN, "kl", "kl", "KL from the base", "nats a token", False,
     "How far the policy has moved; a sudden climb is a policy that leaves the language behind."),
    (WRITES, "clipped", "completions/clipped_ratio", "Completions cut off", "share", True,
     "Near 1, answers do not fit: raise --sampling.max-completion-tokens."),
    (SOUND, "mismatch", "sampling/sampling_logp_difference/mean", "Sampler against trainer", "nats a token", False,
     "How far their log-probabilities are apart: flat and small where both hold one policy."),
    (SOUND, "grad-norm", "grad_norm", "Gradient norm", "before clipping", False,
     "Spikes are steps that one batch dominated; zero is a step that taught nothing."),
    (SOUND, "learning-rate", "learning_rate", "Learning rate", "rate", False, "The schedule, as it was asked for."),
    (SOUND, "loss", "loss", "Loss", "GRPO loss", False, "Says little in GRPO: it need not fall."),
)  # fmt: skip


def plots_of(run: RunFiles) -> list[Plot]:
    """Return the plots that a run has values for, in the order in which they are read."""
    every = max(1, math.ceil(len(run.metrics) / MOST_POINTS))
    lines = [*_base(run.validation), *run.metrics]
    found = [*_rewards(lines, every)]
    for group, key, metric, title, unit, share, look_for in _OF_ONE_METRIC:
        if curve := _curve(lines, metric, title.lower(), every):
            found.append(Plot(key, group, title, unit, look_for, [curve], is_share=share, averaged=every))
    found += [*_lengths(lines, every), *_phases(lines, every), *_pass_at_k(run)]
    order = (LEARNS, CAN_LEARN, WRITES, SOUND, TIME, EVALUATED)
    return sorted(found, key=lambda plot: order.index(plot.group))


def _base(validation: Sequence[Line]) -> Iterator[Line]:
    """Yield what the base earned on the held-out rows, as metrics of step 0."""
    asked = [line for line in validation if line["step"] == 0]
    for metric, name in (("validation/reward", "reward"), ("validation/accuracy", "passed")):
        values = [line[name] for line in asked if isinstance(line.get(name), (int, float))]
        if values:
            yield {"step": 0, metric: sum(values) / len(values)}


def reward_parts(lines: Sequence[Line]) -> list[str]:
    """Return the names of the rewards that metrics have a mean of."""
    names = dict.fromkeys(name for line in lines for name in line if name.startswith("rewards/"))
    return [name.removeprefix("rewards/").removesuffix("/mean") for name in names if name.endswith("/mean")]


def _rewards(lines: Sequence[Line], every: int) -> Iterator[Plot]:
    look_for = "Should rise. Where its spread closes, completions no longer differ and nothing more is learned."
    if curve := _curve(lines, "reward", "reward", every, "reward_std"):
        yield Plot("reward", LEARNS, "Reward", "weighted sum", look_for, [curve], averaged=every)
    for number, name in enumerate(reward_parts(lines), start=1):
        if curve := _curve(lines, f"rewards/{name}/mean", name, every, f"rewards/{name}/std"):
            about = "A part of the reward, before its weight; one that never moves teaches nothing."
            key = f"reward-{number}-" + re.sub("[^A-Za-z0-9]+", "-", name)[:40].strip("-")
            share = all(0 <= value <= 1 for value in curve.y)
            yield Plot(key, LEARNS, name, "mean", about, [curve], is_share=share, averaged=every)


def _lengths(lines: Sequence[Line], every: int) -> Iterator[Plot]:
    metrics = (("mean", "mean_length"), ("longest", "max_length"), ("shortest", "min_length"))
    curves = [_curve(lines, f"completions/{metric}", name, every) for name, metric in metrics]
    drawn = [curve for curve in curves if curve]
    if drawn:
        look_for = "A mean that runs to the limit, or to almost nothing, is a reward that pays for length."
        yield Plot("length", WRITES, "Completion length", "tokens", look_for, drawn, averaged=every)


def _phases(lines: Sequence[Line], every: int) -> Iterator[Plot]:
    phases = [_curve(lines, f"time/{name}", name, every) for name in ("rollouts", "rewards", "training")]
    drawn = [curve for curve in phases if curve]
    if len({tuple(curve.x) for curve in drawn}) == 1:
        look_for = "Rollouts usually take most; rewards that show at all are worth making faster."
        yield Plot("step-time", TIME, "Step time", "seconds", look_for, drawn, stacked=True, averaged=every)


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
        look_for = "Curves that meet at the right: training made the likely answer right, and taught nothing new."
        yield Plot("pass-at-k", EVALUATED, "pass@k", "share", look_for, curves, x_unit="k, samples", is_share=True)


def _curve(lines: Sequence[Line], metric: str, name: str, every: int, spread: str | None = None) -> Curve | None:
    """Return the curve of a metric over the lines that have it, with the band of its standard deviation."""
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
