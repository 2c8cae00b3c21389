"""The commands of `lora-grpo`: train, evaluate, chat, merge, export-gguf, push, report, check-gpu.

Their descriptions are in help.toml. A script in `scripts/` runs one of them.
"""

import importlib
import re
import runpy
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lora_grpo import __version__, commands
from lora_grpo.cli.main import run_command
from lora_grpo.errors import UserError, suggestion
from lora_grpo.flags import read_flags


def train(arguments: Sequence[str]) -> NoReturn:
    """Run a recipe, or the recipe `task` with a task file."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP["train"].rstrip(), file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else UserError.exit_code)
    name, *flags = arguments
    if name in commands.RECIPES:
        path = commands.recipe_file(name)
    elif name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"{name}: no such file; expected a task file or a recipe")
        if "run_recipe(" not in path.read_text(encoding="utf-8", errors="replace"):  # a task, not a recipe
            if any(each.partition("=")[0] in ("--task", "--data.task") for each in flags):
                raise UserError(f"{name} is the task; leave the other --task out")
            path, flags = commands.recipe_file("task"), ["--data.task", name, *flags]
    else:
        known = [each for each in commands.RECIPES if each != "task"]
        hint = suggestion(name, [*known, "my_task.py"])
        raise UserError(f"unknown recipe {name!r}; {hint}; `lora-grpo tasks` prints the command of each task")
    sys.argv[1:] = flags
    sys.path.insert(0, str(path.resolve().parent))  # as for `python path`: a recipe may import the files beside it
    runpy.run_path(str(path), run_name="__main__")
    raise UserError(f"{path} does not call run_recipe; end it with `if __name__ == '__main__': run_recipe(...)`")


def tasks(names: Sequence[str]) -> str:
    """Return two lines for each task, or all that tasks.toml says of some, which may be members: `countdown`."""
    known = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
    if not names:
        rows = [f"{name:24} {row['about']} ({row['model']})\n{'':24} {row['start']}\n" for name, row in known.items()]
        return "".join(rows) + HELP["tasks"].partition("\n")[2]
    for family, task in [*known.items()]:
        for member in task.get("members", "").split():
            start = re.sub(rf"(?<={family}:)\S+", member, task["start"])
            known[f"{family}:{member}"] = {**task, "start": start, "members": "", "example": f"{start} --dry-run"}
    full = {each: name for name in known for each in (name, re.sub(r"^recipes/|_lora\.py$|^[a-z-]+:", "", name))}
    lines = []
    for name in names:
        if name not in full:
            raise UserError(f"unknown task {name!r}; {suggestion(name, full, '`lora-grpo tasks` lists them')}")
        lines += [full[name], *(f"  {key:8} {value.strip()}" for key, value in known[full[name]].items() if value)]
    return "".join(f"{line}\n" for line in lines)


def _run(verb: str, arguments: Sequence[str]) -> None:
    if verb not in HELP:
        raise UserError(f"unknown command {verb!r}; {suggestion(verb, HELP)}")
    if verb == "train":
        train(arguments)
    if verb == "tasks":
        return print(HELP[verb] if arguments[:1] in (["-h"], ["--help"]) else tasks(arguments), end="")
    room, kind, function = VERBS[verb]
    folder = importlib.import_module(f"lora_grpo.{room}")
    if verb == "push":
        folder.refuse_tokens_in(arguments)
    getattr(folder, function)(read_flags(getattr(folder, kind), arguments, HELP[verb]))


HELP: dict[str, str] = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))
"""The descriptions of the commands."""
VERBS = {
    "evaluate": ("evaluation", "EvaluateOptions", "evaluate_and_report"),
    "chat": ("cli.chat", "ChatOptions", "run_chat"),
    "merge": ("merging", "MergeOptions", "merge"),
    "export-gguf": ("gguf", "ExportOptions", "export"),
    "push": ("hub", "PushOptions", "push_to_hub"),
    "report": ("report", "ReportOptions", "report"),
    "check-gpu": ("gpu_check", "Options", "check_gpu"),
}
"""The folder of each command but `train` and `tasks`, the class of its flags, and the function that gets them."""


def run_front_door(arguments: Sequence[str]) -> int:
    """Run `lora-grpo` with these arguments, and return the exit code."""
    commands.enter(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"lora-grpo {__version__}: LoRA + GRPO on one GPU\n"]
        lines += [f"  {name:12} {text.splitlines()[0]}" for name, text in HELP.items()]
        lines += ["\nlora-grpo COMMAND --help shows the flags of a command."]
        print("\n".join(lines), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else UserError.exit_code
    name, *rest = arguments
    if name == "--version":
        print(f"lora-grpo {__version__}")
        return 0
    return run_command(lambda: _run(name, rest))


def run_verb(name: str) -> int:
    """Run one command with the arguments of this process, for a script, and return the exit code."""
    return run_command(lambda: _run(name, sys.argv[1:]))
