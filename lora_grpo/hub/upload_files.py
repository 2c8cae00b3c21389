"""What goes up: a folder's files of known kinds, with nothing of this machine in them."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import MANIFEST, sha256

CARD = "README.md"
CARD_MARK = "<!-- This card was written by lora_grpo. -->"
"""What a card ends with; a README.md without it is somebody's own."""
KINDS = ("adapter", "merged", "gguf")
"""What a run can be pushed as; its folders are called so."""

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
_PAPERS = re.compile(r"(LICEN[SC]E|NOTICE|COPYING|USE_POLICY)(-[\w-]+(\.\d+)*)?(\.(txt|md|rst))?", re.ASCII)
"""What goes with weights whatever they are; of other endings it may be a program or a secret."""
_KNOWN: dict[str, tuple[str, ...]] = {
    "adapter": ("adapter_config.json", "adapter_model.safetensors", *_TOKENIZER),
    "merged": (
        "config.json",
        "generation_config.json",
        "*.safetensors",
        "*.safetensors.index.json",
        "merge_report.json",
        *_TOKENIZER,
    ),
    "gguf": ("*.gguf", "Modelfile", "*.Modelfile", "merge_report.json"),
}
_WEIGHTS: dict[str, tuple[str, ...]] = {
    "adapter": ("adapter_model*.safetensors",),
    "merged": ("model*.safetensors", "model*.safetensors.index.json"),
    "gguf": ("*.gguf",),
}
LOADED_BY = {"adapter": "adapter_config.json", "merged": "config.json"}
"""The file that a repository is loaded by; one with both loads the merged model and the adapter on top of it."""
RESULTS = ".eval_results/lora-grpo-*.yaml"
"""How the files of evaluation results are called that the kit writes."""
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_PATH_KEYS = ("base_model_name_or_path", "_name_or_path", "name_or_path")


@dataclass(frozen=True)
class UploadFile:
    """One file as it is to be in the repository."""

    name: str
    """Its path there."""
    content: Path | bytes
    """Where its bytes are."""

    @property
    def size(self) -> int:
        """Return its length in bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @cached_property
    def sha256(self) -> str:
        """What the Hub calls a large file by."""
        return hashlib.sha256(self.content).hexdigest() if isinstance(self.content, bytes) else sha256(self.content)

    @property
    def is_weights(self) -> bool:
        """Tell the files that are large, and sent one by one, from the rest."""
        return self.name.endswith((".safetensors", ".gguf"))


def find(name: str, kind: str | None) -> tuple[Path, str]:
    """Return the folder to push, and which of `KINDS` it is.

    Args:
        name: the folder of a run, of an adapter, of a merged model or of GGUF files.
        kind: the one asked for; None takes what the folder is, and of a run the adapter.

    Raises:
        UserError: there is no such folder, or it is something else.
    """
    folder = Path(name).expanduser()
    if not name or not folder.is_dir():
        raise UserError(
            f"{name or repr(name)} is no folder; give a run, or the folder of an adapter, a merged model or GGUF files"
        )
    if (folder / "run.json").is_file():
        wanted = kind or "adapter"
        if _kind_of(folder / wanted) == wanted:
            return folder / wanted, wanted
        hint = {
            "adapter": "finish it with --resume",
            "merged": "make it with scripts/merge.py",
            "gguf": "make it with scripts/export_gguf.py",
        }[wanted]
        raise UserError(f"the run in {name} has no {wanted}/ with {_kind_needs(wanted)}; {hint}")
    found = _kind_of(folder)
    if found is None:
        raise UserError(
            f"{name} holds no run.json, no adapter_config.json, no config.json with .safetensors and no .gguf; give "
            "the folder of a run, an adapter, a merged model or GGUF files"
        )
    if kind is not None and kind != found:
        raise UserError(f"--what {kind} was asked for, and {name} holds {_kind_needs(found)}; pass --what {found}")
    return folder, found


def _kind_of(folder: Path) -> str | None:
    if (folder / "adapter_config.json").is_file():
        return "adapter" if (folder / "adapter_model.safetensors").is_file() else None
    if (folder / "config.json").is_file() and list(folder.glob("*.safetensors")):
        return "merged"
    return "gguf" if list(folder.glob("*.gguf")) else None


def _kind_needs(kind: str) -> str:
    return {
        "adapter": "adapter_config.json and adapter_model.safetensors",
        "merged": "config.json and .safetensors weights",
        "gguf": ".gguf files",
    }[kind]


def collect(folder: Path, kind: str, base_name: str | None) -> tuple[list[UploadFile], list[str]]:
    """Return the files of a folder that go up, and the names of those that stay.

    Args:
        folder: what is pushed.
        kind: which of `KINDS` it is.
        base_name: what the base model is called to others, to stand where its path is.

    Raises:
        UserError: a file is a pickle, a link out of the folder, or holds a path of this machine.
    """
    files, left = [], []
    inside = folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise UserError(f"{path} is a link to outside of {folder}; put a copy in its place, or take it away")
        if path.is_dir():
            continue
        if path.suffix in _PICKLES:
            raise UserError(
                f"{path} is not pushed, and nothing beside it: it is a pickle, and reading a pickle runs whatever code "
                "is in it; push a folder of .safetensors or .gguf, or take it away"
            )
        if _PAPERS.fullmatch(name):
            _refuse_binary(path)
            files.append(UploadFile(name, path))
        elif _matches(name, _KNOWN[kind]):
            files.append(UploadFile(name, _publishable(path, kind, base_name)))
        elif name not in (MANIFEST, CARD) and not any(part.startswith(".") for part in Path(name).parts):
            left.append(name)
    _refuse_paths(files, inside)
    return files, left


def stale(names: Sequence[str], files: Sequence[UploadFile], kind: str) -> list[str]:
    """Return those of a repository's files that an earlier push left and that this one has no more.

    Weights of the kind that is pushed and the kit's own results: beside the new ones they would be taken for a part of
    them. Whatever else is there is the user's.
    """
    ours = {file.name for file in files}
    return [name for name in names if name not in ours and _matches(name, (*_WEIGHTS[kind], RESULTS))]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Match name by name of folder: `*.gguf` is no file in a folder."""
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_binary(path: Path) -> None:
    try:
        is_text = "\0" not in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        is_text = False
    if not is_text:
        raise UserError(f"{path} is no text; put a licence in UTF-8 in its place, or take it away")


def _publishable(path: Path, kind: str, base_name: str | None) -> Path | bytes:
    """Return a file's content with the paths of this machine taken out of the fields that are known to have them."""
    if path.suffix != ".json" or path.name in ("tokenizer.json", "vocab.json") or path.name.endswith(".index.json"):
        return path
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        return path
    changed = dict(settings)
    for key in _PATH_KEYS:
        value = settings.get(key)
        if isinstance(value, str) and is_path(value):
            changed[key] = base_name or Path(value).name
    if path.name == "adapter_config.json" and base_name:
        changed["base_model_name_or_path"] = base_name
    if path.name == "merge_report.json":
        changed = without_paths(settings)
        if isinstance(changed.get("base"), dict) and base_name:
            changed["base"]["name"] = base_name
    if changed == settings:
        return path
    return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode(errors="replace")


def is_path(text: str) -> bool:
    """Tell the path of a folder or file here from a name, such as a Hub id."""
    # The same rule as for a model's name: what exists here as a folder is a folder.
    return _is_rooted(text) or text.count("/") > 1 or ("/" in text and Path(text).exists())


def _is_rooted(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~", "\\\\")) or text[1:3] in (":\\", ":/")


def without_paths(value: Any) -> Any:
    """Return a JSON value in which every text that begins as a path does is its last part alone."""
    if isinstance(value, dict):
        return {key: without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_paths(entry) for entry in value]
    if isinstance(value, str) and _is_rooted(value):
        return Path(value.replace("\\", "/")).name
    return value


def _refuse_paths(files: Sequence[UploadFile], inside: Path) -> None:
    """Refuse a text that holds the folder's own path or the user's home.

    Raises:
        UserError: names the file.
    """
    private = {f"{path}/" for path in (inside, inside.parent, Path.home()) if path != Path("/")}
    for file in files:
        if file.is_weights or file.name in ("tokenizer.json", "vocab.json", "merges.txt"):
            continue
        content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
        if any(path.encode() in content for path in private):
            raise UserError(
                f"{file.name} holds a path of this machine ({inside} or your home); write names without folders there "
                "(in a Modelfile: FROM ./name.gguf)"
            )
