"""`lora-grpo` and its commands, which the scripts also run. The table of commands is `commands.VERBS`."""

import dataclasses
import importlib
import re
import runpy
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from lora_grpo import __version__
from lora_grpo.cli.main import run_command
from lora_grpo.commands import RECIPES, VERBS, Start, recipe_file, started
from lora_grpo.config import Invocation
from lora_grpo.errors import UserError, suggestion
from lora_grpo.flags import read_flags

_HELP_FLAGS = ("-h", "--help")


def train(arguments: Sequence[str]) -> NoReturn:
    """Run a recipe, or the recipe `task` with a task file."""
    if not arguments or arguments[0] in _HELP_FLAGS:
        print(VERBS["train"].help.rstrip(), file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else UserError.exit_code)
    name, *flags = arguments
    if name in RECIPES:
        path = recipe_file(name)
    elif name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"{name}: no such file; expected a task file or a recipe")
        if "run_recipe(" not in path.read_text(encoding="utf-8", errors="replace"):  # a task, not a recipe
            if any(word.partition("=")[0] in ("--task", "--data.task") for word in flags):
                raise UserError(f"{name} is the task; leave the other --task out")
            path = recipe_file("task")
            flags = ["--data.task", name, *flags]
    else:
        names = [recipe for recipe in RECIPES if recipe != "task"]
        hint = suggestion(name, [*names, "my_task.py"])
        raise UserError(f"unknown recipe {name!r}; {hint}; `lora-grpo tasks` prints the command of each task")
    sys.argv[1:] = flags
    sys.path.insert(0, str(path.resolve().parent))  # as for `python path`: a recipe may import the files beside it
    runpy.run_path(str(path), run_name="__main__")
    raise UserError(f"{path} does not call run_recipe; end it with `if __name__ == '__main__': run_recipe(...)`")


def tasks(names: Sequence[str]) -> str:
    """Return two lines for each task, or all that tasks.toml says of some, which may be members: `countdown`."""
    entries = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
    if not names:
        rows = [f"{name:24} {row['about']} ({row['model']})\n{'':24} {row['start']}\n" for name, row in entries.items()]
        return "".join(rows) + VERBS["tasks"].help.partition("\n")[2]

    # A member of a family, such as `reasoning-gym:countdown`, is an entry of its own. Its command is that of the
    # family, with this member in place of the one that is the example.
    entries_of_members = {}
    for family, entry in entries.items():
        for member in entry.get("members", "").split():
            start = re.sub(rf"(?<={family}:)\S+", member, entry["start"])
            example = f"{start} --dry-run"
            entries_of_members[f"{family}:{member}"] = {**entry, "start": start, "members": "", "example": example}
    entries |= entries_of_members

    # A task is found by its full name or without its family, and a recipe without folder and ending.
    full_names = {}
    for name in entries:
        short_name = re.sub(r"^recipes/|_lora\.py$|^[a-z-]+:", "", name)
        full_names[name] = name
        full_names[short_name] = name
    lines = []
    for name in names:
        if name not in full_names:
            raise UserError(f"unknown task {name!r}; {suggestion(name, full_names, '`lora-grpo tasks` lists them')}")
        full_name = full_names[name]
        lines.append(full_name)
        lines += [f"  {key:8} {value.strip()}" for key, value in entries[full_name].items() if value]
    return "".join(f"{line}\n" for line in lines)


def run_front_door(arguments: Sequence[str]) -> int:
    """Run `lora-grpo` with these arguments, and return the exit code."""
    if not arguments:
        print(_list_of_commands(sys.stderr), end="", file=sys.stderr)
        return UserError.exit_code
    name, *rest = arguments
    if name in _HELP_FLAGS:
        return run_command(lambda: print(_list_of_commands(sys.stdout), end=""))
    if name == "--version":
        return run_command(lambda: print(f"lora-grpo {__version__}"))
    with started(Start("lora-grpo", tuple(arguments))):
        return run_command(lambda: _run(name, rest))


def _list_of_commands(file: TextIO) -> str:
    """Return the list of all commands, with the width and the colors of a terminal if the file is one."""
    from rich.console import Console
    from rich.table import Table

    commands = Table(box=None, show_header=False, pad_edge=False)
    commands.add_column(style="cyan", no_wrap=True)
    commands.add_column(overflow="fold")  # a long word goes on in the next line, in place of an ellipsis
    for name, verb in VERBS.items():
        commands.add_row(name, verb.help.splitlines()[0])
    console = Console(file=file, highlight=False, markup=False)
    with console.capture() as text:  # rich itself would end the process at a closed pipe
        console.print(f"lora-grpo {__version__}: LoRA + GRPO on one GPU\n")
        console.print(commands)
        console.print("\nlora-grpo COMMAND --help shows the flags of a command.")
    return text.get()


def run_verb(name: str) -> int:
    """Run one command with the arguments of this process, for a script, and return the exit code."""
    with started(Start("file", tuple(sys.argv))):
        return run_command(lambda: _run(name, sys.argv[1:]))


def _run(name: str, arguments: Sequence[str]) -> None:
    actions = [field.name.replace("_", "-") for field in dataclasses.fields(Invocation)]
    if name in actions:
        raise UserError(f"{name} is a flag of `lora-grpo train`: pass --{name} after the recipe or the task file")
    if name not in VERBS:
        raise UserError(f"unknown command {name!r}; {suggestion(name, VERBS)}")
    verb = VERBS[name]
    if name == "train":
        train(arguments)
    elif name == "tasks":
        text = verb.help
        if not arguments or arguments[0] not in _HELP_FLAGS:
            text = tasks(arguments)
        print(text, end="")
    else:
        room: Any = importlib.import_module(f"lora_grpo.{verb.room}")
        if name == "push":
            room.refuse_tokens_in(arguments)
        options = read_flags(getattr(room, verb.options), arguments, verb.help)
        getattr(room, verb.function)(options)
