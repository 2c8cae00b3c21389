"""Draw a plot as a PNG image, for the page and as a file."""

import io
from dataclasses import dataclass
from typing import Any

from lora_grpo.files import printable
from lora_grpo.report.plots import Plot

_AXES = (0.14, 0.17, 0.84, 0.71)
"""Left, bottom, width and height as fractions of the figure. Fixed, as computing a layout takes as long as drawing."""
_COLORS = ("#0067a5", "#c8501e", "#11815f")
"""Blue, vermilion, and green, which are distinct for all types of color blindness. Each curve also has its own dash."""
_DASHES = ("-", "--", ":")
_MIN_POINTS_WITHOUT_MARKERS = 15
"""Curves with fewer points than this have markers."""

_TEXT = "#1b2026"
_SECONDARY_TEXT = "#5b6470"
_LINES = "#dfe3e8"
_STYLE: dict[str, Any] = {
    "text.parse_math": False,  # the name of a reward may be $x$
    "font.size": 9.5,
    "axes.formatter.limits": (-3, 4),
    "text.color": _TEXT,
    "axes.labelcolor": _SECONDARY_TEXT,
    "xtick.labelcolor": _SECONDARY_TEXT,
    "ytick.labelcolor": _SECONDARY_TEXT,
    "axes.edgecolor": _LINES,
    "grid.color": _LINES,
    "xtick.color": _LINES,
    "ytick.color": _LINES,
    "grid.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


@dataclass(frozen=True)
class Chart:
    """A plot with its image."""

    plot: Plot
    png: bytes
    """The content of a PNG file."""


def draw(plot: Plot) -> Chart:
    """Draw a plot. The same plot always gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.7))
        axes = figure.add_axes(_AXES)
        if plot.stacked:
            _draw_stacked_areas(axes, plot)
        else:
            _draw_lines(axes, plot)
        _set_up_axes(axes, plot)
        figure.text(0.012, 0.985, printable(plot.title), fontsize=11, va="top")

        # Without the version of matplotlib, which the PNG would otherwise name.
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=180, metadata={"Software": None})
    return Chart(plot, image.getvalue())


def _draw_stacked_areas(axes: Any, plot: Plot) -> None:
    steps = plot.curves[0].x
    names = [curve.name for curve in plot.curves]
    values = [curve.y for curve in plot.curves]
    axes.stackplot(steps, values, labels=names, colors=_COLORS, alpha=0.85, linewidth=0)
    axes.set_ylim(bottom=0)


def _draw_lines(axes: Any, plot: Plot) -> None:
    """Draw each curve as a line, with its band if it has one."""
    for curve, color, dash in zip(plot.curves, _COLORS, _DASHES, strict=False):
        if curve.low and curve.high:
            axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.16, linewidth=0)
        marker = "o" if len(curve.x) < _MIN_POINTS_WITHOUT_MARKERS else None
        label = printable(curve.name)
        axes.plot(curve.x, curve.y, color=color, linestyle=dash, linewidth=1.6, marker=marker, ms=3, label=label)


def _set_up_axes(axes: Any, plot: Plot) -> None:
    """Set labels, grid, ticks, limits and legend."""
    axes.set_xlabel(plot.x_unit)
    axes.set_ylabel(plot.unit)
    axes.yaxis.set_label_coords(-0.115, 0.5)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.margins(x=0.02)

    steps = {x for curve in plot.curves for x in curve.x}
    if len(steps) == 1:  # the axis would be shorter than 1, with ticks such as 0.96
        axes.set_xticks(list(steps))
    else:
        axes.locator_params(axis="x", integer=True)
    if plot.unit.startswith("fraction"):
        axes.set_ylim(-0.03, 1.03)

    num_curves = len(plot.curves)
    if num_curves > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=num_curves, frameon=False)
