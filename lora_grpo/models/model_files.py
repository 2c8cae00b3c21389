"""Locate the files of a model: in a folder, in the Hub cache, or on the Hub. Loads no weights.

A name is a folder, a Hub id such as `owner/name`, or `starter`, the bundled model.
"""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import console, starter
from lora_grpo.config import LAPTOP_MODEL, STARTER, ModelConfig
from lora_grpo.errors import UserError, first_line, suggestion
from lora_grpo.files import atomic, json_files
from lora_grpo.progress import waiting

LICENSE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py", "README.md", *LICENSE_FILES]
_NOT_LOADED = ["consolidated*.safetensors", "*/*.safetensors"]
"""Second copies of the weights in other formats."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
)

GENERATION_CONFIG = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of a tokenizer's other chat templates, such as `tool_use.jinja`."""

PROCESSOR_FILES = ("*processor_config.json", "chat_template.json")
"""Patterns of the files of an image processor. The base's are copied to a merged model."""


class HubUnavailable(UserError):
    """The Hub is unreachable, or it does not give access to the model."""


def source(name: str) -> str:
    """Return the argument for `from_pretrained`: a folder or a Hub id."""
    if name == STARTER:
        return str(starter.model_path())
    return str(Path(name).expanduser()) if is_folder_name(name) else name


def is_path(text: str) -> bool:
    r"""Return whether a text has the form of a path that is not just a name, on Windows too: `/a`, `./a`, `C:\a`."""
    is_windows = re.match(r"[A-Za-z]:[\\/]|\\\\\w", text) is not None  # or a network share, \\server\share
    return is_windows or text.startswith(("/", "./", "../", "~"))


def last_part(path: str) -> str:
    """Return the name of the file or folder that a path ends with, also of a path on Windows."""
    return Path(path.replace("\\", "/")).name


def is_folder_name(name: str) -> bool:
    """Return whether a name is a folder rather than a Hub id such as `owner/name`."""
    if name == STARTER:
        return False
    if is_path(name) or "\\" in name or name.count("/") > 1:  # no Hub id has this form
        return True
    if Path(name).exists():
        return True
    return "/" in name and Path(name).parent.is_dir()  # outputs/mistyped


def missing_folder(name: str, expected: str) -> str:
    """Return the error for a folder that does not exist: a similar name, or what is expected."""
    folder = Path(name).expanduser()
    neighbors = [path.name for path in folder.parent.glob("*/")]
    return f"{name} does not exist; {suggestion(folder.name, neighbors, otherwise=f'give {expected}')}"


def existing_folder(name: str, expected: str) -> Path:
    """Return the folder that a user has named, or raise a UserError that says what was expected."""
    folder = Path(name).expanduser()
    if name and not folder.exists():
        raise UserError(missing_folder(name, expected))
    if not name or not folder.is_dir():  # an empty name would be the current folder
        raise UserError(f"{name!r} is not a folder; give {expected}")
    return folder


def check_folder(name: str, flag: str) -> None:
    """Check that a folder contains a model, or raise a UserError that names the flag. A Hub id is not checked."""
    if not is_folder_name(name):
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"{flag} {missing_folder(name, 'the folder of a model or a Hub id such as owner/name')}")
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise UserError(
                f"{flag} {name} has no {pattern}; give the folder of a model (pickled weights are not loaded)"
            )


def weights_fingerprint(folder: Path) -> str:
    """Return a SHA-256 of the names and contents of the safetensors files in a folder."""
    return digest(folder, [path.name for path in folder.glob("*.safetensors")])


def digest(folder: Path, names: Collection[str]) -> str:
    """Return a SHA-256 of the names and contents of those files that are in a folder."""
    paths = [folder / name for name in names if (folder / name).is_file()]
    with ThreadPoolExecutor(4) as threads:
        hashes = threads.map(_cached_sha256, paths, [path.stat().st_mtime_ns for path in paths])
        sha256_by_name = {path.name: sha256 for path, sha256 in zip(paths, hashes, strict=True)}
    return hashlib.sha256(json.dumps(sha256_by_name, sort_keys=True).encode()).hexdigest()


@functools.lru_cache
def _cached_sha256(path: Path, modified: int) -> str:
    """Return the SHA-256 of a file, cached by modification time because a base model has gigabytes."""
    return atomic.sha256(path)


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates in the folder of a tokenizer by name, as transformers (5.17) reads them.

    The usual template is `default`. Files take precedence over tokenizer_config.json.

    Raises:
        UserError: a file cannot be read, or tokenizer_config.json has a template that is not a text.
    """
    files: dict[str, Path] = {}
    if (folder / TEMPLATE_FILE).is_file():
        files["default"] = folder / TEMPLATE_FILE
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        files[path.stem] = path
    if files:
        templates = {name: _read_template(path) for name, path in files.items()}
    else:
        templates = _templates_in_config(folder / "tokenizer_config.json")
    return {name: text for name, text in templates.items() if text}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"the chat template {path} cannot be read ({first_line(error)}); save it as UTF-8, or delete it"
        ) from None


def _templates_in_config(path: Path) -> dict[str, str]:
    """Return the templates in the `chat_template` of a tokenizer_config.json: a text, or a list of names and templates.

    Raises:
        UserError: it is neither.
    """
    if not path.is_file():
        return {}
    saved = json_files.read_object(path).get("chat_template")
    if saved is None:
        return {}
    if isinstance(saved, str):
        return {"default": saved}
    if not isinstance(saved, list):
        raise _malformed_template(path, saved)
    templates = {}
    for entry in saved:
        if not isinstance(entry, dict):
            raise _malformed_template(path, entry)
        name = entry.get("name")
        template = entry.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise _malformed_template(path, entry)
        templates[name] = template
    return templates


def _malformed_template(path: Path, value: Any) -> UserError:
    return UserError(
        f"{path}: chat_template has {value!r:.80}; expected a text, or a list of objects with a name and a template; "
        "correct it, or remove the field"
    )


def read_config(settings: ModelConfig) -> dict[str, Any]:
    """Return a model's config.json, or raise HubUnavailable or a UserError. Imports neither torch nor transformers."""
    if settings.name == STARTER or is_folder_name(settings.name):
        return json_files.read_object(Path(source(settings.name)) / "config.json")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    path = try_to_load_from_cache(settings.name, "config.json", revision=settings.revision)
    if not isinstance(path, str):  # not cached, or known to be missing
        path = _download(hf_hub_download, settings, filename="config.json")
    return json_files.read_object(Path(path))


@dataclass(frozen=True)
class ModelFolder:
    """A folder with the files of a model or an adapter."""

    path: Path
    commit: str | None
    """The commit, if the files are from the Hub."""


def locate(name: str, revision: str | None) -> ModelFolder:
    """Return the folder of a model or an adapter, or raise a UserError. The Hub's files are downloaded to its cache."""
    folder_or_id = source(name)
    if is_folder_name(folder_or_id):
        return ModelFolder(Path(folder_or_id), commit=None)
    from huggingface_hub import snapshot_download

    settings = ModelConfig(name=folder_or_id, revision=revision)
    patterns = {"allow_patterns": _HUB_FILES, "ignore_patterns": _NOT_LOADED}
    path = Path(_download(snapshot_download, settings, **patterns))
    return ModelFolder(path, commit=path.name)  # in the cache, the folder is named by the commit


def hub_http_error() -> type[Exception]:
    """Return the class that all errors of huggingface_hub's HTTP library share.

    If the connection fails, huggingface_hub raises that library's error. The library is httpx in huggingface_hub 1 and
    httpx2 in 2, so neither is imported here. `HfHubHTTPError`, for answers that are errors, is a subclass.
    """
    from huggingface_hub.errors import HTTPError

    return HTTPError


def _download(function: Callable[..., str], settings: ModelConfig, **options: Any) -> str:
    """Return the path that a function of huggingface_hub returns: from the Hub or, if it is unavailable, its cache."""
    unavailable_reason = ""
    try:
        # Ask before a download: huggingface_hub (1.33) retries for up to a minute if the Hub is unreachable.
        unavailable_reason = _unavailable_reason(settings)
        is_offline = bool(unavailable_reason)
        with _telling(f"downloading {settings.name}"):
            return function(settings.name, revision=settings.revision, local_files_only=is_offline, **options)
    except Exception as error:  # missing, gated and misnamed repositories raise many types
        kind = HubUnavailable if unavailable_reason else UserError
        reason = unavailable_reason or _missing_reason(error, settings) or first_line(error)
        raise kind(f"{settings.name} is not a folder and cannot be loaded from the Hub ({reason})") from error


def _missing_reason(error: Exception, settings: ModelConfig) -> str:
    """Return what the Hub does not have, and the fix; "" for another error.

    The first line of such an error of huggingface_hub has only a status and the number of the request.
    """
    from huggingface_hub import errors

    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no commit, branch or tag {settings.revision!r}; correct the revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such model, or it is private; correct the name, or run hf auth login"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return "it has no config.json; pass a model in the format of transformers"
    return ""


def _telling(task: str) -> contextlib.AbstractContextManager[None]:
    """Return a block that is told of if it takes long, unless huggingface_hub shows progress bars."""
    if console.overwrites_lines():
        return contextlib.nullcontext()
    return waiting(task)


def _unavailable_reason(settings: ModelConfig) -> str:
    """Return why the Hub does not give access to a model; "" if it does, or if it says that something is missing."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(settings.name, "config.json", revision=settings.revision)
    try:
        metadata = get_hf_file_metadata(url, timeout=5)
        if metadata.commit_hash is not None:
            return ""
        reason = f"{url} is not answered by the Hub; sign in to the network"  # a login page has no commit
    except errors.OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set"
    except errors.GatedRepoError:
        reason = f"the model is gated; accept its license at huggingface.co/{settings.name}, then run hf auth login"
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError):
        return ""  # an adapter has no config.json
    except (hub_http_error(), ConnectionError) as error:  # of the network, the Hub or a proxy
        reason = f"the Hub is unreachable ({first_line(error)})"
        answer = getattr(error, "response", None)
        if answer is not None and answer.status_code == 401:  # also for a public model
            reason = "the Hub rejected the token; run hf auth login, or unset HF_TOKEN"
    if settings.name == LAPTOP_MODEL:
        reason += "; `make laptop-model` makes a folder of it"
    return f"it is not cached, and {reason}"
