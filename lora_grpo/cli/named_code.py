"""The code that settings name: task files, reward files, and the Python code of a model's repository.

A run folder or a settings file may come from someone else. Its code runs only if the command line names it too. The
command that resumes a run therefore names it, and run.json has the digests of its files.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from lora_grpo import distributed
from lora_grpo.commands import to_start_again
from lora_grpo.config import RunConfig
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, python_file
from lora_grpo.rewards import parse_reward_specs
from lora_grpo.tasks import is_task_file


class Code(NamedTuple):
    """Code that a run would execute."""

    what: str
    key: str
    """The resolved path of a file, or the name of a setting."""
    flags: tuple[str, ...]
    """The arguments that name it on the command line."""


def named_code(config: RunConfig) -> list[Code]:
    """Return the code that a configuration names, which is read but not run."""
    found = []
    for flag, task in (("--task", config.data.task), ("--data.eval-task", config.data.eval_task)):
        if task and is_task_file(task):
            found.append(Code(f"the task file {task}", _resolved(task), (flag, task)))
    for spec in parse_reward_specs(config.rewards):
        if spec.file:
            found.append(Code(f"the reward file {spec.file}", _resolved(spec.file), ("--rewards", *config.rewards)))
    if config.model.trust_remote_code:
        what = f"Python code from the repository of {config.model.name}"
        found.append(Code(what, "trust_remote_code", ("--model.trust-remote-code",)))
    if config.sandbox.allow_unsafe:
        found.append(Code("programs without isolation", "allow_unsafe", ("--sandbox.allow-unsafe",)))
    return found


def refuse_unnamed_code(config: RunConfig, named: RunConfig, files: str) -> None:
    """Raise a UserError for code that only settings files name.

    Args:
        config: the settings of the files and the command line.
        named: what the settings would be without the files.
        files: the paths of the files.
    """
    allowed = {code.key for code in named_code(named)}
    for code in named_code(config):
        if code.key not in allowed:
            raise UserError(f"{files} would run {code.what}; if you trust it, pass {shlex.join(code.flags)} to run it")


def resume_command(config: RunConfig) -> str:
    """Return the command that resumes a run of this process. Code in the recipe's own file needs no flags."""
    ranks = distributed.world_size()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    flags = {code.flags: None for code in named_code(config) if code.key != _resolved(sys.argv[0])}
    named = [word for each in flags for word in each]
    return shlex.join([*to_start_again(launcher), *named, "--resume", "--output-dir", str(config.folder)])


def user_files(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of the task file, the reward files and the modules beside them that they import, by path."""
    names = [name for name in (config.data.task, config.data.evaluation_task) if is_task_file(name)]
    names += [spec.file for spec in parse_reward_specs(config.rewards) if spec.file]
    found: dict[str, str] = {}
    for path in (Path(name).expanduser() for name in names):
        main, *helpers = python_file.files(path)
        found |= {str(path): atomic.sha256(main)}
        found |= {str(path.parent / file.relative_to(main.parent)): atomic.sha256(file) for file in helpers}
    return found


def _resolved(path: str) -> str:
    return str(Path(path).expanduser().resolve())
