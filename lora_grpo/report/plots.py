"""Select the curves to plot: metrics over training steps, each with a hint on what to look for, and pass@k over k."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.evaluation import Report
from lora_grpo.runs import Line, RunFiles


@dataclass(frozen=True)
class Curve:
    """One curve, y over x. NaN creates a gap."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    band: str = ""
    """Meaning of the band from `low` to `high`."""


@dataclass(frozen=True)
class Plot:
    key: str
    """The name of the plot's file."""
    group: str
    """The heading of the plot's section."""
    title: str
    unit: str
    look_for: str
    metrics: dict[str, str] = field(default_factory=dict)
    """The metric of each curve, by the curve's name."""
    curves: list[Curve] = field(default_factory=list)
    x_unit: str = "step"
    stacked: bool = False

    @property
    def caption(self) -> str:
        """A caption with a hint for reading the plot."""
        band = f"The band is {self.curves[0].band}." if self.curves[0].band else ""
        return f"{self.look_for} {band}".strip()


GROUPS = LEARNING, SIGNAL, COMPLETIONS, STABILITY, TIME, EVALUATION = (
    "Is it learning?",
    "Is there a learning signal?",
    "What does it write?",
    "Is training stable?",
    "Where does the time go?",
    "How good is it with more samples?",
)

_SFT_PLOTS = (
    Plot("sft-loss", LEARNING, "Loss on reference answers", "nats per token",
         "Should fall. If the validation accuracy falls at the same time, the model memorizes its rows.",
         {"loss": "loss"}),
    Plot("token-accuracy", LEARNING, "Token accuracy", "fraction of tokens",
         "How often the likeliest token is that of the reference answer.", {"token accuracy": "mean_token_accuracy"}),
)  # fmt: skip
_OF_SFT = ("validation-accuracy", "grad-norm")
"""The plots of `_PLOTS` that are meaningful for SFT as well."""

_PLOTS = (
    Plot("reward", LEARNING, "Reward", "weighted sum",
         "Should rise. At a standard deviation near 0, groups have no gradient.", {"reward": "reward"}),
    Plot("validation-reward", LEARNING, "Validation reward", "reward",
         "Should rise with the training reward; if it falls while the training reward rises, the reward is being "
         "hacked.", {"validation reward": "validation/reward"}),
    Plot("validation-accuracy", LEARNING, "Validation accuracy", "fraction passed",
         "The best adapter is the one with the best validation results.",
         {"validation accuracy": "validation/accuracy"}),
    Plot("zero-variance", SIGNAL, "Groups without variance", "fraction of groups",
         "A group whose completions all get the same reward has no gradient; above 0.8 little signal is left.",
         {"groups without variance": "frac_reward_zero_std"}),
    Plot("entropy", SIGNAL, "Entropy", "nats per token",
         "Falls as the model becomes more certain; near 0 it has stopped exploring.", {"entropy": "entropy"}),
    Plot("kl", SIGNAL, "KL from the start", "nats per token",
         "Distance of the policy from the start; a sudden rise often coincides with broken text.",
         {"kl from the start": "kl"}),
    Plot("clipped", COMPLETIONS, "Truncated completions", "fraction",
         "Near 1, most completions are truncated: raise --sampling.max-completion-tokens.",
         {"truncated completions": "completions/clipped_ratio"}),
    Plot("length", COMPLETIONS, "Completion length", "tokens",
         "A mean that runs to the limit, or to almost nothing, suggests that a reward depends on length.",
         {"mean": "completions/mean_length", "longest": "completions/max_length",
          "shortest": "completions/min_length"}),
    Plot("turns", COMPLETIONS, "Conversations", "per conversation",
         "Turns of the model and its tool calls; failed calls are malformed or raised an exception.",
         {"turns": "conversations/turns", "tool calls": "conversations/tool_calls",
          "failed calls": "conversations/failed_calls"}),
    Plot("ends", COMPLETIONS, "Ends of conversations", "fraction",
         "By the environment or the model (reply), at the limit of turns, or at the limit of tokens (budget).",
         {"reply": "conversations/ended_by_reply", "limit": "conversations/ended_by_limit",
          "budget": "conversations/ended_by_budget"}),
    Plot("mismatch", STABILITY, "Logprob mismatch", "nats per token",
         "Difference between the log-probabilities of sampler and trainer: should stay small.",
         {"logprob mismatch": "sampling/sampling_logp_difference/mean"}),
    Plot("grad-norm", STABILITY, "Gradient norm", "before clipping",
         "Spikes come from single batches; at 0 a step changes nothing.", {"gradient norm": "grad_norm"}),
    Plot("step-time", TIME, "Step time", "seconds",
         "The phases of a step.",
         {"rollouts": "time/rollouts", "rewards": "time/rewards", "training": "time/training"}, stacked=True),
)  # fmt: skip


def plots_of(run: RunFiles, evaluation: Report | None) -> list[Plot]:
    """Return the plots for which a run has values, by group."""
    lines = [*_base(run.validation), *run.metrics]
    plots, shown = [], [*_PLOTS, *_reward_plots(lines)]
    if method(run) == "sft":
        shown = [*_SFT_PLOTS, *(plot for plot in _PLOTS if plot.key in _OF_SFT)]
    for plot in shown:
        curves = [curve for name, metric in plot.metrics.items() if (curve := _curve(lines, metric, name))]
        if curves and not (plot.stacked and len({tuple(curve.x) for curve in curves}) > 1):
            plots.append(dataclasses.replace(plot, curves=curves))
    if evaluation and all(len(model.curve) > 1 for model in evaluation.models):
        plots.append(_pass_at_k(evaluation))
    return sorted(plots, key=lambda plot: GROUPS.index(plot.group))


def _base(validation: Sequence[Line]) -> Iterator[Line]:
    """Yield the validation results of the base model as metrics of step 0."""
    lines = [line for line in validation if line["step"] == 0]
    for metric, name in (("validation/reward", "reward"), ("validation/accuracy", "passed")):
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            yield {"step": 0, metric: sum(values) / len(values)}


def method(run: RunFiles) -> str:
    """Return the training method, `grpo` or `sft`."""
    return str(run.record["config"]["method"])


def reward_names(lines: Sequence[Line]) -> list[str]:
    """Return the names of the rewards in the metrics."""
    names = dict.fromkeys(name for line in lines for name in line if name.startswith("rewards/"))
    return [name.removeprefix("rewards/").removesuffix("/mean") for name in names if name.endswith("/mean")]


def is_number(value: Any) -> bool:
    """Return whether a line's value can be plotted. It is None if a reward graded no row of the step."""
    return isinstance(value, int | float)


def _reward_plots(lines: Sequence[Line]) -> Iterator[Plot]:
    for number, name in enumerate(reward_names(lines), start=1):
        key = f"reward-{number}-" + re.sub("[^A-Za-z0-9]+", "-", name)[:40].strip("-")
        look_for = "One of the rewards, before its weight; if it never moves, it has no effect." if number == 1 else ""
        yield Plot(key, LEARNING, name, "mean", look_for, {name: f"rewards/{name}/mean"})


def _pass_at_k(evaluation: Report) -> Plot:
    curves = []
    for model in evaluation.models:
        points = [(point.k, point.value, *point.interval) for point in model.curve]
        k, value, low, high = (list(column) for column in zip(*points, strict=True))
        curves.append(Curve(model.label, k, value, low, high, "the 95% interval"))
    look_for = "Curves that meet at the right: training made correct answers more likely, but solved no new problems."
    return Plot("pass-at-k", EVALUATION, "pass@k", "fraction", look_for, curves=curves, x_unit="k, samples")


def _curve(lines: Sequence[Line], metric: str, name: str) -> Curve | None:
    """Return the curve of a metric over the lines that have it. A reward has a band of one standard deviation."""
    having = [line for line in lines if is_number(line.get(metric))]
    if not having:
        return None
    x, y = [line["step"] for line in having], [line[metric] for line in having]
    spread = "reward_std" if metric == "reward" else f"{metric.removesuffix('/mean')}/std"
    if not all(is_number(line.get(spread)) for line in having):
        return Curve(name, x, y)
    low = [line[metric] - line[spread] for line in having]
    high = [line[metric] + line[spread] for line in having]
    return Curve(name, x, y, low, high, "one standard deviation")
