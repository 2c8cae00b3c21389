"""Select the curves to plot: the metrics over training steps of page/plots.toml, and pass@k over k."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
    methods: Sequence[str] = ("grpo",)
    """The training methods with these metrics: `grpo`, `sft`."""
    stacked: bool = False

    @property
    def caption(self) -> str:
        """A caption with a hint for reading the plot."""
        band = f"The band is {self.curves[0].band}." if self.curves[0].band else ""
        return f"{self.look_for} {band}".strip()

    @property
    def alt(self) -> str:
        """Alternative text for the image."""
        curves = "; ".join(
            f"{curve.name} from {curve.y[0]:.4g} at {curve.x[0]:g} to {curve.y[-1]:.4g} at {curve.x[-1]:g}"
            for curve in self.curves
        )
        return f"{self.title}, {self.unit} by {self.x_unit}: {curves}"


LEARNING, EVALUATION = "Is it learning?", "How good is it with more samples?"
"""The headings of the first and the last section. The others are in page/plots.toml."""


def plots_of(run: RunFiles, evaluation: Report | None) -> list[Plot]:
    """Return the plots for which a run has values, by group."""
    lines = [*_base(run.validation), *run.metrics]
    known = tomllib.loads((Path(__file__).parent / "page" / "plots.toml").read_text(encoding="utf-8"))["plots"]
    shown = [plot for plot in (Plot(**entry) for entry in known) if method(run) in plot.methods]
    sections = [*dict.fromkeys(plot.group for plot in shown), EVALUATION]
    plots = []
    for plot in [*shown, *(_reward_plots(lines) if method(run) == "grpo" else ())]:
        curves = [curve for name, metric in plot.metrics.items() if (curve := _curve(lines, metric, name))]
        if curves and not (plot.stacked and len({tuple(curve.x) for curve in curves}) > 1):
            plots.append(dataclasses.replace(plot, curves=curves))
    if evaluation and all(len(model.curve) > 1 for model in evaluation.models):
        plots.append(_pass_at_k(evaluation))
    return sorted(plots, key=lambda plot: sections.index(plot.group))


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
    return isinstance(value, int | float) and not abs(value) > 1e99


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
