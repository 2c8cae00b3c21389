"""The results of an evaluation that one process or several (ranks) write.

Each of R ranks samples every R-th unit, and appends the results to its own file next to the file of the evaluation:
`results.jsonl.rank1`. Rank 0 merges these files, also files that a killed evaluation has left. A single process appends
to the file of the evaluation itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.errors import UserError
from lora_grpo.evaluation.results import Result, has_failed
from lora_grpo.evaluation.units import SampleKey, Unit, sample_key
from lora_grpo.files import atomic, json_files

_REQUIRED: dict[str, Any] = {"task_id": str, "sample_index": (str, int), "passed": bool, "status": str}
"""The entries of a result that are needed to resume and to report, with their types."""


@dataclass(frozen=True)
class Share:
    """The part of the work that this process does."""

    units: list[Unit]
    path: Path
    """Where the process appends its results."""
    note: str
    """The end of the progress line's title."""


def share_of_this_process(path: Path, units: Sequence[Unit]) -> Share:
    """Return the part of the units that this process samples for the results file of an evaluation."""
    own_units = distributed.own_share(units)
    processes = distributed.world_size()
    if processes == 1:
        return Share(own_units, path, note="")
    rank_path = path.with_name(f"{path.name}.rank{distributed.rank()}")
    return Share(own_units, rank_path, note=f" (1 of {processes} processes)")


def merge_shares(path: Path, units: Sequence[Unit]) -> list[Result]:
    """Let rank 0 put the results of finished units in order, and remove everything else from the files.

    Returns:
        These results, on every rank.

    Raises:
        UserError: the file is damaged, or contains results of other rows.
    """
    return distributed.once(lambda: _merge(path, units))


def drop_failed(path: Path) -> None:
    """Let rank 0 remove the results whose agent failed from the files of an evaluation, so that they are played again.

    Raises:
        UserError: the file is damaged.
    """
    distributed.once(lambda: _drop_failed(path))


def _drop_failed(path: Path) -> None:
    for file in (path, *_rank_files(path)):
        results = json_files.read_finished_lines(file, **_REQUIRED)
        played = [result for result in results if not has_failed(result)]
        if len(played) < len(results):
            atomic.write_text(file, json_files.dump_lines(played))


def _merge(path: Path, units: Sequence[Unit]) -> list[Result]:
    results = read_results(path)
    expected_keys = {key for unit in units for key in unit.keys}
    if results.keys() - expected_keys:
        raise UserError(f"{path} contains results of other rows; delete it and run the command again")
    finished = []
    for unit in units:
        keys = unit.keys
        if all(key in results for key in keys):
            finished += [results[key] for key in keys]
    if results or path.exists():
        atomic.write_text(path, json_files.dump_lines(finished))
    for rank_file in _rank_files(path):
        rank_file.unlink()
    return finished


def read_results(path: Path) -> dict[SampleKey, Result]:
    """Return the results in a file and in the files of all ranks, which remain after a kill."""
    results = {}
    for file in (path, *_rank_files(path)):
        for result in json_files.read_finished_lines(file, **_REQUIRED):
            results[sample_key(result)] = result
    return results


def _rank_files(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.name}.rank*"))
