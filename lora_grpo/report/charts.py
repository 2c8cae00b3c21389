"""Draw a plot as a PNG image, for the page and as a file."""

import io
from typing import Any

from lora_grpo.files import printable
from lora_grpo.report.plots import Plot

_AXES = (0.14, 0.17, 0.84, 0.71)
"""Left, bottom, width and height as fractions of the figure. Fixed, as computing a layout takes as long as drawing."""
_SERIES = ("#0067a5", "#c8501e", "#11815f")
"""Blue, vermilion, and green, which are distinct for all types of color blindness. Each curve also has its own dash."""
_DASHES = ("-", "--", ":")
_MARKED = 15
"""Curves with fewer points than this have markers."""
_STYLE: dict[str, Any] = {
    "text.parse_math": False,  # the name of a reward may be $x$
    "font.size": 9.5,
    "axes.formatter.limits": (-3, 4),
    "text.color": "#1b2026",
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), "#5b6470"),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), "#dfe3e8"),
    "grid.linewidth": 0.7,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
}


Chart = tuple[Plot, bytes]
"""A plot and its PNG image."""


def draw(plot: Plot) -> Chart:
    """Draw a plot. The same plot always gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.7))
        axes = figure.add_axes(_AXES)
        _curves(axes, plot)
        axes.set_xlabel(plot.x_unit)
        axes.set_ylabel(plot.unit)
        axes.yaxis.set_label_coords(-0.115, 0.5)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.margins(x=0.02)
        steps = {x for curve in plot.curves for x in curve.x}
        if len(steps) == 1:  # the axis would be shorter than 1, with ticks such as 0.96
            axes.set_xticks([*steps])
        else:
            axes.locator_params(axis="x", integer=True)
        if plot.unit.startswith("fraction"):
            axes.set_ylim(-0.03, 1.03)
        if len(plot.curves) > 1:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(plot.curves), frameon=False)
        figure.text(0.012, 0.985, printable(plot.title), fontsize=11, va="top")
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=180, metadata={"Software": None})
    return plot, image.getvalue()


def _curves(axes: Any, plot: Plot) -> None:
    if plot.stacked:
        names, values = [curve.name for curve in plot.curves], [curve.y for curve in plot.curves]
        axes.stackplot(plot.curves[0].x, values, labels=names, colors=_SERIES, alpha=0.85, linewidth=0)
        axes.set_ylim(bottom=0)
        return
    for curve, color, dash in zip(plot.curves, _SERIES, _DASHES, strict=False):
        if curve.low and curve.high:
            axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.16, linewidth=0)
        marker = "o" if len(curve.x) < _MARKED else None
        name = printable(curve.name)
        axes.plot(curve.x, curve.y, color=color, linestyle=dash, linewidth=1.6, marker=marker, ms=3, label=name)
