"""A plot as a picture: drawn once, kept as SVG for the page and as PNG beside it."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from lora_grpo.report.plots import Curve, Plot
from lora_grpo.report.visible import visible

_INCHES = (4.6, 2.7)
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.14, 0.98, 0.17, 0.88
"""Where the axes lie, in shares of the picture: fixed, for a layout that is worked out takes as long as the drawing."""
_BARE = 0.06
"""Share of the height above that is empty where a title, a legend and a power of ten are not there."""
_PNG_DPI = 180
_COLOURS = {"ink": "#1b2026", "muted": "#5b6470", "line": "#dfe3e8"}
"""What the PNG has, and the SVG in a browser that knows no `--ink`; the page's stylesheet has both schemes."""
_SERIES = ("#0067a5", "#c8501e", "#11815f")
"""Blue, vermilion and green: apart for every kind of colour blindness, and by dash besides."""
_DASHES = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)))
_MARKED = 15
"""A curve of fewer points shows them."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lora_grpo",  # the same run gives the same bytes
    "text.parse_math": False,  # a reward may be called $x$
    "font.size": 9.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.unicode_minus": True,
    "axes.formatter.limits": (-3, 4),
    "text.color": _COLOURS["ink"],
    "axes.labelcolor": _COLOURS["muted"],
    "axes.edgecolor": _COLOURS["line"],
    "xtick.color": _COLOURS["line"],
    "ytick.color": _COLOURS["line"],
    "xtick.labelcolor": _COLOURS["muted"],
    "ytick.labelcolor": _COLOURS["muted"],
    "grid.color": _COLOURS["line"],
    "grid.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


@dataclass(frozen=True)
class Chart:
    """A plot that was drawn."""

    plot: Plot
    svg: str
    """An `<svg>` for inside a page, its colours the page's."""
    png: bytes

    @property
    def alt(self) -> str:
        """What the picture shows, in words."""
        return f"{self.plot.title}, {self.plot.unit} by {self.plot.x_unit}: " + "; ".join(
            visible(_said(curve)) for curve in self.plot.curves
        )


def draw(plot: Plot) -> Chart:
    """Draw a plot."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_INCHES, facecolor="none")
        axes = figure.add_axes((_LEFT, _BOTTOM, _RIGHT - _LEFT, _TOP - _BOTTOM), facecolor="none")
        _curves(axes, plot)
        axes.set_xlabel(plot.x_unit)
        axes.set_ylabel(plot.unit)
        axes.yaxis.set_label_coords(-0.115, 0.5)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.margins(x=0.02)
        axes.locator_params(axis="x", integer=True)
        if plot.is_share:
            axes.set_ylim(-0.03, 1.03)
        if len(plot.curves) > 1:
            keys: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
            axes.legend(ncols=len(plot.curves), frameon=False, handlelength=1.8, columnspacing=1.2, **keys)
        image = io.StringIO()
        figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None})
        figure.text(0.012, 0.985, visible(plot.title), fontsize=11, va="top")  # the page has it as a heading
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=_PNG_DPI, facecolor="white", metadata={"Software": None})
    read_out = {
        "left": _LEFT,
        "right": _RIGHT,
        "span": axes.get_xlim(),
        "unit": plot.x_unit,
        "curves": [{"name": visible(curve.name), "x": curve.x, "y": _digits(curve.y)} for curve in plot.curves],
    }
    crop = 0.0 if len(plot.curves) > 1 else _BARE
    return Chart(plot, _inline(image.getvalue(), plot.key, read_out, crop), picture.getvalue())


def _curves(axes: Any, plot: Plot) -> None:
    if plot.stacked:
        curves = plot.curves
        axes.stackplot(
            curves[0].x,
            [curve.y for curve in curves],
            labels=[visible(curve.name) for curve in curves],
            colors=_SERIES,
            alpha=0.85,
            linewidth=0,
        )
        axes.set_ylim(bottom=0)
        return
    for curve, colour, dash in zip(plot.curves, _SERIES, _DASHES, strict=False):
        if curve.low and curve.high:
            low, high = (
                [min(1.0, max(0.0, edge)) if plot.is_share else edge for edge in edges]
                for edges in (curve.low, curve.high)
            )
            axes.fill_between(curve.x, low, high, color=colour, alpha=0.16, linewidth=0)
        marker = "o" if len(curve.x) < _MARKED else None
        name = visible(curve.name)
        axes.plot(curve.x, curve.y, color=colour, linestyle=dash, linewidth=1.6, marker=marker, ms=3, label=name)


def _inline(svg: str, key: str, read_out: dict[str, Any], crop: float) -> str:
    """Make the file an element: ids of its own, colours of the page, nothing that is for a file.

    Args:
        svg: the file.
        key: what its ids begin with.
        read_out: what the page's script shows under the pointer.
        crop: share of its height that is cut off above.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{key}-", svg)
    for name, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    for number, colour in enumerate(_SERIES, start=1):
        svg = svg.replace(colour, f"var(--series-{number})")
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box
    width, height = float(box[1]), float(box[2])
    view = f"0 {crop * height:.2f} {width:.2f} {(1 - crop) * height:.2f}"
    told = json.dumps(read_out).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg viewBox="{view}" aria-hidden="true" data-curves="{told}">{svg[svg.index(">") + 1 :].strip()}'


def _digits(values: list[float]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


def _said(curve: Curve) -> str:
    numbers = [value for value in curve.y if math.isfinite(value)]
    if not numbers:
        return f"{curve.name} has no finite value"
    return (
        f"{curve.name} from {curve.y[0]:.4g} at {curve.x[0]:g} to {curve.y[-1]:.4g} at {curve.x[-1]:g}, "
        f"lowest {min(numbers):.4g}, highest {max(numbers):.4g}"
    )
