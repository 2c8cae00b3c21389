"""Two runs in one plot each: the first curve of every plot that both have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lora_grpo.report.plots import EVALUATED, Curve, Plot, plots_of
from lora_grpo.runs import RunFiles


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """Return what runs are called beside each other: by folder, and by number where two folders are called the same."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def common_plots(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Plot]:
    """Return the plots that any of the runs has, with a curve of each run that has it."""
    by_title = [{plot.title: plot for plot in plots_of(run)} for run in runs]
    titles = dict.fromkeys(title for found in by_title for title in found)
    plots = []
    for title in titles:
        having = [(name, found[title]) for name, found in zip(names, by_title, strict=True) if title in found]
        first = having[0][1]
        curves = [_one(name, plot) for name, plot in having]
        averaged = max(plot.averaged for _, plot in having)
        plots.append(dataclasses.replace(first, curves=curves, stacked=False, averaged=averaged))
    groups = list(dict.fromkeys(plot.group for plot in plots))
    return sorted(plots, key=lambda plot: groups.index(plot.group))


def _one(name: str, plot: Plot) -> Curve:
    """Return what stands for a plot beside another run's."""
    if plot.stacked:  # the whole of it
        whole = [sum(values) for values in zip(*(curve.y for curve in plot.curves), strict=True)]
        return Curve(name, plot.curves[0].x, whole)
    drawn = plot.curves[-1] if plot.group == EVALUATED else plot.curves[0]  # the trained model; a mean
    return Curve(name, drawn.x, drawn.y)
