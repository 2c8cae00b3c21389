"""Select the curves to plot: the metrics over training steps of page/plots.toml, and pass@k over k."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_grpo.evaluation import Report
from lora_grpo.report.metrics import is_number, reward_metric, reward_names, training_method
from lora_grpo.runs import Line, RunFiles

_PLOTS = Path(__file__).parent / "page" / "plots.toml"

LEARNING = "Is it learning?"
"""The heading of the first section."""
EVALUATION = "How good is it with more samples?"
"""The heading of the last section. The others are in page/plots.toml."""


@dataclass(frozen=True)
class Curve:
    """One curve, y over x. NaN creates a gap."""

    name: str
    x: list[float]
    """Training steps, or k of pass@k."""
    y: list[float]
    low: list[float] | None = None
    """Lower end of a band around the curve, at each x."""
    high: list[float] | None = None
    """Upper end of the band."""
    band: str = ""
    """Meaning of the band from `low` to `high`."""


@dataclass(frozen=True)
class Plot:
    """A plot of one or more curves over the same x."""

    key: str
    """The name of the plot's file."""
    group: str
    """The heading of the plot's section."""
    title: str
    unit: str
    """Unit of y."""
    look_for: str
    """What a reader should look for."""
    metrics: dict[str, str] = field(default_factory=dict)
    """The metric of each curve, by the curve's name."""
    curves: list[Curve] = field(default_factory=list)
    """The curves of a run; empty until `plots_of` adds them."""
    x_unit: str = "step"
    methods: Sequence[str] = ("grpo",)
    """The training methods with these metrics: `grpo`, `sft`."""
    stacked: bool = False
    """Whether the curves are parts of a sum, drawn as areas on top of each other."""

    @property
    def caption(self) -> str:
        """A caption with a hint for reading the plot."""
        band = self.curves[0].band
        if not band:
            return self.look_for
        return f"{self.look_for} The band is {band}.".strip()

    @property
    def alt(self) -> str:
        """Alternative text for the image."""
        curves = "; ".join(
            f"{curve.name} from {curve.y[0]:.4g} at {curve.x[0]:g} to {curve.y[-1]:.4g} at {curve.x[-1]:g}"
            for curve in self.curves
        )
        return f"{self.title}, {self.unit} by {self.x_unit}: {curves}"


def plots_of(run: RunFiles, evaluation: Report | None) -> list[Plot]:
    """Return the plots for which a run has values, by group."""
    method = training_method(run)
    metrics = [*_base_validation(run.validation), *run.metrics]

    # What to plot: the table of plots, and one plot for each reward.
    table = tomllib.loads(_PLOTS.read_text(encoding="utf-8"))["plots"]
    plots_in_table = [Plot(**entry) for entry in table]
    candidates = [plot for plot in plots_in_table if method in plot.methods]
    sections = list(dict.fromkeys(plot.group for plot in candidates))
    sections.append(EVALUATION)
    if method == "grpo":
        candidates += _reward_plots(metrics)

    # Keep the plots with values. Areas can be stacked only over the same steps.
    plots = []
    for plot in candidates:
        curves = _curves(plot, metrics)
        if not curves:
            continue
        if plot.stacked and any(curve.x != curves[0].x for curve in curves):
            continue
        plots.append(dataclasses.replace(plot, curves=curves))

    if evaluation and all(len(model.curve) > 1 for model in evaluation.models):
        plots.append(_pass_at_k_plot(evaluation))
    return sorted(plots, key=lambda plot: sections.index(plot.group))


def _base_validation(validation: Sequence[Line]) -> Iterator[Line]:
    """Yield the mean validation results of the base model as metrics of step 0, without rows whose agent failed."""
    base_lines = [line for line in validation if line["step"] == 0 and "failure" not in line]
    for metric, entry in (("validation/reward", "reward"), ("validation/accuracy", "passed")):
        values = [line[entry] for line in base_lines if line.get(entry) is not None]
        if values:
            yield {"step": 0, metric: sum(values) / len(values)}


def _reward_plots(metrics: Sequence[Line]) -> Iterator[Plot]:
    """Yield a plot for each reward. Only the first explains what to look for."""
    look_for = "One of the rewards, before its weight; if it never moves, it has no effect."
    for number, name in enumerate(reward_names(metrics), start=1):
        file_name_part = re.sub("[^A-Za-z0-9]+", "-", name)[:40].strip("-")
        yield Plot(
            key=f"reward-{number}-{file_name_part}",
            group=LEARNING,
            title=name,
            unit="mean",
            look_for=look_for,
            metrics={name: reward_metric(name)},
        )
        look_for = ""


def _pass_at_k_plot(evaluation: Report) -> Plot:
    look_for = "Curves that meet at the right: training made correct answers more likely, but solved no new problems."
    curves = []
    for model in evaluation.models:
        curve = Curve(
            model.label,
            x=[point.k for point in model.curve],
            y=[point.value for point in model.curve],
            low=[point.interval[0] for point in model.curve],
            high=[point.interval[1] for point in model.curve],
            band="the 95% interval",
        )
        curves.append(curve)
    return Plot(
        key="pass-at-k",
        group=EVALUATION,
        title="pass@k",
        unit="fraction",
        look_for=look_for,
        curves=curves,
        x_unit="k, samples",
    )


def _curves(plot: Plot, metrics: Sequence[Line]) -> list[Curve]:
    """Return the curves of the plot's metrics that have values."""
    curves = []
    for name, metric in plot.metrics.items():
        lines = [line for line in metrics if is_number(line.get(metric))]
        if lines:
            curves.append(_curve(name, metric, lines))
    return curves


def _curve(name: str, metric: str, lines: Sequence[Line]) -> Curve:
    """Return a metric's curve over lines that have it. A reward has a band of one standard deviation."""
    steps = [line["step"] for line in lines]
    values = [line[metric] for line in lines]

    deviation_metric = "reward_std" if metric == "reward" else f"{metric.removesuffix('/mean')}/std"
    if not all(is_number(line.get(deviation_metric)) for line in lines):
        return Curve(name, steps, values)
    return Curve(
        name,
        steps,
        values,
        low=[line[metric] - line[deviation_metric] for line in lines],
        high=[line[metric] + line[deviation_metric] for line in lines],
        band="one standard deviation",
    )
