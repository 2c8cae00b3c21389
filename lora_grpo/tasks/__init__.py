"""Tasks: rows, and the graders that training and evaluation share.

    rows = get_task("gsm8k").load("train")
    (verdict,) = grade_all("gsm8k", [completion], [rows[0]])

A `Task` has three methods: `load` returns rows, `check` returns a verdict, and `gold` returns a completion that must
pass. A user's file has functions of these names (`task_file.py`). To add a built-in task, copy gsm8k.py, and add a line
to the table in registry.py and an entry to cli/tasks.toml. Most graders are in `grading/`.

task.py              the class `Task`: what all tasks have
registry.py          the table of built-in tasks, and lookup by name
sources.py           reads records from JSON Lines, CSV and Parquet files and the Hub, and samples them
columns.py           the columns of a user's data: which names are taken, and which columns rewards get

starter_problems.py  the bundled problems: arithmetic in words, and small functions
gsm8k.py             word problems with one number as the answer
mathematics.py       competition problems, graded by math-verify
humaneval.py         functions to complete: HumanEval and HumanEval+
mbpp.py              short programs: MBPP and MBPP+
evalplus_columns.py  the tests of HumanEval+ and MBPP+
instructions.py      instructions that a program can check: IFEval and IFBench
reasoning_gym.py     generators of reasoning-gym, with their scorers

task_file.py         a user's task: one Python file
environment.py       the class `Environment` of a task file: tools, replies, and the reward of a conversation
agent_definition.py  what a task file says about its agent, which `agents/` runs
tool_arguments.py    a tool: its JSON schema, and the types of its arguments

In the form of a task file:

bfcl.py              function calls: the Berkeley Function-Calling Leaderboard
code_feedback.py     programs that may be repaired, in a conversation
textarena_games.py   games of TextArena
"""

from lora_grpo.grading import CheckError, Row, Verdict
from lora_grpo.tasks import sources
from lora_grpo.tasks.agent_definition import AgentDefinition
from lora_grpo.tasks.columns import loaded_columns, reward_columns
from lora_grpo.tasks.environment import EnvironmentClass, Session
from lora_grpo.tasks.mbpp import MBPP
from lora_grpo.tasks.reasoning_gym import Generator
from lora_grpo.tasks.registry import (
    CODE_TASKS,
    MATH_TASKS,
    TASK_NAMES,
    get_task,
    grade_all,
    has_conversations,
    is_task_file,
    is_users_task,
    runs_programs,
    same_task,
    source_of_rows,
    task_files,
    task_sha256,
    task_title,
)
from lora_grpo.tasks.sources import read_rows
from lora_grpo.tasks.task import Task
from lora_grpo.tasks.task_file import TaskFile, of_object
