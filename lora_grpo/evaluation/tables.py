"""Tables of reports, for the terminal, Markdown and HTML."""

from collections.abc import Mapping
from typing import NamedTuple

from lora_grpo.evaluation.comparison import Comparison
from lora_grpo.evaluation.schema import percent


class Table(NamedTuple):
    """The cells of a table, as text."""

    headings: list[str]
    rows: list[tuple[str, ...]]


def comparison_cells(comparison: Comparison) -> tuple[str, str, str]:
    """Return before, after and difference of a metric, with their intervals, as percentages."""
    return (
        percent(comparison.before, comparison.before_interval),
        percent(comparison.after, comparison.after_interval),
        percent(comparison.difference, comparison.difference_interval, "+"),
    )


def count_cell(name: str, counts: Mapping[str, float]) -> str:
    """Return an entry of `Measurement.sample_stats`: a mean, or a count as a percentage of the samples and a number.

    Empty if there are no samples of this kind.
    """
    if not counts:
        return ""
    value = counts.get(name, 0)
    if name.startswith("mean "):
        return f"{value:.1f}"
    return f"{100 * value / counts['samples']:.1f} ({value:g})"
