"""Tasks: rows, prompts, and the graders that training and evaluation share.

    start_sandbox(config.data, config.sandbox)            # only tasks that run programs need it
    data = load_data(config)                              # rows with prompts, both splits
    text = chat.render_row(tokenizer, data.train[0])      # the text that the model continues
    (verdict,) = grade_all("gsm8k", [completion], [data.train[0]])

A task is a module with the three functions of the `Task` protocol: `load` returns rows, `check` returns a verdict, and
`gold` returns a completion that must pass. A user's file is such a module too (`task_file.py`). To add a built-in
task, create `tasks/<name>.py` and add the name in `registry.py` to `TASK_NAMES` (and to `CODE_TASKS` if unit tests
grade it).

registry.py          the `Task` protocol, `Verdict`, lookup by name, and the bundled starter tasks
loading.py           the rows of a run: columns, disjoint splits, validation rows, prompt order, fingerprints
sources.py           reads records from JSON Lines, CSV and Parquet files and the Hub, and samples them
columns.py           the columns of a user's data: which names are taken, and which columns rewards get
messages.py          checks the chat messages that a user wrote
chat.py              prompt styles: messages, rendering, writing and parsing completions
thoughts.py          what a prompt has begun of a completion, where thoughts end, and what is graded
gsm8k.py             word problems with a numeric answer: grades them by the strict, flexible, and robust rules
humaneval.py         functions to complete: HumanEval and HumanEval+
mbpp.py              short programs: MBPP and MBPP+
code_feedback.py     programs that may be repaired, in a conversation
textarena_games.py   games of TextArena
instructions.py      instructions that a program can check: IFEval and IFBench
mathematics.py       competition problems, graded by math-verify
reasoning_gym.py     generators of reasoning-gym, with their scorers
task_file.py         a user's task: one Python file
environment.py       the class `Environment` of a task file: tools, replies, and the reward of a conversation
tool_arguments.py    a tool: its JSON schema, and the types of its arguments
episode.py           one completion or conversation: its tokens, which of them the model sampled, its grade
turns.py             the turns of a conversation in the format of the chat template
code_grading.py      runs programs against unit tests in the sandbox
code_extraction.py   extracts the program from a completion
"""

from lora_grpo.tasks import chat, code_grading, gsm8k, mbpp, thoughts, turns
from lora_grpo.tasks.code_extraction import bound_names
from lora_grpo.tasks.columns import reward_columns
from lora_grpo.tasks.environment import EnvironmentClass, Session
from lora_grpo.tasks.episode import Episode, grade, transcript
from lora_grpo.tasks.loading import (
    Data,
    Longest,
    columns_of,
    fingerprint,
    fit_data,
    gold_episodes,
    load_data,
    load_evaluation_rows,
    load_split,
    other_task,
    prompt_order,
    sft_command,
    split_validation,
    start_sandbox,
)
from lora_grpo.tasks.registry import (
    CODE_TASKS,
    TASK_NAMES,
    CheckError,
    Row,
    Task,
    Verdict,
    get_task,
    grade_all,
    is_task_file,
    runs_programs,
    same_task,
    source_of_rows,
    task_sha256,
    task_title,
)
from lora_grpo.tasks.sources import read_rows
from lora_grpo.tasks.task_file import TaskFile
