"""Sample and grade evaluation rows, and append the results to a file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import DataConfig, RunConfig
from lora_grpo.data import other_task
from lora_grpo.errors import UserError
from lora_grpo.evaluation.joint import ALSO, Joint, make_joint
from lora_grpo.evaluation.measurement import counts_by_task
from lora_grpo.evaluation.report import Graded, Report, make_protocol, make_report, write_report
from lora_grpo.evaluation.results import GREEDY, Result, append, problem_id, sampled
from lora_grpo.files import atomic, json_files
from lora_grpo.grading import Row
from lora_grpo.models import BASE, START, adapter_sha256
from lora_grpo.rollouts import Episode, fit_batch, grade, play
from lora_grpo.runs import Run
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed
from lora_grpo.tasks import task_title

_UNIT = 256
"""Number of completions between two writes. A killed evaluation repeats at most this many."""

_Index = str | int
"""The `sample_index` of a result: "greedy" or the number of the sample."""


@dataclass(frozen=True)
class _Unit:
    """Rows that are sampled together. A unit is either complete or repeated."""

    params: SamplingParams
    indices: tuple[_Index, ...]
    """The `sample_index` of each sample of a row."""
    rows: tuple[Row, ...]

    @property
    def keys(self) -> list[tuple[str, _Index]]:
        return [(problem_id(row), index) for row in self.rows for index in self.indices]


def evaluate(
    run: Run, sampler: Sampler, rows: Sequence[Row], name: str, also: Mapping[str, Sequence[Row]] | None = None
) -> list[Result]:
    """Evaluate the policy of a run on its evaluation rows: one greedy sample and `eval.num_samples` others per row.

    Results are written to `evaluation/<name>.samples.jsonl`, rows to `evaluation/rows.jsonl`. The name is `base`
    (before training: without the adapter, or with the one that the run starts from) or `trained`. Returns
    R x (num_samples + 1) results for R rows. Greedy samples of the tasks in `also` are in `evaluation/joint/also`.
    """
    config = run.config
    run.evaluation.mkdir(exist_ok=True)
    if distributed.is_main():
        kept = ({"task_id": problem_id(row), **{key: row.get(key) for key in ("question", "answer")}} for row in rows)
        atomic.write_text(run.evaluation / "rows.jsonl", json_files.dump_lines(kept))
    from_adapter = config.lora.from_ is not None
    title = START if name == BASE and from_adapter else name
    seconds, began = run.record.get("evaluation_seconds", {}), run.seconds_worked

    def sample(path: Path, rows: Sequence[Row], task: str, params: SamplingParams, title: str) -> list[Result]:
        adapter = from_adapter or name != BASE
        return sample_and_grade(path, sampler, rows, task, params, config.seed, title, adapter=adapter, greedy=True)

    path, params = run.evaluation / f"{name}.samples.jsonl", _params(config)
    results = sample(path, rows, config.data.evaluation_task, params, title)
    for task, others in (also or {}).items():
        path = _also_path(run, task, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        sample(path, others, task, replace(params, num_samples=0), f"{title} on {task_title(task)}")
    if name not in seconds:
        run.update(evaluation_seconds=seconds | {name: round(run.seconds_worked - began, 3)})
    return results


def report_run(run: Run, before: Sequence[Result], after: Sequence[Result]) -> tuple[Report, Joint | None]:
    """Compare the samples of a run's base and trained model; write and return the report, and that of `eval.also`."""
    config, policy = run.config, run.record["policy"]
    base = {"model": policy["base_model"], "weights_sha256": policy.get("fingerprint"), **policy}
    trained = base | {"adapter_sha256": adapter_sha256(run.adapter)}
    label = BASE
    if start := policy.get("start_sha256"):
        label, base = START, base | {"adapter_sha256": start}

    def compared(data: DataConfig, digest: Any, params: SamplingParams, *results: Sequence[Result]) -> Report:
        rows = len({sample["task_id"] for sample in results[0]})
        record = run.record["data"] | {"eval": {"sha256": digest}}
        protocol = make_protocol(data, record, params, rows, config.seed)
        models = Graded("trained", results[1], trained, protocol), Graded(label, results[0], base, protocol)
        return make_report(config.eval.k if params.num_samples else (), *models)

    params, record = _params(config), run.record["data"]
    report = compared(config.data, record["eval"]["sha256"], params, before, after)
    write_report(run.evaluation, report)
    others, params = list[Report](), replace(params, num_samples=0)
    for task in config.eval.also:
        found = (json_files.read_finished_lines(_also_path(run, task, name)) for name in (BASE, "trained"))
        others.append(compared(other_task(config.data, task), record["also"][task], params, *found))
    if not others:
        return report, None
    joint = make_joint(others)
    joint.write(run.evaluation / ALSO)
    return report, joint


def _also_path(run: Run, task: str, name: str) -> Path:
    """Return the file with the samples of a task in `eval.also`; `name` is `base` or `trained`."""
    return run.evaluation / ALSO / f"{task_title(task)}.{name}.samples.jsonl"


def count_passed(results: Sequence[Result], rows: Sequence[Row]) -> list[int]:
    """Return the number of passing samples of each row, without the greedy ones."""
    counts = counts_by_task(results, greedy=False)
    return [counts[problem_id(row)][1] for row in rows]


def sample_and_grade(
    path: Path,
    sampler: Sampler,
    rows: Sequence[Row],
    task: str,
    params: SamplingParams,
    seed: int,
    title: str,
    *,
    adapter: bool,
    greedy: bool = False,
) -> list[Result]:
    """Sample and grade every row, and append the results to a file. Samples in the file are not repeated.

    The seed of a completion depends only on the evaluation seed, the row id and the sample number. Two models therefore
    use the same seeds, and a smaller evaluation is a subset of a larger one. If the sampler decodes in batches, a
    resumed evaluation uses the same batches as an uninterrupted one, so rounding is also the same. If there are several
    processes, each writes its part to a file next to `path`, and rank 0 merges the files.

    Args:
        title: name of the evaluated model, for the progress line.
        adapter: if False, sample from the base model.
        greedy: also decode each row greedily, besides the samples with `params`.

    Returns:
        The results in an order that does not depend on interruptions.

    Raises:
        UserError: the file is damaged, or contains results of other rows.
    """
    units = _units(rows, params, greedy=greedy, streams=sampler.streams)
    kept = distributed.broadcast_from_main(lambda: _kept(path, units))
    total = sum(len(unit.keys) for unit in units)
    if len(kept) == total:
        return kept
    finished = {(sample["task_id"], sample["sample_index"]) for sample in kept}
    todo = [unit for unit in units if unit.keys[0] not in finished][distributed.rank() :: distributed.world_size()]
    own, mine = path, total
    if distributed.world_size() > 1:
        own = path.with_name(f"{path.name}.rank{distributed.rank()}")
        mine = len(kept) + sum(len(unit.keys) for unit in todo)
        title += f" (1 of {distributed.world_size()} processes)"
    if sampler.streams:  # submit all rows at once; the engine schedules them
        todo = [
            _Unit(params, indices, tuple(unit.rows[0] for unit in same))
            for (params, indices), same in groupby(todo, key=lambda unit: (unit.params, unit.indices))
        ]
    with sampler.awake(adapter=adapter):
        fit_batch(sampler, rows, params)
        new = _graded(sampler, todo, task, seed)
        append(own, kept, new, mine, f"evaluating {title}")
    return distributed.broadcast_from_main(lambda: _kept(path, units))


def finished_samples(path: Path, rows: Sequence[Row], params: SamplingParams) -> list[Result] | None:
    """Return the results of a finished evaluation, or None if any are missing. See `sample_and_grade` for arguments."""
    found, units = _found(path), _units(rows, params, greedy=False, streams=False)
    keys = [key for unit in units for key in unit.keys]
    return [found[key] for key in keys] if found.keys() == set(keys) else None


def _graded(sampler: Sampler, units: Sequence[_Unit], task: str, seed: int) -> Iterator[list[Result]]:
    """Sample and grade units. Yield lists of results that are written together."""
    for unit in units:
        seeds = [completion_seed(seed, row["id"], index) for row in unit.rows for index in unit.indices]
        part: list[tuple[_Index, Episode]] = []
        for done, (_, episodes) in enumerate(play(sampler, unit.rows, unit.params, seeds), start=1):
            part += zip(unit.indices, episodes, strict=True)
            if done == len(unit.rows) or (sampler.streams and len(part) >= _UNIT):
                verdicts = grade(task, [episode for _, episode in part])
                yield [sampled(task, *each, verdict) for each, verdict in zip(part, verdicts, strict=True)]
                part = []


def _params(config: RunConfig) -> SamplingParams:
    settings, sampling = config.eval, config.sampling
    tokens = sampling.max_completion_tokens, sampling.max_turn_tokens
    return SamplingParams(settings.num_samples, settings.temperature, settings.top_p, *tokens)


def _units(rows: Sequence[Row], params: SamplingParams, *, greedy: bool, streams: bool) -> list[_Unit]:
    """Split the work into units of rows with similar length, so that batches need little padding."""
    ordered = sorted(rows, key=lambda row: (len(row["question"]), row["id"]))
    settings: list[tuple[SamplingParams, tuple[_Index, ...]]] = []
    if greedy:
        settings.append((replace(params, num_samples=1, temperature=0.0, top_p=1.0), (GREEDY,)))
    if params.num_samples:
        settings.append((params, tuple(range(params.num_samples))))
    units = []
    for of_unit, indices in settings:
        size = 1 if streams else max(1, _UNIT // len(indices))
        starts = range(0, len(ordered), size)
        units += [_Unit(of_unit, indices, tuple(ordered[start : start + size])) for start in starts]
    return units


def _found(path: Path) -> dict[tuple[str, _Index], Result]:
    """Return the results in a file and in the files of all ranks, which remain after a kill."""
    required: dict[str, Any] = {"task_id": str, "sample_index": (str, int), "passed": bool, "status": str}
    files = (path, *path.parent.glob(f"{path.name}.rank*"))
    found = [sample for file in files for sample in json_files.read_finished_lines(file, **required)]
    return {(sample["task_id"], sample["sample_index"]): sample for sample in found}


def _kept(path: Path, units: Sequence[_Unit]) -> list[Result]:
    """Return the results of finished units in order, and remove everything else from the file."""
    found = _found(path)
    if found.keys() - {key for unit in units for key in unit.keys}:
        raise UserError(f"{path} contains results of other rows; delete it and run the command again")
    kept = [found[key] for unit in units if all(key in found for key in unit.keys) for key in unit.keys]
    if found or path.exists():
        atomic.write_text(path, json_files.dump_lines(kept))
    for share in path.parent.glob(f"{path.name}.rank*"):
        share.unlink()
    return kept
