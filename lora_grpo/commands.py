"""The commands of lora_grpo, and their names in messages, which depend on how this process was started.

    command("merge", folder)      # lora-grpo merge FOLDER, or python scripts/merge.py FOLDER in a checkout

In a checkout, each command is also a script, and each recipe a file that can be run. Both are the same code.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

_NAMES = ("gsm8k", "code", "sft", "laptop", "guess", "length", "math", "sql")
RECIPES = {**{name: f"{name}_lora.py" for name in _NAMES}, "task": "your_task.py"}
"""Name in `lora-grpo train NAME` -> file in the folder `recipes`."""

_entered: list[str] = []
"""The arguments of `lora-grpo`, if it started this process."""


def enter(arguments: Sequence[str]) -> None:
    """Record that `lora-grpo` started this process with these arguments."""
    _entered[:] = arguments


def command(verb: str, *arguments: object) -> str:
    """Return a command line that works where this process was started.

    Args:
        verb: `merge`, for example, or `train gsm8k` for a recipe.
        arguments: the remaining arguments; each is quoted for a shell.
    """
    words, recipe = ["lora-grpo", *verb.split()], verb.partition(" ")[2]
    started = Path(sys.argv[0]).absolute()
    if not _entered and started.suffix == ".py" and started.parent.name in ("recipes", "scripts"):
        words = ["python", f"recipes/{RECIPES[recipe]}" if recipe else f"scripts/{verb.replace('-', '_')}.py"]
    return shlex.join([*words, *map(str, arguments)])


def own_command() -> list[str]:
    """Return the command line of this process, as run.json records it: `lora-grpo`, or the file, and its arguments."""
    return ["lora-grpo", *_entered] if _entered else [*sys.argv]


def to_start_again(launcher: Sequence[str] = ()) -> list[str]:
    """Return the command that starts this recipe again, without its flags, as a list.

    Args:
        launcher: arguments of Python that start several processes, such as `-m torch.distributed.run`.
    """
    train = _entered[:2]
    if train and not launcher:
        return ["lora-grpo", *train]
    return [sys.executable, *launcher, *(["-m", "lora_grpo", *train] if train else sys.argv[:1])]


def program() -> str:
    """Return the name of this program in its help: `lora-grpo merge`, or `merge.py`."""
    if not _entered:
        return Path(sys.argv[0]).name
    return " ".join(["lora-grpo", *_entered[: 2 if _entered[0] == "train" else 1]])


def described(text: str) -> str:
    """Return the description of a command or a recipe, with examples in the form in which this process was started."""
    for verb in ("evaluate", "merge", "export-gguf", "push", "report", "check-gpu"):
        text = text.replace(f"lora-grpo {verb} ", f"{command(verb)} ")
    for name, file in RECIPES.items():
        text = text.replace(f"python recipes/{file}", command(f"train {name}"))
    return text


def recipe_file(name: str) -> Path:
    """Return the file of a recipe, in the installed package or in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "recipes" / RECIPES[name]
    return installed if installed.is_file() else package.parent / "recipes" / RECIPES[name]
