"""Keep tokens and paths of this machine out of a repository.

Settings lose their paths, because no reader needs them. Other text with a private path, or with a Hub token, is not
uploaded at all: only its author knows how to correct it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import local_paths
from lora_grpo.gguf import model_references
from lora_grpo.hub import token
from lora_grpo.hub.uploads import CARD, MODELFILES, UploadFile, is_hub_id, matches
from lora_grpo.models import model_files

_VOCABULARY = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")
_BINARY = (".model", ".png")
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


def refuse_private_text(files: Sequence[UploadFile], folder: Path) -> None:
    """Raise a UserError if a text file or card contains a token or a local path. The message omits a token."""
    for file in files:
        if file.name.endswith((".safetensors", ".gguf")):
            continue
        content = file.read()
        source = file.name
        if file.name == CARD:
            source = f"{CARD} (the card, from run.json and reports)"
        if token.is_in(content):
            raise UserError(f"{source} contains text that looks like a Hub token; remove it, and revoke the token")
        if matches(file.name, MODELFILES):
            _refuse_models_elsewhere(content.decode(errors="replace"), source, folder)
        path = _local_path(file.name, content, folder)
        if path:
            raise UserError(f"{source} contains a local path: {path!r}; remove it from the file")


def _refuse_models_elsewhere(modelfile: str, source: str, folder: Path) -> None:
    """Raise a UserError if a Modelfile needs a file that is not at the top of the pushed folder."""
    for command_name, value in model_references(modelfile):
        file_name = value.removeprefix("./")
        is_beside = "/" not in file_name and "\\" not in file_name and not file_name.startswith("~")
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
        return local_paths.find_in_private_folders(text, folder)
    if name.endswith(".json"):  # without the escapes of JSON
        text = "\n".join(strings(json.loads(text)))
    return local_paths.find(text, folder)


def strings(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, also the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield name
            yield from strings(entry)


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

    Removed are the values of settings that hold paths, and private paths in all other settings except tokens and
    templates. Other texts only look like paths and stay: the token `/nothink`, a regular expression.
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
    if isinstance(value, dict):
        if field == _CODE_FIELD or _PATH_FIELD.fullmatch(field):  # every entry is such a value
            return {name: _without_path(entry, folder, field) for name, entry in value.items()}
        return without_path_settings(value, folder)
    if not isinstance(value, str) or "\n" in value:
        return value

    if field == _CODE_FIELD:
        repository, separator, code = value.rpartition("--")
        if separator and not _is_published(repository):
            return code
        return value
    if _PATH_FIELD.fullmatch(field):
        is_path = model_files.is_path(value) or "\\" in value
    else:
        private_path = local_paths.find(value, folder)
        begins_with_it = private_path is not None and value.startswith(private_path)
        is_path = begins_with_it and model_files.is_path(value)
    return model_files.last_part(value) if is_path else value


def _is_published(name: str) -> bool:
    """Return whether a name is a Hub id and not that of a local folder."""
    return is_hub_id(name) and not model_files.is_folder_name(name)
