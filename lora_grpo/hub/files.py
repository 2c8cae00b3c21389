"""Select the files to upload: known names and code, undamaged, and with settings without paths of this machine."""

import json
from collections.abc import Sequence
from pathlib import Path

from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, file_tensors, json_files, model_tensors
from lora_grpo.hub.private_paths import strings, without_path_settings
from lora_grpo.hub.uploads import CARD, KINDS, UploadFile, matches
from lora_grpo.models import ADAPTER_CONFIG, holds_adapter, model_files, peft_folder
from lora_grpo.sampling import read_header

_SETTINGS = ("*config.json",)
"""Files with settings, some of which may be paths of this machine."""


def find_model(source: str, kind: str | None) -> tuple[Path, str]:
    """Return the folder to push and its kind, one of `KINDS`, or raise a UserError if it contains something else.

    If `kind` is None, it is the adapter of a run, or the kind of model in the folder.
    """
    folder = model_files.existing_folder(source, "a run, or the folder of an adapter, a merged model or GGUFs")
    if (folder / "run.json").is_file():
        kind = kind or "adapter"
        folder = folder / kind
    else:
        folder = folder.resolve()  # the user may have named a link to a model, or `..`
        if kind in (None, "adapter") and holds_adapter(folder):
            folder = peft_folder(folder)
    actual_kind = _kind_of(folder)
    if actual_kind is not None and kind in (None, actual_kind):
        return folder, actual_kind
    if kind is None:
        raise UserError(f"{folder}: expected a run, an adapter, a merged model or GGUF files")
    verb = KINDS[kind].verb
    maker = command(verb) if verb else "the recipe with --resume"
    raise UserError(f"{folder}: expected {' and '.join(KINDS[kind].identified_by)}; create it with {maker}")


def _kind_of(folder: Path) -> str | None:
    """Return the kind of model in a folder; None for something else."""
    for name, kind in KINDS.items():
        if all(any(folder.glob(pattern)) for pattern in kind.identified_by):
            return name
    return None


def collect(folder: Path, kind: str, base_name: str | None) -> tuple[list[UploadFile], list[str]]:
    """Return the files of a folder to upload and the names of skipped files.

    Args:
        folder: the result of `find_model`.
        kind: one of `KINDS`.
        base_name: in adapter_config.json, this replaces the path of the base model.

    Raises:
        UserError: a file is damaged, or a link to a location outside the folder.
    """
    files = []
    skipped = []
    code = _code(folder, kind)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not path.resolve().is_relative_to(folder.parent.resolve() / folder.name):
            raise UserError(f"{path} links to outside {folder}; replace it with a copy, or delete it")
        if matches(name, KINDS[kind].uploaded) or path in code:
            files.append(UploadFile(name, _without_own_paths(path, base_name)))
        elif name not in (atomic.MANIFEST, CARD) and not name.startswith("."):
            skipped.append(name)
    _check_intact(folder, kind, [file.name for file in files])
    return files, skipped


def _code(folder: Path, kind: str) -> list[Path]:
    """Return the Python files that the uploaded settings of a folder name, and those that these import.

    `auto_map` has `module.Class` for a file `module.py` beside it, and `owner/name--module.Class` for one elsewhere.
    """
    from transformers.dynamic_module_utils import get_relative_imports

    names: list[str] = []
    for path in sorted(folder.glob("*.json")):
        if matches(path.name, _SETTINGS) and matches(path.name, KINDS[kind].uploaded):
            references = strings(json_files.read_object(path).get("auto_map"))
            names += [reference.partition(".")[0] for reference in references if "--" not in reference]
    found: list[Path] = []
    for name in names:  # the list grows meanwhile
        path = folder / f"{name}.py"
        if path.is_file() and path not in found:
            found.append(path)
            names += get_relative_imports(path)
    return found


def _without_own_paths(path: Path, base_name: str | None) -> Path | bytes:
    """Return a file or, for settings with paths of this machine, their JSON without them."""
    if path.suffix != ".json":
        return path
    settings = json_files.read_object(path)  # a damaged file must not be uploaded
    if not matches(path.name, _SETTINGS):
        return path
    public = without_path_settings(settings, path.parent)
    if path.name == ADAPTER_CONFIG and base_name:
        public["base_model_name_or_path"] = base_name
    if public == settings:
        return path
    is_ascii = path.read_bytes().isascii()
    text = json.dumps(public, indent=2, ensure_ascii=is_ascii) + "\n"
    # UTF-8 cannot encode a lone surrogate. Its escape in Python is also its escape in JSON.
    return text.encode(errors="backslashreplace")


def _check_intact(folder: Path, kind: str, names: Sequence[str]) -> None:
    """Check that the named files are complete, and unchanged since training or merging wrote them."""
    if (folder / atomic.MANIFEST).is_file():
        damage = atomic.damage(folder)
        if damage:
            raise UserError(f"{folder}: {damage}; restore it, or delete {atomic.MANIFEST} if the change is intended")
    for name in names:
        path = folder / name
        if path.suffix == ".safetensors":
            file_tensors(path)
        elif path.suffix == ".gguf":
            read_header(path)
    if kind == "merged":
        model_tensors(folder)  # all shards of the index


def stale(existing: Sequence[str], files: Sequence[UploadFile], kind: str) -> list[str]:
    """Return the files of a repository that a push does not replace and that would act on the new weights."""
    uploaded = {file.name for file in files}
    return [name for name in existing if name not in uploaded and matches(name, KINDS[kind].replaced)]
