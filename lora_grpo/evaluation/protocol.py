"""What two evaluations must share for their scores to be comparable: rows, prompts, sampling, grading and seed."""

from lora_grpo import __version__
from lora_grpo.config import DataConfig
from lora_grpo.evaluation.schema import Schema
from lora_grpo.sampling import SamplingParams
from lora_grpo.tasks import get_task, task_sha256, task_title


class Sampling(Schema):
    """How completions were sampled."""

    prompt_style: str | None
    """None for a task with its own prompts, such as a task file."""
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
    """How answers are graded, in one phrase; see `Task.grading`."""
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
    task = get_task(data.evaluation_task)
    sampling = None
    if params:
        sampling = Sampling(
            prompt_style=None if task.has_own_prompts else data.prompt_style,
            few_shot=data.few_shot,
            num_samples=params.num_samples,
            temperature=params.temperature,
            top_p=params.top_p,
            max_completion_tokens=params.max_tokens,
            max_turn_tokens=params.max_turn_tokens,
        )
    return Protocol(
        task=task_title(data.evaluation_task),
        task_sha256=task_sha256(data.evaluation_task),
        rows=rows,
        data_sha256=data_sha256,
        data_source=data.eval,
        sampling=sampling,
        grading=task.grading,
        sandbox=sandbox,
        seed=seed,
    )
