"""Tasks: rows, prompts, and the graders that training and evaluation share.

    start_sandbox(config.data, config.sandbox)            # only tasks that run programs need it
    data = load_data(config)                              # rows with prompts, both splits
    text = chat.render_row(tokenizer, data.train[0])      # what the model continues
    (verdict,) = grade_all("gsm8k", [completion], [data.train[0]])

A task is a module with three functions, the `Task` protocol: `load` returns rows, `grade` returns a verdict,
`gold_completion` returns a completion that must pass. To add a task, write such a module and list it in `registry`.

registry.py          the protocol, `Verdict`, lookup by name
loading.py           rows of a run: disjoint splits, validation rows, prompt order, fingerprints
sources.py           records from JSON-lines files and the Hub; sampling
chat.py              prompt styles: messages, rendering, writing and reading completions
gsm8k.py             word problems with a number as the answer; strict, flexible and robust rules
humaneval.py         functions to complete
mbpp.py              short programs
starter.py           the starter's word problems; starter_code.py: its code problems
prompts.py           prompts without correct answers
code_grading.py      programs run against unit tests in the sandbox
code_extraction.py   from a completion to its program; program_text.py: Python text and syntax trees
"""

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
