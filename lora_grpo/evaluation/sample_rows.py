"""Sample and grade rows, and append the results to a file that a killed evaluation resumes from."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from lora_grpo.evaluation import units
from lora_grpo.evaluation.measurement import PassCount, pass_counts
from lora_grpo.evaluation.results import Result, append_batches, episode_result, has_failed, problem_id
from lora_grpo.evaluation.shares import merge_shares, read_results, share_of_this_process
from lora_grpo.evaluation.units import SampleIndex, Unit, sample_key, split_units
from lora_grpo.grading import Row
from lora_grpo.rollouts import Episode, fit_batch, grade, has_agent, play
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed
from lora_grpo.tasks import get_task


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
    resumed evaluation uses the same batches as an uninterrupted one, so rounding is also the same. Several processes
    share the work; see `shares`.

    Args:
        title: name of the evaluated model, for the progress line.
        adapter: if False, sample from the base model.
        greedy: also decode each row greedily, besides the samples with `params`.

    Returns:
        The results in an order that does not depend on interruptions.

    Raises:
        UserError: the file is damaged, or contains results of other rows.
    """
    all_units = split_units(rows, params, greedy=greedy, streams=sampler.streams)
    finished = merge_shares(path, all_units)
    if len(finished) == sum(len(unit.keys) for unit in all_units):
        return finished

    # A unit is finished as a whole or not at all, so it is enough to look for its first sample.
    finished_keys = {sample_key(result) for result in finished}
    unfinished = [unit for unit in all_units if unit.keys[0] not in finished_keys]
    share = share_of_this_process(path, unfinished)
    total = len(finished) + sum(len(unit.keys) for unit in share.units)
    if has_agent(rows[0]):
        _count_earlier(task, finished)
    units_to_sample = _join(share.units) if sampler.streams else share.units
    with sampler.awake(adapter=adapter):
        fit_batch(sampler, rows, params)
        batches = _sample(sampler, units_to_sample, task, seed)
        append_batches(share.path, finished, batches, total, f"evaluating {title}{share.note}")
    return merge_shares(path, all_units)


def finished_samples(path: Path, rows: Sequence[Row], params: SamplingParams) -> list[Result] | None:
    """Return the results of a finished evaluation, or None if any are missing. See `sample_and_grade` for arguments."""
    results = read_results(path)
    all_units = split_units(rows, params, greedy=False, streams=False)
    keys = [key for unit in all_units for key in unit.keys]
    if results.keys() != set(keys):
        return None
    return [results[key] for key in keys]


def count_passed(results: Sequence[Result], rows: Sequence[Row]) -> list[PassCount]:
    """Count the samples of each row, without the greedy ones and those whose agent failed."""
    counts = pass_counts([result for result in results if not has_failed(result)], greedy=False)
    return [counts.get(problem_id(row), PassCount(0, 0)) for row in rows]


def _count_earlier(task: str, finished: Sequence[Result]) -> None:
    """Tell the agents of a task what was played before: MAX_FAILED is a fraction of the whole evaluation."""
    from lora_grpo import agents  # loads a web server

    definition = get_task(task).agent
    assert definition is not None
    agents.count_earlier(definition, sum(not has_failed(result) for result in finished))


def _join(unfinished: Sequence[Unit]) -> list[Unit]:
    """Join the greedy units, and those of numbered samples, so that an engine that streams gets all rows at once."""
    joined = []
    for _, same_kind in groupby(unfinished, key=lambda unit: (unit.params, unit.sample_indices)):
        parts = list(same_kind)
        rows = tuple(row for part in parts for row in part.rows)
        joined.append(Unit(parts[0].params, parts[0].sample_indices, rows))
    return joined


def _sample(sampler: Sampler, units_to_sample: Sequence[Unit], task: str, seed: int) -> Iterator[list[Result]]:
    """Sample and grade units. Yield lists of results that are written together.

    A sampler that decodes in batches writes a whole unit. One that streams writes whenever enough rows are done.
    """
    for unit in units_to_sample:
        seeds = [completion_seed(seed, row["id"], index) for row in unit.rows for index in unit.sample_indices]
        batch: list[tuple[SampleIndex, Episode]] = []
        for num_done, (_, episodes) in enumerate(play(sampler, unit.rows, unit.params, seeds), start=1):
            batch += zip(unit.sample_indices, episodes, strict=True)
            is_last = num_done == len(unit.rows)
            if is_last or (sampler.streams and len(batch) >= units.UNIT_SIZE):
                yield _grade(task, batch)
                batch = []


def _grade(task: str, batch: Sequence[tuple[SampleIndex, Episode]]) -> list[Result]:
    verdicts = grade(task, [episode for _, episode in batch])
    return [
        episode_result(task, index, episode, verdict) for (index, episode), verdict in zip(batch, verdicts, strict=True)
    ]
