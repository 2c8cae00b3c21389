"""Draw a plot as SVG for the page and as a PNG file."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from lora_grpo.files import printable
from lora_grpo.report.plots import Plot

_LEFT, _RIGHT, _BOTTOM, _TOP = 0.14, 0.98, 0.17, 0.88
"""Position of the axes as fractions of the figure. Fixed, because computing a layout takes as long as drawing."""
_COLORS = {"ink": "#1b2026", "muted": "#5b6470", "line": "#dfe3e8"}
"""Colors of the PNG. In the SVG they become variables of the page's stylesheet, which also has a dark theme."""
_SERIES = ("#0067a5", "#c8501e", "#11815f")
"""Blue, vermilion, and green, which are distinct for all types of color blindness. Each curve also has its own dash."""
_DASHES = ("-", "--", ":")
_MARKED = 15
"""Curves with fewer points than this have markers."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "lora_grpo",  # the same run produces the same bytes
    "text.parse_math": False,  # the name of a reward may be $x$
    "font.size": 9.5,
    "axes.formatter.limits": (-3, 4),
    "text.color": _COLORS["ink"],
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _COLORS["muted"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _COLORS["line"]),
    "grid.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


@dataclass(frozen=True)
class Chart:
    plot: Plot
    svg: str
    """An `<svg>` element that uses the page's colors."""
    png: bytes

    @property
    def alt(self) -> str:
        """Alternative text for the image."""
        curves = "; ".join(
            f"{curve.name} from {curve.y[0]:.4g} at {curve.x[0]:g} to {curve.y[-1]:.4g} at {curve.x[-1]:g}"
            for curve in self.plot.curves
        )
        return printable(f"{self.plot.title}, {self.plot.unit} by {self.plot.x_unit}: {curves}")


def draw(plot: Plot) -> Chart:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.7), facecolor="none")
        axes = figure.add_axes((_LEFT, _BOTTOM, _RIGHT - _LEFT, _TOP - _BOTTOM), facecolor="none")
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
        image = io.StringIO()
        figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None})
        figure.text(0.012, 0.985, printable(plot.title), fontsize=11, va="top")  # the page shows it as a heading
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=180, facecolor="white", metadata={"Software": None})
    read_out = {
        "left": _LEFT,
        "right": _RIGHT,
        "span": axes.get_xlim(),
        "unit": plot.x_unit,
        "curves": [{"name": printable(curve.name), "x": curve.x, "y": _digits(curve.y)} for curve in plot.curves],
    }
    return Chart(plot, _inline(image.getvalue(), plot.key, read_out), picture.getvalue())


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


def _inline(svg: str, key: str, read_out: dict[str, Any]) -> str:
    """Return an SVG file as an element of the page. The page's script shows the values of `read_out` at the pointer."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{key}-", svg)
    for name, color in _COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    for number, color in enumerate(_SERIES, start=1):
        svg = svg.replace(color, f"var(--series-{number})")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box
    data = json.dumps(read_out).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg {box[0]} aria-hidden="true" data-curves="{data}">{svg[svg.index(">") + 1 :].strip()}'


def _digits(values: list[float]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
