"""What is evaluated: a run, an adapter or a model, found and checked without importing torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.config import STARTER, ModelConfig
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic, file_tensors, json_files
from lora_grpo.models import base_model
from lora_grpo.runs import read_record

BASE = "base"
"""What a model is called where its adapter is left out."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py", "README.md", *LICENCES]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


@dataclass(frozen=True)
class Overrides:
    """What the command line may know better than the folder."""

    bits: int | None = None
    base: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    any_base: bool = False
    """Take a base whose weights are not those that the run was trained on."""


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be asked."""

    label: str
    """What tables call it."""
    base: ModelConfig
    """The model, or the base below the adapter; its `name` is a folder that is there."""
    base_name: str
    """What the base was called where it was named: a Hub id, `starter`, a path."""
    adapter: Path | None
    """The adapter's folder."""
    tokenizer: Path
    """The folder that the tokenizer is read from."""
    run: Mapping[str, Any] | None = None
    """run.json of the run that it came from."""

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this model from any other: weights (on the Hub, their commit), precision, adapter, tokenizer."""
        on_hub = self.base.revision is not None
        return {
            "model": self.base_name,
            "revision": self.base.revision,
            "weights_sha256": None if on_hub else base_model.weights_fingerprint(Path(self.base.name)),
            "config_sha256": _digest(Path(self.base.name), ("config.json", "generation_config.json")),
            "bits": self.base.bits,
            "adapter_sha256": self.adapter and adapter_sha256(self.adapter),
            "tokenizer_sha256": _digest(self.tokenizer, TOKENIZER_FILES),
        }

    def without_adapter(self) -> ModelSpec:
        """Return the base, asked with the same tokenizer.

        Raises:
            UserError: there is no adapter to leave out.
        """
        if self.adapter is None:
            raise UserError(
                f"--compare base means the base below an adapter, and {self.label} is a whole model; name the other one"
            )
        return dataclasses.replace(self, label=BASE, adapter=None)


def resolve(name: str, overrides: Overrides) -> ModelSpec:
    """Find what a name means: `starter`, the folder of a run, an adapter or a model, or a Hub id.

    Raises:
        UserError: it is none of them, is incomplete, or its adapter was made for another base.
    """
    if base_model.is_folder_name(name) and not Path(name).expanduser().is_dir():
        raise UserError(f"{name} does not exist; give a run, an adapter, a model, a Hub id or a file of samples")
    folder, commit = _find(name, overrides.revision)
    if (folder / "run.json").is_file():
        return _of_run(name, folder, overrides)
    if (folder / "adapter_config.json").is_file():
        return _of_adapter(name, folder, overrides)
    if overrides.base:
        raise UserError(f"--base {overrides.base} is for an adapter, and {name} is none; leave it out")
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{name} holds no run.json, adapter_config.json or config.json; give a run, an adapter or a model"
        )
    return _model(name, folder, commit, overrides, None)


def files_of(name: str, base: str | None) -> list[Path]:
    """Return the files that decide what a name means and is asked, for as long as none of them changes.

    Args:
        name: what is evaluated; a repository on the Hub has no files here.
        base: the base that was given for an adapter.
    """
    folder = Path(base_model.source(name)).expanduser()
    found = _model_files(folder)
    run = run_of(folder)
    if run is not None:
        config = read_record(run)["config"]
        base = base or config["model"]["name"]
        rows = [Path(str(config["data"][split])).expanduser() for split in ("train", "eval")]
        found += [run / "run.json", *_model_files(run / "adapter"), *rows]
    elif (folder / "adapter_config.json").is_file():
        base = base or json_files.read_object(folder / "adapter_config.json").get("base_model_name_or_path")
    if base:
        found += _model_files(Path(base_model.source(base)).expanduser())
    return sorted({path for path in found if path.is_file()})


def adapter_sha256(folder: Path) -> str:
    """Return one SHA-256 over an adapter's weights and its configuration."""
    return _digest(folder, (ADAPTER_WEIGHTS, "adapter_config.json"))


def run_of(folder: Path) -> Path | None:
    """Return the run that a folder is, or whose adapter or checkpoint it is."""
    if (folder / "run.json").is_file():
        return folder
    if (folder / "adapter_config.json").is_file():
        above = folder.resolve().parents
        return next((run for run in above[:2] if (run / "run.json").is_file()), None)
    return None


def _model_files(folder: Path) -> list[Path]:
    patterns = ("*.json", "*.safetensors", "*.jinja", "*.model")
    return [path for pattern in patterns for path in folder.glob(pattern)] if folder.is_dir() else []


def context_tokens(target: ModelSpec) -> int | None:
    """Return the longest prompt and completion that the model takes, where its configuration says."""
    config = json_files.read_object(Path(target.base.name) / "config.json")
    inner = config.get("text_config")
    longest = config.get("max_position_embeddings") or (inner or {}).get("max_position_embeddings")
    return longest if isinstance(longest, int) and longest > 0 else None


def _of_run(name: str, folder: Path, overrides: Overrides, adapter: Path | None = None) -> ModelSpec:
    record = read_record(folder)
    adapter = adapter or folder / "adapter"
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"the run in {name} has no adapter yet; finish it with --resume, or give another folder")
    asked, policy = record["config"]["model"], record["policy"]
    base, commit = _find(overrides.base or asked["name"], overrides.revision or policy.get("revision"))
    target = _model(
        asked["name"],
        base,
        commit,
        dataclasses.replace(
            overrides,
            bits=overrides.bits or asked["bits"],
            trust_remote_code=overrides.trust_remote_code or asked["trust_remote_code"],
        ),
        adapter,
    )
    known = policy.get("fingerprint")
    if known and not overrides.any_base and base_model.weights_fingerprint(Path(target.base.name)) != known:
        raise UserError(
            f"{overrides.base or asked['name']} is not the base that the run in {name} was trained on: its weights "
            "differ from those in run.json; give that base with --base"
        )
    return dataclasses.replace(target, label="trained", run=record)


def _of_adapter(name: str, folder: Path, overrides: Overrides) -> ModelSpec:
    run = run_of(folder)
    if run is not None:  # it knows its base best
        return _of_run(str(run), run, overrides, folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{name} holds no {ADAPTER_WEIGHTS}; pickled weights are not loaded")
    config = json_files.read_object(folder / "adapter_config.json")
    base = overrides.base or config.get("base_model_name_or_path")
    if not base:
        raise UserError(f"{name}/adapter_config.json names no base model; give it with --base")
    below, commit = _find(str(base), config.get("revision"))
    return dataclasses.replace(_model(str(base), below, commit, overrides, folder), label="adapter")


def _find(name: str, revision: str | None) -> tuple[Path, str | None]:
    """Return a folder, and its commit where it was downloaded from the Hub."""
    where = base_model.source(name)
    if name == STARTER or base_model.is_folder_name(where):
        return Path(where), None
    folder = _fetch(where, revision)
    return folder, folder.name


def _model(name: str, folder: Path, commit: str | None, overrides: Overrides, adapter: Path | None) -> ModelSpec:
    """Return the model in a folder."""
    base_model.check_folder(str(folder), "the model")
    vocabularies = ("tokenizer.json", "tokenizer.model", "vocab.json")
    has_tokenizer = adapter is not None and any((adapter / file).is_file() for file in vocabularies)
    if adapter is not None:
        _check_shapes(adapter, folder, name)
    bits = overrides.bits or 16
    settings = ModelConfig(
        name=str(folder), bits=4 if bits == 4 else 16, trust_remote_code=overrides.trust_remote_code, revision=commit
    )
    called = str(Path(name)) if base_model.is_folder_name(name) else name
    return ModelSpec(Path(name).name, settings, called, adapter, adapter if adapter and has_tokenizer else folder)


def _fetch(name: str, revision: str | None) -> Path:
    """Return the folder that a repository on the Hub was downloaded to; its name is the commit."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_HUB_FILES,
            )
        )
    except Exception as error:  # offline, missing, gated and misnamed repositories raise many types
        raise UserError(f"{name} is no folder here and cannot be loaded from the Hub ({first_line(error)})") from error


def _check_shapes(adapter: Path, base: Path, base_name: str) -> None:
    """Refuse an adapter whose matrices do not fit the base's.

    Raises:
        UserError: names the first that does not.
    """
    weights = {name: tensor for file in base.glob("*.safetensors") for name, tensor in file_tensors(file).items()}
    brought = file_tensors(adapter / ADAPTER_WEIGHTS)
    for name, tensor in brought.items():
        module, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        below = weights.get(f"{module}.weight")
        if below is None or below.dtype not in ("F32", "F16", "BF16") or part not in ("A.weight", "B.weight"):
            continue  # packed in 4 bits, or called otherwise in the file: PEFT decides
        if f"base_model.model.{module}.base_layer.weight" in brought:
            continue  # the adapter brings the layer along, as one whose vocabulary was resized
        found, shape = below.shape, tensor.shape
        expected, got = (found[1], shape[1]) if part == "A.weight" else (found[0], shape[0])
        if got not in found:  # GPT-2 keeps its weights the other way round
            raise UserError(
                f"the adapter in {adapter} was made for another base than {base_name}: {module} has "
                f"{'x'.join(map(str, found))} weights there, and the adapter expects {got} for {expected}; give "
                "its own base with --base"
            )


def _digest(folder: Path, names: tuple[str, ...]) -> str:
    present = {name: atomic.sha256(folder / name) for name in names if (folder / name).is_file()}
    return hashlib.sha256(json.dumps(present, sort_keys=True).encode()).hexdigest()
