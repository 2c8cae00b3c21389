"""Tasks: rows to answer, prompts, and one grader for training and evaluation."""

from lora_grpo.tasks import gsm8k, mbpp
from lora_grpo.tasks.chat import (
    DEFAULT_STYLE,
    SYSTEM_PROMPTS,
    Message,
    add_prompts,
    check_style,
    read_completion,
    render,
    render_row,
    write_completion,
)
from lora_grpo.tasks.code_grading import Outcome, check_tests, run_sources, run_tests
from lora_grpo.tasks.gsm8k import find_answers
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
    "DEFAULT_STYLE",
    "SYSTEM_PROMPTS",
    "TASK_NAMES",
    "UNGRADED_TASKS",
    "Data",
    "Message",
    "Outcome",
    "Row",
    "Verdict",
    "add_prompts",
    "check_style",
    "check_tests",
    "find_answers",
    "fingerprint",
    "fit_to_context",
    "get_task",
    "grade_all",
    "gsm8k",
    "load_data",
    "load_evaluation_rows",
    "mbpp",
    "prompt_order",
    "read_completion",
    "render",
    "render_row",
    "run_sources",
    "run_tests",
    "runs_programs",
    "split_validation",
    "start_sandbox",
    "write_completion",
]
