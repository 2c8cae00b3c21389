"""`--teacher`: what the name stands for, read before weights are loaded. Imports neither torch nor PEFT.

A teacher scores the tokens that the trained model samples. There are three kinds:

base      the base of the run without an adapter, which needs no memory
adapter   another adapter on the base of the run
model     a model of its own, with or without an adapter, which has the tokenizer of the run
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_grpo.config import SELF, ModelConfig, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.models import base_model, model_files
from lora_grpo.models.adapter import PATTERNS, SELECTION, SavedAdapter, adapter_sha256, read_adapter
from lora_grpo.models.adapter_formats import holds_adapter, nested_adapter, origin_of
from lora_grpo.models.start_adapter import (
    BaseOfAdapter,
    adapter_folder,
    base_of_adapter,
    check_outside,
    is_base_of_run,
    start_folder,
)
from lora_grpo.models.target import run_of
from lora_grpo.runs import read_record
from lora_grpo.tasks import get_task

_FLAG = "--teacher"
_EXPECTED = "a run, an adapter, a model, a Hub id or `self`"


@dataclass(frozen=True)
class Teacher:
    """The teacher of a run. Nothing of it is loaded."""

    name: str
    """The name as the user gave it."""
    kind: Literal["base", "adapter", "model"]
    adapter: Path | None = None
    """Folder of the teacher's adapter, in PEFT's format; None without one."""
    base: ModelConfig | None = None
    """The teacher's own base; None if it is that of the run."""
    commit_of_base: str | None = None
    """The commit of the run's base that the adapter was trained on, if its run recorded one."""
    has_own_prompt: bool = False
    """Whether the teacher reads `teacher_prompt(row)` of the task file in place of the run's prompts."""

    @property
    def sha256(self) -> str | None:
        """A SHA-256 of the teacher's adapter or, without one, of the weights in the folder of its own base.

        None for a teacher without an adapter on the base of the run, and for one that is loaded from the Hub.
        """
        if self.adapter:
            return adapter_sha256(self.adapter)
        if self.base is None:
            return None
        folder = Path(model_files.source(self.base.name))
        return model_files.weights_fingerprint(folder) if folder.is_dir() else None

    def record(self) -> dict[str, Any]:
        """Return the entry `teacher` of run.json."""
        run = run_of(origin_of(self.adapter)) if self.adapter else None
        name = self.name
        if model_files.is_folder_name(name):
            name = (run or Path(name).expanduser()).resolve().name
        return {
            "name": name,
            "kind": self.kind,
            "has_adapter": self.adapter is not None,
            "base_model": self.base.name if self.base else None,
            "revision": self.base.revision if self.base else None,
            "bits": self.base.loaded_bits if self.base else None,
            "has_own_prompt": self.has_own_prompt,
        }

    def saved_adapter(self) -> SavedAdapter | None:
        """Return the configuration of the teacher's adapter; None without one."""
        return read_adapter(self.adapter) if self.adapter else None


def find_teacher(config: RunConfig, *, resumed: bool = False) -> Teacher | None:
    """Return what `teacher.name` stands for; None without a teacher.

    Args:
        resumed: whether the output folder contains the run and a copy of the adapter that it starts from.

    Raises:
        UserError: the name is no model or adapter, the teacher would be the student, or it has no prompts.
    """
    name = config.teacher.name
    if name is None:
        return None
    teacher = _resolve(name, config, resumed=resumed)
    if not config.teacher.reads_own_prompt:
        _check_is_other(teacher, config, resumed=resumed)
        return teacher
    if not get_task(config.data.task).has_teacher_prompt:
        because = "" if name == SELF else " with --teacher.own-prompt"
        raise UserError(
            f"{_FLAG} {name}{because} reads teacher_prompt(row) of the task file, and {config.data.task} has none; "
            "define it, or pass another teacher"
        )
    return dataclasses.replace(teacher, has_own_prompt=True)


def check_teacher_tokenizer(teacher: Teacher, tokenizer: Any) -> None:
    """Raise a UserError unless a teacher with its own base gives each token of the run's tokenizer the same id."""
    if teacher.base is None:
        return
    teacher_ids = base_model.load_tokenizer(teacher.base).get_vocab()
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if teacher_ids.get(token) != token_id:
            other_id = teacher_ids.get(token)
            found = "does not have" if other_id is None else f"has as {other_id}"
            raise UserError(
                f"{_FLAG} {teacher.name} has another tokenizer: it {found} the token {token!r:.40} with the id "
                f"{token_id}; pass a teacher with the model's tokenizer, usually one of the same family"
            )


def _resolve(name: str, config: RunConfig, *, resumed: bool) -> Teacher:
    """Return the teacher that a name stands for, without the check that it is another model than the student."""
    if name == SELF:
        start = start_folder(config, resumed=resumed)
        return Teacher(name, "adapter" if start else "base", adapter=start)
    if not resumed:
        check_outside(_FLAG, name, config.folder)

    if not model_files.is_folder_name(name):  # a Hub id, or the bundled model
        return _of_model(name, config, resumed=resumed)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"{_FLAG} {model_files.missing_folder(name, _EXPECTED)}")
    is_run = (folder / "run.json").is_file()
    if is_run or holds_adapter(folder):
        return _of_adapter(name, adapter_folder(_FLAG, name), config, resumed=resumed)
    nested = nested_adapter(folder)
    if nested and not (folder / "config.json").is_file():
        raise UserError(f"{_FLAG} {name} has neither an adapter nor a model; pass {nested}")
    model_files.check_folder(name, _FLAG)
    return _of_model(name, config, resumed=resumed)


def _of_model(name: str, config: RunConfig, *, resumed: bool) -> Teacher:
    """Return the teacher of a model folder, a Hub id or the bundled model."""
    if _same_model(name, config.model.name):
        return Teacher(name, "base")
    return Teacher(name, "model", base=_base_settings(name, None, config, resumed=resumed))


def _of_adapter(name: str, folder: Path, config: RunConfig, *, resumed: bool) -> Teacher:
    """Return the teacher of an adapter, on the base of the run or on another one."""
    adapter = read_adapter(folder)
    base = base_of_adapter(config, adapter)
    if is_base_of_run(config, base):
        # PEFT would load biases into the base itself, and some initializations change its weights.
        adapter.check(
            {"use_dora", *PATTERNS, *SELECTION},
            "which may change the base that the teacher shares with the model; merge the adapter into its base and "
            f"pass the merged model as {_FLAG}",
        )
        commit = base.revision if run_of(origin_of(folder)) else None
        return Teacher(name, "adapter", adapter=folder, commit_of_base=commit)
    if model_files.is_folder_name(base.name):
        _check_base_folder(name, folder, base)
    settings = _base_settings(base.name, base.revision, config, resumed=resumed)
    return Teacher(name, "model", adapter=folder, base=settings)


def _check_base_folder(name: str, folder: Path, base: BaseOfAdapter) -> None:
    """Raise a UserError unless the base of a teacher's adapter is where it was, with the weights of its training."""
    base_folder = Path(base.name).expanduser()
    problem = ""
    if not base_folder.is_dir():
        problem = "does not exist here"
    elif base.fingerprint and model_files.weights_fingerprint(base_folder) != base.fingerprint:
        problem = "has other weights than in its training"
    if problem:
        raise UserError(
            f"{_FLAG} {name}: {base.name}, the base of the adapter in {origin_of(folder)}, {problem}; restore it, or "
            "merge the adapter and pass the merged model"
        )


def _base_settings(name: str, revision: str | None, config: RunConfig, *, resumed: bool) -> ModelConfig:
    """Return the settings of a teacher's own base. A resumed run keeps the commit that it began with."""
    if resumed:
        revision = read_record(config.folder).get("policy", {}).get("teacher_revision") or revision
    return ModelConfig(
        name=name, revision=revision, bits=config.teacher.bits, trust_remote_code=config.model.trust_remote_code
    )


def _same_model(name: str, other: str) -> bool:
    """Return whether two names stand for the same folder or Hub id, or for folders with the same model."""
    folder = Path(model_files.source(name))
    other_folder = Path(model_files.source(other))
    if not (folder.is_dir() and other_folder.is_dir()):
        return folder == other_folder
    if folder.resolve() == other_folder.resolve():
        return True
    sizes = _weight_sizes(folder)
    if not sizes or sizes != _weight_sizes(other_folder):  # most differ here, before gigabytes are read
        return False
    names = (*sizes, "config.json")
    return model_files.digest(folder, names) == model_files.digest(other_folder, names)


def _weight_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}


def _check_is_other(teacher: Teacher, config: RunConfig, *, resumed: bool) -> None:
    """Raise a UserError if a teacher that reads the same prompts is the model that training starts from."""
    start = start_folder(config, resumed=resumed)
    start_sha256 = adapter_sha256(start) if start else None
    if teacher.kind == "model" or teacher.sha256 != start_sha256:
        return
    raise UserError(
        f"{_FLAG} {teacher.name} is the model that training starts from, so there is nothing to learn from it; pass "
        "another teacher, or `self` with teacher_prompt(row) in the task file, which gives it more to read"
    )
