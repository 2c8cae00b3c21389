"""Select the files to upload: known names, undamaged, and without local paths or tokens in their content."""

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, file_tensors, json_files, local_paths, model_tensors
from lora_grpo.gguf import HUB_FILES, model_references
from lora_grpo.hub import facts, token
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
_MODELFILES = ("Modelfile", "*.Modelfile")
_UPLOADED: dict[str, tuple[str, ...]] = {
    "adapter": (*KINDS["adapter"], *_TOKENIZER, *_LICENSE),
    "merged": (*KINDS["merged"], "generation_config.json", "*.safetensors.index.json", *_TOKENIZER, *_LICENSE),
    "gguf": (*KINDS["gguf"], *_MODELFILES, *HUB_FILES, *_LICENSE),
}
_REPLACED: dict[str, tuple[str, ...]] = {
    "adapter": ("adapter_model*.safetensors",),
    "merged": ("model*.safetensors", "model*.safetensors.index.json"),
    "gguf": ("*.gguf",),
}
"""Files of an earlier push that could be mistaken for part of the new one."""
_VOCABULARY = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")
_BINARY = (".model", ".png")
_SETTINGS = ("*config.json",)
"""Files with settings, some of which may be paths of this machine."""
_PATH_FIELD = re.compile(r"(.*_)?(path|file|filename|file_name|dir|directory|folder)s?|(.*_)?directories")
"""Names of settings that hold paths: `base_model_name_or_path`, `vocab_file`, `cache_dir`, `path`, `local_files`."""
_TOKEN_FIELD = re.compile(r".*_tokens?|added_tokens_decoder|chat_template")
"""Names of settings with special tokens and templates, which must not change: `eos_token`, `extra_special_tokens`."""
_LOADED_FROM = ("_name_or_path", "name_or_path")
"""Settings with the path or the Hub id that the model was loaded from. No reader needs the path."""
_CODE_FIELD = "auto_map"
"""The setting with the classes of a model: `module.Class`, or `owner/name--module.Class`."""
_OLLAMA_NAME = re.compile(r"(https?://)?\w[\w.-]*(:\d+)?(/\w[\w.-]*)*(:\w[\w.-]*)?(@sha256:\w+)?")
"""The name of a model that Ollama downloads: `llama3.2:3b`, `hf.co/owner/name:Q8_0`."""


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
    """Raise a UserError if a text file or card contains a token or a local path. The message omits a token."""
    for file in files:
        if file.name.endswith((".safetensors", ".gguf")):
            continue
        content = file.read()
        source = f"{CARD} (the card, from run.json and reports)" if file.name == CARD else file.name
        if token.is_in(content):
            raise UserError(f"{source} contains text that looks like a Hub token; remove it, and revoke the token")
        if _matches(file.name, _MODELFILES):
            _refuse_models_elsewhere(content.decode(errors="replace"), source, folder)
        if path := _local_path(file.name, content, folder):
            raise UserError(f"{source} contains a local path: {path!r}; remove it from the file")


def _refuse_models_elsewhere(modelfile: str, source: str, folder: Path) -> None:
    """Raise a UserError if a Modelfile needs a file that is not at the top of the pushed folder."""
    for command_name, value in model_references(modelfile):
        is_beside = "/" not in (name := value.removeprefix("./")) and "\\" not in name and not name.startswith("~")
        is_weights = value.endswith((".gguf", ".safetensors", ".bin")) or (folder / value).exists()
        is_published = _OLLAMA_NAME.fullmatch(value) is not None and not is_weights
        if not is_beside and not is_published:
            expected = f"write {command_name} ./NAME.gguf with a file of {folder.name}"
            raise UserError(f"{source} contains a local path: {command_name} {value!r}; {expected}")


def _local_path(name: str, content: bytes, folder: Path) -> str | None:
    """Return the first local path in the content of a file, or None."""
    text = content.decode(errors="replace")
    if name in _VOCABULARY:
        return None
    if name.endswith(_BINARY):  # a SentencePiece model names the files of its authors
        return local_paths.find_own(text, folder)
    if name.endswith(".json"):  # without the escapes of JSON
        text = "\n".join(_strings(json.loads(text)))
    return local_paths.find(text, folder)


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, also the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield name
            yield from _strings(entry)


def without_paths(value: Any) -> Any:
    """Return a value for a model card, with every path reduced to its last part. Lists may contain paths too."""
    if isinstance(value, dict):
        return {key: without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_paths(entry) for entry in value]
    if isinstance(value, str) and model_files.is_path(value):
        return model_files.last_part(value)
    return value


def without_path_settings(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the JSON of a settings file in `folder` without paths of this machine.

    Those are the values of settings that hold paths, and private paths in all other settings except tokens and
    templates. Any other text may look like a path and is none: the token `/nothink`, a regular expression.
    """
    public: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _LOADED_FROM and isinstance(value, str):
            if not value or _is_published(value):
                public[name] = value
        elif _TOKEN_FIELD.fullmatch(name):
            public[name] = value
        else:
            public[name] = _without_path(value, folder, field=name)
    return public


def _without_path(value: Any, folder: Path, field: str) -> Any:
    """Return the value of a setting, or a part of it, without paths of this machine."""
    if isinstance(value, list):
        return [_without_path(entry, folder, field) for entry in value]
    if isinstance(value, dict) and (field == _CODE_FIELD or _PATH_FIELD.fullmatch(field)):
        return {name: _without_path(entry, folder, field) for name, entry in value.items()}
    if isinstance(value, dict):
        return without_path_settings(value, folder)
    if not isinstance(value, str) or "\n" in value:
        return value
    if field == _CODE_FIELD:
        source, separator, code = value.rpartition("--")
        return code if separator and not _is_published(source) else value
    if _PATH_FIELD.fullmatch(field):
        is_path = model_files.is_path(value) or "\\" in value
    else:
        private = local_paths.find(value, folder)
        is_path = private is not None and value.startswith(private) and model_files.is_path(value)
    return model_files.last_part(value) if is_path else value


def _is_published(name: str) -> bool:
    """Return whether a name is a Hub id and not that of a local folder."""
    return facts.is_hub_id(name) and not model_files.is_folder_name(name)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # `*.gguf` does not match files in subfolders.
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _without_own_paths(path: Path, base_name: str | None) -> Path | bytes:
    if path.suffix != ".json":
        return path
    settings = json_files.read_object(path)  # a damaged file must not be uploaded
    if not _matches(path.name, _SETTINGS):
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
