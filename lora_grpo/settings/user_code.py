"""The code that a configuration names: task files, reward files, the Python code of a model's repository, and objects.

A run folder or a settings file may come from someone else. The code that it names runs only if the command line names
it too. The command that resumes a run therefore names it, and run.json contains the digests of its files.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from lora_grpo import python_objects
from lora_grpo.config import SELF, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, python_file
from lora_grpo.rewards import parse_reward_specs
from lora_grpo.tasks import is_task_file, task_files


@dataclass(frozen=True)
class NamedCode:
    """Code that a run would execute."""

    description: str
    key: str
    """The resolved path of a file, or the name of a setting."""
    flags: tuple[str, ...]
    """The arguments that name it on the command line."""


def named_code(config: RunConfig) -> list[NamedCode]:
    """Return the code that a configuration names, without running it."""
    code = []
    for name, task in (("--task", config.data.task), ("--data.eval-task", config.data.eval_task)):
        if task and is_task_file(task):
            code.append(NamedCode(f"the task file {task}", resolved_path(task), (name, task)))
    for task in config.eval.also:
        if is_task_file(task):
            code.append(NamedCode(f"the task file {task}", resolved_path(task), ("--eval.also", *config.eval.also)))
    for spec in parse_reward_specs(config.rewards):
        if spec.file:
            flags = ("--rewards", *config.rewards)
            code.append(NamedCode(f"the reward file {spec.file}", resolved_path(spec.file), flags))
    if config.model.trust_remote_code:
        description = f"Python code from the repository of {config.model.name}"
        code.append(NamedCode(description, "trust_remote_code", ("--model.trust-remote-code",)))
    teacher = config.teacher.name
    if config.model.trust_remote_code and teacher not in (None, SELF):
        flags = ("--teacher", str(teacher), "--model.trust-remote-code")
        code.append(NamedCode(f"Python code from the repository of {teacher}", f"code of teacher {teacher}", flags))
    if config.sandbox.allow_unsafe:
        code.append(NamedCode("programs without isolation", "allow_unsafe", ("--sandbox.allow-unsafe",)))
    return code


def refuse_unnamed_code(config: RunConfig, without_files: RunConfig, files: str) -> None:
    """Raise a UserError for code that only settings files name.

    Args:
        config: the settings of the files and the command line.
        without_files: the settings of the command line alone.
        files: the paths of the files.
    """
    allowed = {code.key for code in named_code(without_files)}
    for code in named_code(config):
        if code.key not in allowed:
            raise UserError(
                f"{files} would run {code.description}; if you trust it, pass {shlex.join(code.flags)} to run it"
            )


def user_files(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of the task file, the reward files, and the files of their folders that they use, by path.

    A task file is run.
    """
    # Paths stay as the user wrote them, because run.json is published, and an absolute path would be published with it.
    tasks = (config.data.task, config.data.evaluation_task, *config.eval.also)
    files_by_name = {task: task_files(task) for task in tasks if is_task_file(task)}
    for spec in parse_reward_specs(config.rewards):
        if spec.file and spec.file not in files_by_name:
            files_by_name[spec.file] = python_file.files(Path(spec.file))

    digests: dict[str, str] = {}
    for name, (main, *helpers) in files_by_name.items():
        path = Path(name).expanduser()
        digests[str(path)] = atomic.sha256(main)
        for helper in helpers:
            digests[str(path.parent / helper.relative_to(main.parent))] = atomic.sha256(helper)
    return digests


def user_objects(config: RunConfig) -> dict[str, dict[str, str | None]]:
    """Return the module and the SHA-256 of the source of each Python object that a run uses in place of a name."""
    tasks = [config.data.task, config.data.evaluation_task, *config.eval.also]
    rewards = [spec.name for spec in parse_reward_specs(config.rewards)]
    names = dict.fromkeys(name for name in (*tasks, *rewards) if python_objects.is_name(name))
    return {name: python_objects.describe(name) for name in names}


def resolved_path(path: str) -> str:
    return str(Path(path).expanduser().resolve())
