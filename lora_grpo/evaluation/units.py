"""The work of an evaluation, in units: rows that are sampled and written together. A unit is complete or repeated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lora_grpo.evaluation.results import GREEDY, Result, problem_id
from lora_grpo.grading import Row
from lora_grpo.sampling import SamplingParams

UNIT_SIZE = 256
"""Number of completions between two writes. A killed evaluation repeats at most this many."""

SampleIndex = str | int
"""The `sample_index` of a result: "greedy" or the number of the sample."""
SampleKey = tuple[str, SampleIndex]
"""`task_id` and `sample_index`, which identify a result of an evaluation."""


@dataclass(frozen=True)
class Unit:
    """Rows that are sampled together."""

    params: SamplingParams
    sample_indices: tuple[SampleIndex, ...]
    """The `sample_index` of each sample of a row."""
    rows: tuple[Row, ...]

    @property
    def keys(self) -> list[SampleKey]:
        """The keys of the unit's results, in order."""
        return [(problem_id(row), index) for row in self.rows for index in self.sample_indices]


def sample_key(result: Result) -> SampleKey:
    return result["task_id"], result["sample_index"]


def split_units(rows: Sequence[Row], params: SamplingParams, *, greedy: bool, streams: bool) -> list[Unit]:
    """Split the work into units of rows with similar length, so that batches need little padding.

    Args:
        params: how the numbered samples are sampled. With `num_samples` 0, there are none.
        greedy: whether each row also has a greedy sample. The units of greedy samples come first.
        streams: whether the sampler schedules rows by itself. A unit then is one row.
    """
    by_length = sorted(rows, key=lambda row: (len(row["question"]), row["id"]))
    units = []
    if greedy:
        greedy_params = replace(params, num_samples=1, temperature=0.0, top_p=1.0)
        units += _split(by_length, greedy_params, (GREEDY,), streams=streams)
    if params.num_samples:
        units += _split(by_length, params, tuple(range(params.num_samples)), streams=streams)
    return units


def _split(
    rows: Sequence[Row], params: SamplingParams, sample_indices: tuple[SampleIndex, ...], *, streams: bool
) -> list[Unit]:
    rows_per_unit = 1 if streams else max(1, UNIT_SIZE // len(sample_indices))
    starts = range(0, len(rows), rows_per_unit)
    return [Unit(params, sample_indices, tuple(rows[start : start + rows_per_unit])) for start in starts]
