"""Select the files to upload: known names, undamaged, and without local paths or tokens in their content."""

import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, file_tensors, json_files, model_tensors
from lora_grpo.gguf import HUB_FILES
from lora_grpo.hub import token
from lora_grpo.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, model_files
from lora_grpo.sampling import read_header

CARD = "README.md"
CARD_MARK = "<!-- This card was written by lora_grpo. -->"
"""The last line of a generated card. A README.md without it was written by the user."""
KINDS = {
    "adapter": (ADAPTER_CONFIG, ADAPTER_WEIGHTS),
    "merged": ("config.json", "*.safetensors"),
    "gguf": ("*.gguf",),
}
"""Map each kind of model that can be pushed, which is also its folder name in a run, to the files that identify it."""

_TOKENIZER = (
    *(*model_files.TOKENIZER_FILES, *model_files.PROCESSOR_FILES),
    *("vocab.txt", "*.jinja", "additional_chat_templates/*.jinja"),
)
_LICENSE = (
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "LICENCE",
    "LICENCE.txt",
    "LICENCE.md",
    "NOTICE",
    "NOTICE.txt",
    "NOTICE.md",
    "USE_POLICY.md",
)
_UPLOADED: dict[str, tuple[str, ...]] = {
    "adapter": (*KINDS["adapter"], *_TOKENIZER, *_LICENSE),
    "merged": (*KINDS["merged"], "generation_config.json", "*.safetensors.index.json", *_TOKENIZER, *_LICENSE),
    "gguf": (*KINDS["gguf"], "Modelfile", "*.Modelfile", *HUB_FILES, *_LICENSE),
}
_REPLACED: dict[str, tuple[str, ...]] = {
    "adapter": ("adapter_model*.safetensors",),
    "merged": ("model*.safetensors", "model*.safetensors.index.json"),
    "gguf": ("*.gguf",),
}
"""Files of an earlier push that could be mistaken for part of the new one."""
_VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")
_SETTINGS = ("*config.json",)
"""Files with settings, some of which may be paths of this machine."""
_PATH_FIELD = re.compile(r".*(_path|_file|_dir|_folder)")
"""Names of settings that hold paths: `base_model_name_or_path`, `vocab_file`, `cache_dir`."""
_LOADED_FROM = ("_name_or_path", "name_or_path")
"""Settings with the path that the model was loaded from, which no reader needs."""


@dataclass(frozen=True)
class UploadFile:
    """One file to upload: its path in the repository, and its content or the path of a file with the content."""

    name: str
    content: Path | bytes

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


def find(source: str, kind: str | None) -> tuple[Path, str]:
    """Return the folder to push and its kind, one of `KINDS`, or raise a UserError if it contains something else.

    If `kind` is None, it is the adapter of a run, or the kind of model in the folder.
    """
    folder = Path(source).expanduser()
    if not source or not folder.is_dir():
        raise UserError(f"{source!r} is not a folder; give a run, or the folder of an adapter, a merged model or GGUFs")
    if (folder / "run.json").is_file():
        kind = kind or "adapter"
        folder /= kind
    actual = next((each for each, files in KINDS.items() if all(any(folder.glob(file)) for file in files)), None)
    if actual is None or kind not in (None, actual):
        makers = {"adapter": "the recipe with --resume", "merged": command("merge"), "gguf": command("export-gguf")}
        expected = "a run, an adapter, a merged model or GGUF files"
        if kind:
            expected = f"{' and '.join(KINDS[kind])}; create it with {makers[kind]}"
        raise UserError(f"{folder}: expected {expected}")
    return folder, actual


def collect(folder: Path, kind: str, base_name: str | None) -> tuple[list[UploadFile], list[str]]:
    """Return the files of a folder to upload and the names of skipped files.

    In adapter_config.json, `base_name` replaces the path of the base model. Raises UserError if a file is damaged, or a
    link to a location outside the folder.
    """
    files, skipped = [], []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not path.resolve().is_relative_to(folder.parent.resolve() / folder.name):
            raise UserError(f"{path} links to outside {folder}; replace it with a copy, or delete it")
        if _matches(name, _UPLOADED[kind]):
            files.append(UploadFile(name, _without_own_paths(path, base_name)))
        elif name not in (atomic.MANIFEST, CARD) and not name.startswith("."):
            skipped.append(name)
    _check_intact(folder, kind, [file.name for file in files])
    return files, skipped


def _check_intact(folder: Path, kind: str, names: Sequence[str]) -> None:
    """Check that the named files are complete, and unchanged since training or merging wrote them."""
    if (folder / atomic.MANIFEST).is_file() and (reason := atomic.damage(folder)):
        raise UserError(f"{folder}: {reason}; restore it, or delete {atomic.MANIFEST} if the change is intended")
    for path in (folder / name for name in names):
        if path.suffix == ".safetensors":
            file_tensors(path)
        elif path.suffix == ".gguf":
            read_header(path)
    if kind == "merged":
        model_tensors(folder)  # all shards of the index


def stale(existing: Sequence[str], files: Sequence[UploadFile], kind: str) -> list[str]:
    """Return the obsolete weights of an earlier push. All other files in the repository belong to the user."""
    kept = {file.name for file in files}
    return [name for name in existing if name not in kept and _matches(name, _REPLACED[kind])]


def refuse_private_text(files: Sequence[UploadFile], folder: Path) -> None:
    """Raise a UserError if a text file or card contains a token or a local path. The message omits the value."""
    private = [f"{path}/".encode() for path in (folder.resolve(), folder.resolve().parent, Path.home()) if path.name]
    for file in files:
        if file.name.endswith((".safetensors", ".gguf")):
            continue
        content = file.read()
        source = f"{CARD} (the card, from run.json and reports)" if file.name == CARD else file.name
        if token.is_in(content):
            raise UserError(f"{source} contains text that looks like a Hub token; remove it, and revoke the token")
        if file.name not in _VOCABULARY and any(path in content for path in private):
            raise UserError(f"{source} contains a local path; remove folders (in a Modelfile: FROM ./name.gguf)")


def without_paths(value: Any) -> Any:
    """Return a value for a model card, with every path reduced to its last part. Lists may contain paths too."""
    if isinstance(value, dict):
        return {key: without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_paths(entry) for entry in value]
    if isinstance(value, str) and model_files.is_path(value):
        return model_files.last_part(value)
    return value


def without_path_settings(value: Any) -> Any:
    """Return the JSON of a settings file without paths of this machine.

    Those are the values of settings that hold paths, and the names of files and folders that exist. Any other text may
    look like a path and is none: the token `/nothink`, a regular expression, a chat template.
    """
    if isinstance(value, list):
        return [without_path_settings(entry) for entry in value]
    if isinstance(value, str):
        return model_files.last_part(value) if _exists_here(value) else value
    if not isinstance(value, dict):
        return value
    public = {}
    for name, entry in value.items():
        if name in _LOADED_FROM and isinstance(entry, str):
            continue
        public[name] = without_path_settings(entry)
        if _PATH_FIELD.fullmatch(name) and isinstance(entry, str) and (model_files.is_path(entry) or "\\" in entry):
            public[name] = model_files.last_part(entry)
    return public


def _exists_here(text: str) -> bool:
    """Return whether a text is the absolute path of a file on this machine. One word, such as `/`, may be a token."""
    if not text.startswith(("/", "~/")) or "/" not in text.lstrip("/"):
        return False
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # a long text, a null byte, or an unknown home
        return False


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # `*.gguf` does not match files in subfolders.
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _without_own_paths(path: Path, base_name: str | None) -> Path | bytes:
    if path.suffix != ".json":
        return path
    settings = json_files.read_object(path)  # a damaged file must not be uploaded
    if not _matches(path.name, _SETTINGS):
        return path
    public = without_path_settings(settings)
    if path.name == ADAPTER_CONFIG and base_name:
        public["base_model_name_or_path"] = base_name
    if public == settings:
        return path
    is_ascii = path.read_bytes().isascii()
    text = json.dumps(public, indent=2, ensure_ascii=is_ascii) + "\n"
    # UTF-8 cannot encode a lone surrogate. Its escape in Python is also its escape in JSON.
    return text.encode(errors="backslashreplace")
