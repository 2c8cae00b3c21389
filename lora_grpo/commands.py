"""The commands of lora_grpo, and their names in messages, which depend on how this process was started.

    VERBS["merge"].room                # "merging", the folder whose `merge(MergeOptions(...))` the command calls
    command("merge", folder)           # lora-grpo merge FOLDER, or python scripts/merge.py FOLDER in a checkout

In a checkout, most commands are also scripts, and each recipe is a file that can be run. All are the same code. To add
a command, add an entry to `VERBS` and, if it has one, a script.
"""

import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_RECIPE_NAMES = ("gsm8k", "code", "sft", "laptop", "guess", "length", "math", "sql")
RECIPES = {name: f"{name}_lora.py" for name in _RECIPE_NAMES} | {"task": "your_task.py"}
"""Name in `lora-grpo train NAME` -> file in the folder `recipes`."""


@dataclass(frozen=True)
class Verb:
    """A command of `lora-grpo`."""

    help: str
    """What `--help` prints first. The first line is also in the list of all commands."""
    room: str = ""
    """The module of this package that provides the command; empty for commands of `cli/verbs.py`."""
    options: str = ""
    """The dataclass in it with the flags of the command."""
    function: str = ""
    """The function in it that gets the options."""
    has_script: bool = True
    """Whether the command is also a file in `scripts/`."""


VERBS: dict[str, Verb] = {
    "new": Verb(
        room="cli.new",
        options="NewOptions",
        function="run_new",
        has_script=False,
        help="""\
Write a starting point for your own task: a folder with a task file, its tests and a README.

    lora-grpo new my_task                               # writes my_task/, overwrites nothing
    cd my_task && lora-grpo train my_task.py

The task file is also a recipe, and `uv run my_task.py` trains without an installation. The example in it is complete:
replace its functions one at a time. docs/your-task.md explains them.
""",
    ),
    "train": Verb(
        has_script=False,
        help="""\
Train an adapter with a recipe, and evaluate the model before and after.

lora-grpo train gsm8k                    # grade-school math; chooses the preset for this machine
lora-grpo train code                     # Python functions, rewarded by their unit tests
lora-grpo train sft                      # supervised fine-tuning on reference answers, before GRPO
lora-grpo train length                   # the smallest example: answers of a given length
lora-grpo train my_task.py               # your task: a file with rows and a check; see docs/your-task.md
lora-grpo train my_recipe.py             # a copy of a recipe, with its own presets
lora-grpo train gsm8k --help             # the flags of a recipe

A task file uses the presets of the `task` recipe. The run is saved in outputs/my_task.
""",
    ),
    "tasks": Verb(
        has_script=False,
        help="""\
List the tasks to train and evaluate on, which model each is for, and the command that starts it.

    lora-grpo tasks gsm8k        # more of one: an example, the check, the data it needs
    lora-grpo tasks countdown    # of a generator of reasoning-gym, or a game of TextArena

RUN is the folder of a run, an adapter or a model, or a Hub id. With --dry-run, a command of `train` prints a prompt and
its rewards; with --plan, its memory; with --preview, whether the model can learn the task. Without a GPU, `train` uses
the bundled model, which can learn only the tasks labeled with it; for other tasks, try --preset laptop and --preview.
""",
    ),
    "evaluate": Verb(
        room="evaluation",
        options="EvaluateOptions",
        function="evaluate_and_report",
        help="""\
Evaluate a run, an adapter or a model on built-in tasks or your own, or grade a file of samples.

    lora-grpo evaluate outputs/gsm8k_lora --compare base
    lora-grpo evaluate Qwen/Qwen2.5-Coder-0.5B-Instruct --task humaneval --k 1 10 --temperature 0.8
    lora-grpo evaluate outputs/gsm8k_lora/gguf/gsm8k_lora.Q4_0.gguf --compare outputs/gsm8k_lora/merged
    lora-grpo evaluate samples.jsonl --task humaneval
    lora-grpo evaluate outputs/gsm8k_lora --task math500 ifeval humaneval --compare base

`lora-grpo tasks` lists the tasks, such as gsm8k, math500, ifeval and humaneval. The command reports pass@k with 95%
intervals and, for two models, a paired test. If the evaluation is interrupted, run the same command to continue; for a
finished evaluation, the command prints the stored results. Several tasks get one table, with p-values adjusted for
their number. A file of samples has one JSON object per line with `task_id` and `completion`, the format of HumanEval's
harness.
""",
    ),
    "chat": Verb(
        room="cli.chat",
        options="ChatOptions",
        function="run_chat",
        has_script=False,
        help="""\
Ask a run, an adapter, a model or a GGUF file questions, and compare the answers before and after training.

    lora-grpo chat outputs/gsm8k_lora                       # type questions; Ctrl-D ends
    lora-grpo chat outputs/gsm8k_lora "Tom has 3 plums and buys 4. How many plums does he have?"
    lora-grpo chat outputs/gsm8k_lora/gguf/gsm8k_lora.Q4_0.gguf

Prompts use the system prompt and the chat template of training. Each question is answered on its own, as in training.
""",
    ),
    "serve": Verb(
        room="cli.serve",
        options="ServeOptions",
        function="run_serve",
        has_script=False,
        help="""\
Serve a run, an adapter, a model or a GGUF file at an OpenAI-compatible address, for chat programs and harnesses.

    lora-grpo serve outputs/gsm8k_lora                      # http://127.0.0.1:8000/v1, models gsm8k_lora and base
    lora-grpo serve outputs/gsm8k_lora/gguf/gsm8k_lora.Q4_0.gguf --port 8001

For a run or an adapter, the server has two models: one with its name, and `base` without the adapter. It uses the chat
template of training and the temperature of the request (default 1; 0 is greedy), and keeps no state between requests.
For answers as in the run's evaluation, send the system prompt of training, which this command prints.
""",
    ),
    "merge": Verb(
        room="merging",
        options="MergeOptions",
        function="merge",
        help="""\
Merge an adapter into its base model, in Hugging Face format, and report how much is lost to rounding.

    lora-grpo merge outputs/gsm8k_lora                      # to outputs/gsm8k_lora/merged
    lora-grpo merge my_adapter --base Qwen/Qwen2.5-1.5B-Instruct --output-dir merged --dtype bf16

Small updates can be lost in bfloat16. The report shows how much of the update survives, and `--dtype auto` uses the
lowest precision that keeps 99% of it.
""",
    ),
    "export-gguf": Verb(
        room="gguf",
        options="ExportOptions",
        function="export",
        help="""\
Export a run, a merged model or an adapter as a GGUF file for llama.cpp, Ollama and LM Studio.

    lora-grpo export-gguf outputs/gsm8k_lora --modelfile
    lora-grpo export-gguf merged/ --type q4_k_m

K-quants such as q4_k_m need llama.cpp's llama-quantize on the PATH.
""",
    ),
    "push": Verb(
        room="hub",
        options="PushOptions",
        function="push_to_hub",
        help="""\
Push a run to the Hugging Face Hub, with a model card that reports the measured results.

    lora-grpo push outputs/gsm8k_lora YOU/gsm8k-lora --dry-run       # list files, print the card
    lora-grpo push outputs/gsm8k_lora YOU/gsm8k-lora
    lora-grpo push outputs/gsm8k_lora YOU/gsm8k-merged --what merged

The repository is private unless --public is passed. The token comes from `hf auth login` or HF_TOKEN, never from an
argument. All files are uploaded in a single commit. If the upload is interrupted, run the same command to upload
the missing files.
""",
    ),
    "verify": Verb(
        room="verify",
        options="VerifyOptions",
        function="run_verify",
        help="""\
Verify that a merged model, a GGUF file, an engine or a server uses an adapter, and not its base.

    lora-grpo verify outputs/gsm8k_lora --against outputs/gsm8k_lora/merged
    lora-grpo verify outputs/gsm8k_lora --against outputs/gsm8k_lora/gguf/gsm8k_lora.Q4_0.gguf vllm
    lora-grpo verify my_adapter --base Qwen/Qwen2.5-1.5B-Instruct --against http://127.0.0.1:8000#my_adapter

Each target samples short completions. The base with and without the adapter scores the same tokens with transformers,
and the logprobs show which of the two the target is. The exit code is 0 if all targets answer like the adapter, and 1
if one does not, or if the result is unclear. docs/verify.md says what to do then.
""",
    ),
    "report": Verb(
        room="report",
        options="ReportOptions",
        function="report",
        help="""\
Write a report on a run: results, diagnostics, and every completion on one page.

    lora-grpo report outputs/gsm8k_lora

The report is one self-contained HTML file that works offline. Every run writes it at the end; for an unfinished
run, this command reports the progress so far.
""",
    ),
    "watch": Verb(
        room="cli.watch",
        options="WatchOptions",
        function="run_watch",
        has_script=False,
        help="""\
Show the report of a run in a browser, live while it trains.

    lora-grpo watch outputs/gsm8k_lora                  # http://127.0.0.1:8008; Ctrl-C ends
    lora-grpo watch outputs/gsm8k_lora --port 0         # a free port

The page updates itself while the run trains, and nothing is written to the run's folder. For a browser on another
computer, run `ssh -L 8008:127.0.0.1:8008 HOST` there, and open the same address.
""",
    ),
    "check-gpu": Verb(
        room="gpu_check",
        options="Options",
        function="check_gpu",
        help="""\
Check whether this GPU can run a recipe, and which engine and sampling backend is the fastest.

    lora-grpo check-gpu                    # at most 30 minutes, no network access
    lora-grpo check-gpu --short            # the default engine first, at most 5 minutes for each run

The model has the shape of Qwen2.5-1.5B (0.5B below 12 GB), with random weights. Each row of the table reports the step
time by phase, and the planned and measured memory. The table is also printed after Ctrl-C. Later runs with `auto` use
the fastest engine. The exit code is 1 if a run failed or had no time to finish a step, and 2 without a GPU.
""",
    ),
}
"""The commands in the order of `lora-grpo --help`."""


@dataclass(frozen=True)
class Start:
    """How this process, or this call of the Python API, was started."""

    by: Literal["lora-grpo", "file", "python"]
    """`lora-grpo`; a recipe or a script; or Python code that calls the API."""
    arguments: tuple[str, ...] = ()
    """The arguments of `lora-grpo`; the path of the file and its arguments; the name of the function."""

    @property
    def recorded(self) -> list[str]:
        """The command line, as run.json records it."""
        if self.by == "lora-grpo":
            return ["lora-grpo", *self.arguments]
        return list(self.arguments)

    @property
    def is_file_of_checkout(self) -> bool:
        """Whether the process runs a file in the folder `recipes` or `scripts`."""
        if self.by != "file":
            return False
        path = Path(self.arguments[0]).absolute()
        return path.suffix == ".py" and path.parent.name in ("recipes", "scripts")


_start: list[Start] = []
"""The innermost start is the last one."""


@contextlib.contextmanager
def started(start: Start) -> Iterator[None]:
    """Name commands in the block as this start does. Inside a file that `lora-grpo` runs, `lora-grpo` remains."""
    before = list(_start)
    if not (start.by == "file" and before and before[-1].by == "lora-grpo"):
        _start.append(start)
    try:
        yield
    finally:
        _start[:] = before


def current_start() -> Start:
    """Return how this process was started. A program of another kind is named as a file."""
    if _start:
        return _start[-1]
    return Start("file", tuple(sys.argv))


def command(verb: str, *arguments: object) -> str:
    """Return a command line that works where this process was started.

    Args:
        verb: `merge`, for example, or `train gsm8k` for a recipe.
        arguments: the remaining arguments; each is quoted for a shell.
    """
    recipe = verb.partition(" ")[2]
    if not current_start().is_file_of_checkout:
        words = ["lora-grpo", *verb.split()]
    elif recipe:
        words = [*_python(), f"recipes/{RECIPES[recipe]}"]
    else:
        words = [*_python(), f"scripts/{verb.replace('-', '_')}.py"]
    return shlex.join([*words, *map(str, arguments)])


def install_command(requirement: str) -> str:
    """Return the command line that adds a package to the environment of this process.

    uv makes environments without pip; the pip on the PATH would install for another Python.

    Args:
        requirement: such as `wandb`, or `lora-grpo[tasks]` for an extra of this package.
    """
    if importlib.util.find_spec("pip"):
        return shlex.join(["pip", "install", requirement])
    return shlex.join(["uv", "pip", "install", "--python", sys.executable, requirement])


def _python() -> list[str]:
    """Return the words that run a file: with uv, which makes an environment for it, if uv has started this process."""
    if "UV_RUN_RECURSION_DEPTH" in os.environ:
        return ["uv", "run"]
    return ["python"]


def own_command() -> list[str]:
    """Return the command line of this process, as run.json records it: `lora-grpo`, or the file, and its arguments."""
    return current_start().recorded


def to_start_again(launcher: Sequence[str] = ()) -> list[str]:
    """Return the command that starts this recipe again, without its flags, as a list.

    Args:
        launcher: arguments of Python that start several processes, such as `-m torch.distributed.run`.
    """
    start = current_start()
    if start.by != "lora-grpo" and launcher:
        return [sys.executable, *launcher, *start.arguments[:1]]
    if start.by != "lora-grpo":
        python = _python()
        if python == ["python"]:
            python = [sys.executable]
        return [*python, *start.arguments[:1]]
    recipe = start.arguments[:2]  # train gsm8k
    if launcher:
        return [sys.executable, *launcher, "-m", "lora_grpo", *recipe]
    return ["lora-grpo", *recipe]


def on_several_gpus(processes: int) -> str:
    """Return the command line that trains with several processes: that of this process, without `--plan`."""
    start = current_start()
    number_of_words = 2 if start.by == "lora-grpo" else 1
    flags = [word for word in start.arguments[number_of_words:] if word != "--plan"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return shlex.join([*to_start_again(launcher), *flags])


def program() -> str:
    """Return the name of this program in its help: `lora-grpo merge`, or `merge.py`."""
    start = current_start()
    if start.by != "lora-grpo":
        return Path(start.arguments[0]).name
    number_of_words = 2 if start.arguments[0] == "train" else 1
    return " ".join(["lora-grpo", *start.arguments[:number_of_words]])


def described(text: str) -> str:
    """Return the description of a command or a recipe, with examples in the form in which this process was started."""
    for name, verb in VERBS.items():
        if verb.has_script:
            text = text.replace(f"lora-grpo {name} ", f"{command(name)} ")
    for name, file in RECIPES.items():
        text = text.replace(f"python recipes/{file}", command(f"train {name}"))
    return text


def recipe_file(name: str) -> Path:
    """Return the file of a recipe, in the installed package or in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "recipes" / RECIPES[name]
    if installed.is_file():
        return installed
    return package.parent / "recipes" / RECIPES[name]
