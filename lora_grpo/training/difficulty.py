"""`--data.filter-by-difficulty`: train only on rows that the base model sometimes solves.

GRPO learns little from other rows.
"""

from collections.abc import Sequence

from lora_grpo import console
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
    prompts, they repeat in seeded passes. The order of a longer run begins with the order of a shorter one. Samples
    are saved in the run's `filter/` folder as they are generated, counts in run.json.
    """
    config, sampling = run.config, run.config.sampling
    size, wanted = sampling.num_generations, config.train.max_steps * config.train.prompts_per_step
    params = SamplingParams.of(sampling, size)
    order = prompt_order(len(rows), len(rows), config.seed)
    kept: list[Row] = []
    passes: list[int] = []
    run.filter.mkdir(exist_ok=True)
    for start in range(0, len(rows), _CHUNK):
        if len(kept) >= wanted:
            break
        chunk = [rows[index] for index in order[start : start + _CHUNK]]
        path = run.filter / f"{start // _CHUNK:05d}.samples.jsonl"
        title = f"difficulty, {len(kept)} of {wanted} rows kept"
        asked = (path, sampler, chunk, config.data.task, params, config.seed, title)
        solved = count_passed(sample_and_grade(*asked, adapter=config.lora.from_ is not None), chunk)
        kept += [row for row, passed in zip(chunk, solved, strict=True) if 0 < passed < size]
        passes += solved
    sampled, always, never = len(passes), passes.count(size), passes.count(0)
    run.update(filter={"rows": sampled, "kept": len(kept), "always": always, "never": never, "samples_per_row": size})
    summary = f"of {sampled} rows the base solves {len(kept)} sometimes, {always} always and {never} never"
    if len(kept) < config.train.prompts_per_step:
        other = "easier" if never > always else "harder"
        raise RunError(
            f"{summary}: too few for --train.prompts-per-step {config.train.prompts_per_step}; with --overwrite, train "
            f"on {other} rows ({source_of_rows(config.data.task)}) or leave --data.filter-by-difficulty out"
        )
    console.note(f"filter: {summary}")
    again = prompt_order(len(kept), max(0, wanted - len(kept)), config.seed)
    return [kept[index] for index in [*range(len(kept)), *again][:wanted]]
