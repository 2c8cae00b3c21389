"""Tasks: rows to answer, prompts, and one grader for training and evaluation."""

from lora_grpo.tasks import chat, code_grading, gsm8k, mbpp
from lora_grpo.tasks.loading import (
    Data,
    fingerprint,
    fit_to_context,
    load_data,
    load_evaluation_rows,
    prompt_order,
    split_validation,
    start_sandbox,
)
from lora_grpo.tasks.registry import (
    CODE_TASKS,
    TASK_NAMES,
    UNGRADED_TASKS,
    Row,
    Verdict,
    get_task,
    grade_all,
    runs_programs,
)

__all__ = [
    "CODE_TASKS",
    "TASK_NAMES",
    "UNGRADED_TASKS",
    "Data",
    "Row",
    "Verdict",
    "chat",
    "code_grading",
    "fingerprint",
    "fit_to_context",
    "get_task",
    "grade_all",
    "gsm8k",
    "load_data",
    "load_evaluation_rows",
    "mbpp",
    "prompt_order",
    "runs_programs",
    "split_validation",
    "start_sandbox",
]
