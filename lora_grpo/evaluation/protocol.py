"""What two evaluations must share for their scores to be comparable: rows, prompts, sampling, grading and seed."""

from lora_grpo import __version__
from lora_grpo.config import DataConfig
from lora_grpo.evaluation.schema import Schema
from lora_grpo.sampling import SamplingParams
from lora_grpo.tasks import CODE_TASKS, TaskFile, get_task, task_sha256, task_title


class Sampling(Schema):
    """How completions were sampled."""

    prompt_style: str | None
    """None for a task file, which writes its own prompts."""
    few_shot: int
    num_samples: int
    temperature: float
    top_p: float
    max_completion_tokens: int
    max_turn_tokens: int | None = None


class Protocol(Schema):
    """The settings that two evaluations must share for their scores to be comparable."""

    task: str
    task_sha256: str | None = None
    """SHA-256 of the task file; None for built-in tasks."""
    rows: int
    data_sha256: str
    data_source: str | None = None
    """File or Hub dataset of the rows; None for the task's own dataset."""
    sampling: Sampling | None = None
    """None for files of samples."""
    grading: str
    sandbox: str | None = None
    """How programs were isolated; None if no programs were run."""
    seed: int
    """Seed of the rows, the samples and the intervals."""
    limit: int | None = None
    """The `--limit`, if it excluded rows. Such a report is not published."""
    version: str = __version__


def make_protocol(
    data: DataConfig,
    params: SamplingParams | None,
    rows: int,
    seed: int,
    *,
    data_sha256: str,
    sandbox: str | None = None,
) -> Protocol:
    """Return the protocol of an evaluation. For `seed`, `data_sha256` and `sandbox`, see `Protocol`.

    Args:
        params: None for a file of samples.
        rows: number of rows that are evaluated.
    """
    task = data.evaluation_task
    sampling = None
    if params:
        sampling = Sampling(
            prompt_style=None if isinstance(get_task(task), TaskFile) else data.prompt_style,
            few_shot=data.few_shot,
            num_samples=params.num_samples,
            temperature=params.temperature,
            top_p=params.top_p,
            max_completion_tokens=params.max_tokens,
            max_turn_tokens=params.max_turn_tokens,
        )
    return Protocol(
        task=task_title(task),
        task_sha256=task_sha256(task),
        rows=rows,
        data_sha256=data_sha256,
        data_source=data.eval,
        sampling=sampling,
        grading=_grading(task),
        sandbox=sandbox,
        seed=seed,
    )


def _grading(task: str) -> str:
    """Return how the answers of a task are graded, in one phrase."""
    if task in CODE_TASKS:
        return "the last code block, or a file's completion as it is, against the unit tests in the sandbox"
    definition = get_task(task)
    if isinstance(definition, TaskFile):
        grader = "check"
        if definition.environment:
            grader = "Environment"
        elif definition.agent:
            grader = "AGENT" if definition.agent.command else "agent"
        return f"`{grader}` in {definition.path.name}"
    return "the number after the last ####, \\boxed{} or <answer>, or in a final statement, by value (`robust`)"
