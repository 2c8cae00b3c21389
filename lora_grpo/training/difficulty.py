"""`--data.filter-by-difficulty`: train only on rows that the base model sometimes solves.

GRPO learns little from other rows.
"""

import math
from collections.abc import Sequence

from lora_grpo import console
from lora_grpo.config import parse_grpo_overrides
from lora_grpo.data import prompt_order
from lora_grpo.errors import RunError
from lora_grpo.evaluation import count_passed, sample_and_grade
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
    times_solved: list[int] = []  # of each sampled row
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
        times_solved_of_chunk = count_passed(samples, chunk)
        for row, passed in zip(chunk, times_solved_of_chunk, strict=True):
            if 0 < passed < group_size:
                kept_rows.append(row)
        times_solved += times_solved_of_chunk

    num_sampled = len(times_solved)
    num_always = times_solved.count(group_size)
    num_never = times_solved.count(0)
    run.update(
        filter={
            "rows": num_sampled,
            "kept": len(kept_rows),
            "always": num_always,
            "never": num_never,
            "samples_per_row": group_size,
        }
    )
    counts = f"{len(kept_rows)} sometimes, {num_always} always and {num_never} never"
    summary = f"of {num_sampled} rows the base solves {counts}"
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
