"""Sample and grade evaluation rows. Results are written as they are produced, so a killed evaluation resumes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lora_grpo import distributed
from lora_grpo.errors import RunError
from lora_grpo.evaluation.results import GREEDY, Result, sampled, task_id
from lora_grpo.files import atomic, json_files
from lora_grpo.models import BASE
from lora_grpo.progress import Progress
from lora_grpo.runs import Run
from lora_grpo.sampling import SampledTokens, Sampler, SamplingParams, completion_seed
from lora_grpo.tasks import Row, chat, grade_all

_UNIT = 256
"""Number of completions between two writes. A killed evaluation repeats at most this many."""
_STREAMED_UNIT = 64
"""Number of completions between two writes for a sampler that streams completions."""


@dataclass(frozen=True)
class RowSampling(SamplingParams):
    """How each row is sampled. One completion if the temperature is 0."""

    name: str = ""
    """The `draw` of a single sample in a file with numbered samples; empty for numbered samples."""

    @property
    def names(self) -> tuple[str | int, ...]:
        """The `draw` of each sample of a row."""
        return (self.name,) if self.name else tuple(range(self.num_samples))


@dataclass(frozen=True)
class _Unit:
    """Rows that are sampled together. A unit is either complete or repeated."""

    sampling: RowSampling
    rows: tuple[Row, ...]

    @property
    def keys(self) -> list[tuple[str, str | int]]:
        return [(task_id(row), name) for row in self.rows for name in self.sampling.names]


def evaluate(run: Run, sampler: Sampler, rows: Sequence[Row], name: str) -> list[Result]:
    """Evaluate the policy of a run on its evaluation rows: one greedy sample and `eval.num_samples` others per row.

    Args:
        run: the open run. Results are written to `evaluation/<name>.samples.jsonl`, rows to `evaluation/rows.jsonl`.
        sampler: samples from the current policy.
        rows: R evaluation rows with `prompt`.
        name: `base` (without the adapter) or `trained`.

    Returns:
        R x (num_samples + 1) samples.

    Raises:
        RunError: the file contains results of other rows.
    """
    config = run.config
    run.evaluation.mkdir(exist_ok=True)
    if distributed.is_main():
        kept = ({"task_id": task_id(row), **{key: row.get(key) for key in ("question", "answer")}} for row in rows)
        atomic.write_text(run.evaluation / "rows.jsonl", json_files.dump_lines(kept))
    longest = config.sampling.max_completion_tokens
    requested = [RowSampling(1, 0.0, 1.0, longest, GREEDY)]
    if config.eval.num_samples:
        requested.append(RowSampling(config.eval.num_samples, config.eval.temperature, config.eval.top_p, longest))
    path = run.evaluation / f"{name}.samples.jsonl"
    task = config.data.evaluation_task
    return sample_and_grade(path, sampler, rows, task, requested, config.seed, name, adapter=name != BASE)


def sample_and_grade(
    path: Path,
    sampler: Sampler,
    rows: Sequence[Row],
    task: str,
    requested: Sequence[RowSampling],
    seed: int,
    title: str,
    *,
    adapter: bool,
) -> list[Result]:
    """Sample and grade every row, and append the results to a file. Samples in the file are not repeated.

    The seed of a completion depends only on the evaluation seed, the row id and the sample number. Two models therefore
    use the same seeds, and a smaller evaluation is a subset of a larger one. If the sampler decodes in batches, a
    resumed evaluation uses the same batches as an uninterrupted one, so rounding is also the same. If there are several
    processes, each writes its share to a file next to `path`, and rank 0 merges the files.

    Args:
        path: the results file.
        sampler: samples from the current model.
        rows: R rows with `prompt`.
        task: the task that grades the rows.
        requested: one or more sampling settings, each of which is applied to every row.
        seed: seed of the evaluation.
        title: name of the evaluated model, for the progress line.
        adapter: if False, sample from the base model.

    Returns:
        The results of every row, in an order that does not depend on interruptions.

    Raises:
        RunError: the file contains results of other rows.
    """
    units = list(_units(rows, requested, sampler.streams))
    kept = distributed.broadcast_from_main(lambda: _kept(path, units))
    total = sum(len(unit.keys) for unit in units)
    if len(kept) == total:
        return kept
    if kept:
        print(f"{path}: {len(kept)} of {total} samples are done", file=sys.stderr)
    finished = {(sample["task_id"], sample["draw"]) for sample in kept}
    todo = [unit for unit in units if unit.keys[0] not in finished][distributed.rank() :: distributed.world_size()]
    if sampler.streams:  # submit all rows at once; the engine schedules them
        todo = [
            _Unit(sampling, tuple(unit.rows[0] for unit in same))
            for sampling, same in groupby(todo, key=lambda unit: unit.sampling)
        ]
    prompts = {row["id"]: chat.render_row(sampler.tokenizer, row) for row in rows}
    samples, passed = kept, sum(sample["passed"] for sample in kept)
    own, mine = path, total
    if distributed.world_size() > 1:
        own = path.with_name(f"{path.name}.rank{distributed.rank()}")
        mine = len(kept) + sum(len(unit.keys) for unit in todo)
        title += f" (1 of {distributed.world_size()} processes)"
    progress = Progress(mine, f"evaluating {title}")
    with contextlib.closing(progress), own.open("a", encoding="utf-8") as file, sampler.awake(adapter=adapter):
        sampler.fit_batch(list(prompts.values()), max(sampling.max_tokens for sampling in requested))
        for unit in todo:
            for part in _sample_parts(sampler, unit, prompts, seed):
                verdicts = grade_all(
                    task,
                    [rollout.text for _, rollouts in part for rollout in rollouts],
                    [row for row, rollouts in part for _ in rollouts],
                )
                graded = iter(verdicts)
                new = [
                    sampled(task, row, name, rollout.text, next(graded))
                    | {"num_tokens": len(rollout.token_ids), "truncated": rollout.truncated}
                    for row, rollouts in part
                    for name, rollout in zip(unit.sampling.names, rollouts, strict=True)
                ]
                json_files.append_lines(file, new)
                samples += new
                passed += sum(sample["passed"] for sample in new)
                progress.show(len(samples), f"{passed / len(samples):.1%} pass")
    return distributed.broadcast_from_main(lambda: _kept(path, units))


def finished_samples(path: Path, rows: Sequence[Row], requested: Sequence[RowSampling]) -> list[Result] | None:
    """Return the results of a finished evaluation, or None if any are missing. See `sample_and_grade` for arguments."""
    keys = [key for unit in _units(rows, requested, streams=False) for key in unit.keys]
    found = _found(path)
    return [found[key] for key in keys] if found.keys() == set(keys) else None


def _sample_parts(
    sampler: Sampler, unit: _Unit, prompts: dict[str, str], seed: int
) -> Iterator[list[tuple[Row, list[SampledTokens]]]]:
    """Yield the rows of a unit with their completions, in parts that are written together."""
    sampling, part = unit.sampling, []
    seeds = [completion_seed(seed, row["id"], name) for row in unit.rows for name in sampling.names]
    for index, samples in sampler.stream([prompts[row["id"]] for row in unit.rows], sampling, seeds):
        part.append((unit.rows[index], samples))
        if sampler.streams and len(part) * sampling.num_samples >= _STREAMED_UNIT:
            yield part
            part = []
    if part:
        yield part


def _units(rows: Sequence[Row], requested: Sequence[RowSampling], streams: bool) -> Iterator[_Unit]:
    """Split the work into units of rows with similar length, so that batches need little padding."""
    ordered = sorted(rows, key=lambda row: (len(row["question"]), row["id"]))
    for sampling in requested:
        size = 1 if streams else max(1, _UNIT // sampling.num_samples)
        for start in range(0, len(ordered), size):
            yield _Unit(sampling, tuple(ordered[start : start + size]))


def _shares(path: Path) -> list[Path]:
    """Return the files of all ranks. They remain after a kill, and any number of ranks can resume from them."""
    return sorted(path.parent.glob(f"{path.name}.rank*"))


def _found(path: Path) -> dict[tuple[str, str | int], Result]:
    found = [sample for file in (path, *_shares(path)) for sample in json_files.read_finished_lines(file)]
    needed = {"task_id", "draw", "passed"}
    if not all(isinstance(sample, dict) and needed <= sample.keys() for sample in found):
        raise RunError(f"{path} has a line that is not a result; delete it and run the command again")
    return {(sample["task_id"], sample["draw"]): sample for sample in found}


def _kept(path: Path, units: Sequence[_Unit]) -> list[Result]:
    """Return the results of finished units in order, and remove everything else from the file."""
    shares = _shares(path)
    if not path.exists() and not shares:
        return []
    found = _found(path)
    if found.keys() - {key for unit in units for key in unit.keys}:
        raise RunError(f"{path} holds results of other rows; delete it and run the command again")
    kept = [found[key] for unit in units if all(key in found for key in unit.keys) for key in unit.keys]
    text = json_files.dump_lines(kept)
    if shares or path.read_text(encoding="utf-8", errors="replace") != text:
        atomic.write_text(path, text)
    for share in shares:
        share.unlink()
    return kept
