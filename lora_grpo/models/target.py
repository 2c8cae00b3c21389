"""Resolve a name to a model spec without importing torch. It can be a run, an adapter, a model or a Hub id."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from lora_grpo import console
from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.models import model_files
from lora_grpo.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_sha256, read_adapter
from lora_grpo.models.adapter_formats import MLX_HUB, holds_adapter, nested_adapter, origin_of, peft_folder
from lora_grpo.models.model_files import ModelFolder
from lora_grpo.runs import read_record

BASE = "base"
"""Label of the base model below an adapter."""
START = "start"
"""Label, and folder in a run, of the adapter that a run starts from. It takes the place of the base in comparisons."""
BEST = "best"
"""Label, and folder in a run, of the adapter with the highest validation reward."""


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags of all commands that load a model: they choose its adapter, or override the settings saved with it."""

    what: Literal["adapter", "best"] = "adapter"
    """Which adapter of a run: the last one, or the one with the highest validation reward, in RUN/best."""
    base: str | None = None
    """Base model of an adapter (a folder or Hub id), if it has moved or the adapter does not name it."""
    revision: str | None = None
    """Hub commit, branch or tag: of the model, of the adapter if it is on the Hub, or else of an adapter's base."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository."""


@dataclass(frozen=True)
class ModelSpec:
    """A model, with or without an adapter."""

    label: str
    """The model's name in tables."""
    base: ModelConfig
    """The model, or the base model of the adapter. Its `name` is an existing folder."""
    base_name: str
    """The requested name: a Hub id, `starter` or a path."""
    adapter: Path | None
    """A folder in PEFT's format, which may be a converted copy (see `peft_folder`)."""
    tokenizer: Path
    run: Mapping[str, Any] | None = None
    """run.json of the run that trained the adapter."""
    start: Path | None = None
    """The adapter that the run started from; None if it started from a new one."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name, in place of those in the tokenizer's folder; empty if that folder decides."""
    template_from: Literal["adapter", "base"] | None = None
    """Where the chat template is from; None if there is none."""

    @property
    def identity(self) -> dict[str, Any]:
        """Hashes that identify the model: weights (or the Hub commit), precision, adapter and tokenizer."""
        base_folder = Path(self.base.name)
        is_from_hub = self.base.revision is not None
        return {
            "model": self.base_name,
            "revision": self.base.revision,
            "weights_sha256": None if is_from_hub else model_files.weights_fingerprint(base_folder),
            "config_sha256": model_files.digest(base_folder, ("config.json", model_files.GENERATION_CONFIG)),
            "bits": self.base.loaded_bits,
            "adapter_sha256": adapter_sha256(self.adapter) if self.adapter else None,
            "tokenizer_sha256": self._tokenizer_sha256(),
        }

    def _tokenizer_sha256(self) -> str:
        files_sha256 = model_files.digest(self.tokenizer, model_files.TOKENIZER_FILES)
        if not self.chat_templates:
            return files_sha256
        content = json.dumps([files_sha256, self.chat_templates], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def run_folder(self) -> Path | None:
        """Folder of the run that trained the adapter, or None."""
        return run_of(self.adapter) if self.adapter and self.run else None

    @property
    def context_tokens(self) -> int | None:
        """Maximum length of a prompt and its completion in tokens, or None if the configuration does not specify it."""
        config = json_files.read_object(Path(self.base.name) / "config.json")
        text_config = config.get("text_config") or config
        max_tokens = text_config.get("max_position_embeddings")
        return max_tokens if isinstance(max_tokens, int) else None

    def without_adapter(self) -> Self:
        """Return the model before training, with the same tokenizer: the base, or the base and an adapter."""
        if self.adapter is None:
            raise UserError(
                f"--compare base needs an adapter, and {self.label} has none; name the other model with --compare"
            )
        if self.start and not (self.start / ADAPTER_WEIGHTS).is_file():
            raise UserError(f"{self.start} is missing; pass --compare {self.base_name} for the base without an adapter")
        label = START if self.start else BASE
        return dataclasses.replace(self, label=label, adapter=self.start)


def resolve(name: str, flags: ModelFlags, *, bits: int | None = None, any_base: bool = False) -> ModelSpec:
    """Resolve `starter`, a Hub id, or the folder of a run, an adapter or a model.

    Args:
        name: the name as the user gave it.
        flags: flags that override what was saved with the model.
        bits: precision of the weights. None: that of the run, else 16.
        any_base: accept a base with different weights than the one that the run was trained on.

    Raises:
        UserError: the name is none of these, or files are missing or damaged.
    """
    if _is_missing_folder(name):
        expected = "a run, an adapter, a model, a Hub id or a file of samples"
        raise UserError(model_files.missing_folder(name, expected))
    folder = model_files.locate(name, flags.revision)
    run = run_of(folder.path)
    if run is None and not holds_adapter(folder.path):
        return _resolve_model(name, folder, bits, flags)
    adapter = folder.path / "adapter" if folder.path == run else folder.path
    is_from_hub = folder.commit is not None
    if is_from_hub:  # the revision was that of the adapter
        flags = dataclasses.replace(flags, revision=None)
    return _resolve_adapter(adapter, run, bits, flags, any_base=any_base)


def _resolve_model(name: str, folder: ModelFolder, bits: int | None, flags: ModelFlags) -> ModelSpec:
    """Return the spec of a model without an adapter."""
    if flags.base:
        raise UserError(f"--base {flags.base} needs an adapter, and {name} has none; remove the flag")
    adapter = nested_adapter(folder.path)
    if not (folder.path / "config.json").is_file():
        fix = f"pass {adapter}" if adapter else "give a run, an adapter or a model"
        raise UserError(f"{name} has no run.json, adapter_config.json or config.json; {fix}")
    if adapter:  # verl's model merger writes the base and the adapter so
        console.note(f"note: {name} is used without the adapter in {adapter}; for that, pass {adapter} --base {name}")
    return ModelSpec(
        label=Path(name).name,
        base=_base_settings(folder, bits, flags),
        base_name=name,
        adapter=None,
        tokenizer=folder.path,
        template_from="base" if model_files.chat_templates(folder.path) else None,
    )


def _resolve_adapter(
    adapter: Path, run: Path | None, bits: int | None, flags: ModelFlags, *, any_base: bool
) -> ModelSpec:
    """Return the spec of an adapter, with the base, the tokenizer and the chat template that it was trained with."""
    adapter = peft_folder(adapter)
    if run is None:
        saved = read_adapter(adapter)
        training = _Training("adapter", saved.base_model_name_or_path, saved.revision)
    else:
        read_adapter(adapter)  # raises UserError for a damaged file
        training = _training_of(run, adapter, flags)

    # The base: as requested, else as recorded.
    requested = flags.base or training.base_name
    if requested and requested.startswith(MLX_HUB):
        raise UserError(
            f"the base of the adapter in {origin_of(adapter)}, {requested}, is in the format of MLX, which "
            "transformers does not load; pass the model that it was made from with --base"
        )
    if not requested or (not flags.base and _is_missing_folder(requested)):
        raise UserError(
            f"the base of the adapter in {origin_of(adapter)}, {requested or 'which it does not name'}, does not exist "
            "here; pass it with --base"
        )
    is_recorded_base = requested == training.base_name
    revision = flags.revision or (training.revision if is_recorded_base else None)
    base_folder = model_files.locate(requested, revision)
    base = _base_settings(base_folder, bits or training.bits, flags)
    is_checked = training.fingerprint is not None and not any_base
    if is_checked and model_files.weights_fingerprint(base_folder.path) != training.fingerprint:
        raise UserError(
            f"{requested} is not the base that the run in {run} was trained on, {training.base_name}: its weights "
            "differ from those in run.json; pass that base with --base"
        )

    # The base of a run keeps the name in run.json, even if --base names the folder where it is now.
    is_folder = base_folder.commit is None
    base_name = str(training.base_name) if run is not None and is_folder else requested
    spec = ModelSpec(
        label=training.label,
        base=base,
        base_name=base_name,
        adapter=adapter,
        tokenizer=adapter if _has_tokenizer(adapter) else base_folder.path,
        run=training.record,
        start=training.start,
    )
    return _with_template(spec)


@dataclass(frozen=True)
class _Training:
    """What an adapter_config.json or, in more detail, a run.json says about the training of an adapter."""

    label: str
    base_name: str | None
    revision: str | None
    """Commit of the base."""
    bits: int | None = None
    """Precision of the base, if it is known."""
    fingerprint: str | None = None
    """SHA-256 of the base's weights, if it was a folder."""
    record: Mapping[str, Any] | None = None
    """run.json."""
    start: Path | None = None
    """The adapter that the run started from. None if it started from a new one, or if this adapter is that one."""


def _training_of(run: Path, adapter: Path, flags: ModelFlags) -> _Training:
    """Return what run.json, which identifies the base of an adapter exactly, says about its training."""
    record = read_record(run)
    model = record["config"]["model"]
    policy = record["policy"]
    folder_name = adapter.resolve().name
    label = "trained" if folder_name == "adapter" else folder_name
    started_from = record["config"].get("lora", {}).get("from")
    if model["trust_remote_code"] and not flags.trust_remote_code:
        raise UserError(
            f"{run}/run.json would run Python code from the repository of {flags.base or model['name']}; if you trust "
            "it, pass --trust-remote-code"
        )
    return _Training(
        label=label,
        base_name=model["name"],
        revision=policy.get("revision"),
        bits=16 if policy.get("bits", model["bits"]) == 16 else 4,
        fingerprint=policy.get("fingerprint"),
        record=record,
        start=run / START if started_from and label != START else None,
    )


def _has_tokenizer(adapter: Path) -> bool:
    """Return whether the folder of an adapter contains a whole tokenizer."""
    if (adapter / "tokenizer.json").is_file() or (adapter / "vocab.json").is_file():
        return True
    # transformers cannot load a SentencePiece model alone.
    return (adapter / "tokenizer.model").is_file() and (adapter / "tokenizer_config.json").is_file()


def _with_template(spec: ModelSpec) -> ModelSpec:
    """Return a model with an adapter and the chat template that the adapter was trained with.

    If the adapter has a template, it is used, even if the adapter has no other file of a tokenizer. Otherwise the
    base's is used, except for a run that saved its tokenizer: this run was trained without a template.
    """
    assert spec.adapter is not None
    adapter_templates = model_files.chat_templates(spec.adapter)
    base_folder = Path(spec.base.name)
    base_templates = model_files.chat_templates(base_folder)

    is_of_run_with_tokenizer = spec.run is not None and spec.tokenizer == spec.adapter
    template_from: Literal["adapter", "base"]
    if adapter_templates:
        template_from = "adapter"
        templates = adapter_templates
        folder_of_templates = spec.adapter
    elif base_templates and not is_of_run_with_tokenizer:
        template_from = "base"
        templates = base_templates
        folder_of_templates = base_folder
    else:
        return spec
    # See `ModelSpec.chat_templates`.
    chat_templates = {} if folder_of_templates == spec.tokenizer else templates
    return dataclasses.replace(spec, chat_templates=chat_templates, template_from=template_from)


def _is_missing_folder(name: str) -> bool:
    return model_files.is_folder_name(name) and not Path(name).expanduser().is_dir()


def _base_settings(folder: ModelFolder, bits: int | None, flags: ModelFlags) -> ModelConfig:
    model_files.check_folder(str(folder.path), "the model")
    return ModelConfig(
        name=str(folder.path),
        revision=folder.commit,
        bits=4 if bits == 4 else 16,
        trust_remote_code=flags.trust_remote_code,
    )


def choose_adapter(name: str, what: str | None) -> str:
    """Return the path of a run's `best` folder if `--what` is `best`, else the name unchanged."""
    if what != BEST:
        return name
    if _is_missing_folder(name):
        raise UserError(model_files.missing_folder(name, "a run"))
    folder = Path(name).expanduser() / BEST
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"--what best needs {folder}, which does not exist: no validation pass beat the run's start")
    return str(folder)


def run_of(folder: Path) -> Path | None:
    """Return the run of a folder: the folder itself, or the run of which it is an adapter or a checkpoint."""
    if (folder / "run.json").is_file():
        return folder
    if (folder / ADAPTER_CONFIG).is_file():
        for parent in folder.resolve().parents[:2]:  # a checkpoint is two levels below its run
            if (parent / "run.json").is_file():
                return parent
    return None
