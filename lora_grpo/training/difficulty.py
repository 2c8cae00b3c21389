"""`--data.filter-by-difficulty`: train only on rows that the base model sometimes solves.

GRPO learns little from other rows.
"""

import math
from collections.abc import Sequence

from lora_grpo import console
from lora_grpo.config import parse_grpo_overrides
from lora_grpo.data import prompt_order
from lora_grpo.errors import RunError
from lora_grpo.evaluation import PassCount, count_passed, sample_and_grade
from lora_grpo.grading import Row
from lora_grpo.runs import Run
from lora_grpo.sampling import Sampler, SamplingParams
from lora_grpo.tasks import source_of_rows

_CHUNK = 128
"""Number of rows sampled at a time. Each chunk has its own file."""


def filter_by_difficulty(run: Run, sampler: Sampler, rows: Sequence[Row]) -> list[Row]:
    """Return rows that the base model sometimes solves, one for each prompt of the run, in training order.

    Rows are sampled in training order with training's sampling settings. If fewer rows are kept than the run has
    prompts, they repeat in seeded passes. Steps that use the same rollouts (`num_iterations`) share their prompts. The
    order of a longer run begins with the order of a shorter one. Samples are saved in the run's `filter/` folder as
    they are generated, counts in run.json.
    """
    config = run.config
    group_size = config.sampling.num_generations
    uses_of_rollouts = parse_grpo_overrides(config.grpo).get("num_iterations", 1)
    num_rollouts = math.ceil(config.train.max_steps / uses_of_rollouts)  # steps that sample
    num_wanted = num_rollouts * config.train.prompts_per_step
    params = SamplingParams.of(config.sampling, group_size)
    order = prompt_order(len(rows), len(rows), config.seed)

    # Sample chunk by chunk, until there are enough rows.
    kept_rows: list[Row] = []
    counts: list[PassCount] = []  # of each sampled row
    run.filter.mkdir(exist_ok=True)
    for start in range(0, len(rows), _CHUNK):
        if len(kept_rows) >= num_wanted:
            break
        chunk = [rows[index] for index in order[start : start + _CHUNK]]
        samples = sample_and_grade(
            run.filter / f"{start // _CHUNK:05d}.samples.jsonl",
            sampler,
            chunk,
            config.data.task,
            params,
            config.seed,
            f"difficulty, {len(kept_rows)} of {num_wanted} rows kept",
            adapter=config.lora.from_ is not None,
        )
        counts_of_chunk = count_passed(samples, chunk)
        for row, count in zip(chunk, counts_of_chunk, strict=True):
            if 0 < count.passed < count.samples:
                kept_rows.append(row)
        counts += counts_of_chunk

    num_sampled = len(counts)
    num_failed = sum(count.samples == 0 for count in counts)  # the agent failed in all episodes of the row
    num_always = sum(count.passed == count.samples for count in counts) - num_failed
    num_never = sum(count.passed == 0 for count in counts) - num_failed
    run.update(
        filter={
            "rows": num_sampled,
            "kept": len(kept_rows),
            "always": num_always,
            "never": num_never,
            "samples_per_row": group_size,
        }
    )
    solved = f"{len(kept_rows)} sometimes, {num_always} always and {num_never} never"
    summary = f"of {num_sampled} rows the base solves {solved}"
    if num_failed:
        summary += f", and in {num_failed} the agent always failed"
    if len(kept_rows) < config.train.prompts_per_step:
        other_rows = "easier" if num_never > num_always else "harder"
        raise RunError(
            f"{summary}: too few for --train.prompts-per-step {config.train.prompts_per_step}; with --overwrite, train "
            f"on {other_rows} rows ({source_of_rows(config.data.task)}) or leave --data.filter-by-difficulty out"
        )
    console.note(f"filter: {summary}")

    # Repeat the rows that are kept if the run has more prompts.
    num_missing = max(0, num_wanted - len(kept_rows))
    repeated = prompt_order(len(kept_rows), num_missing, config.seed)
    indices = [*range(len(kept_rows)), *repeated]
    return [kept_rows[index] for index in indices[:num_wanted]]
