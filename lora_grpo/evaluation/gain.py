"""How much of a gain comes from the answer format.

A trained model may pass more often because it is more often correct, or only because it writes correct answers in the
format that the grading rule reads. A sample is correct in any format if it passes. A sample without an answer that the
rule can read is correct in any format if it ended by itself and the `flexible` rule reads the correct number. With the
means over problems

    gain        = passed after - passed before
    other       = correct in any format after - correct in any format before
    from format = gain - other

`flexible` reads the last number of a text, which may be correct by chance. It therefore counts only for samples without
a readable answer: an answer that was read and is wrong, a hedge or a truncated text counts as wrong. Programs, and task
files without a `flexible` rule, are graded in one way only, so their format is not separated.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.measurement import UNPARSED, main_pass_counts
from lora_grpo.evaluation.results import Result
from lora_grpo.evaluation.schema import Bounds, Schema

FORMAT_NOTE = (
    "From the format: correct answers that the grading rule could not read, before minus after. They are read as the "
    "last number of the text, which may be correct by chance."
)


class Part(Schema):
    """The gain or a part of it, as a fraction."""

    name: str
    value: float
    interval: Bounds


def split_gain(before: Sequence[Result], after: Sequence[Result], seed: int) -> list[Part]:
    """Return the gain between the samples of two models, the part from the format, and the other part.

    Greedy samples count only if there are no others. Empty if the format cannot be separated.
    """
    if not any("flexible" in result for result in before):
        return []
    gain = _pass_rates(after) - _pass_rates(before)
    other = _pass_rates(_in_any_format(after)) - _pass_rates(_in_any_format(before))
    return [
        _part("gain in pass@1", gain, seed),
        _part("from the format", gain - other, seed),
        _part("other", other, seed),
    ]


def _pass_rates(results: Sequence[Result]) -> NDArray[np.float64]:
    """Return the fraction of passing samples of each problem: (P,), in the order of the ids."""
    return np.array([count.rate for count in main_pass_counts(results).values()])


def _in_any_format(results: Sequence[Result]) -> list[Result]:
    """Return the results as if the grading rule had read the correct answers that it could not read."""
    as_if_read = []
    for result in results:
        ended_by_itself = not result.get("truncated")
        has_correct_number = ended_by_itself and result.get("flexible") is True
        is_correct_but_unread = has_correct_number and result["status"] in UNPARSED
        as_if_read.append({**result, "passed": result["passed"] or is_correct_but_unread})
    return as_if_read


def _part(name: str, changes: NDArray[np.float64], seed: int) -> Part:
    """Return the mean of the changes (P,). Each part is such a mean, so the paired bootstrap applies to it too."""
    interval = pass_at_k.difference_interval(np.zeros(changes.size), changes, seed=seed)
    return Part(name=name, value=float(changes.mean()), interval=list(interval))
