"""Resolve a name to a model spec without importing torch. It can be a run, an adapter, a model or a Hub id."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.models import model_files
from lora_grpo.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_sha256, read_adapter
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
    """Hub commit, branch or tag of the model, or of an adapter's base."""
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
        on_hub = self.base.revision is not None
        return {
            "model": self.base_name,
            "revision": self.base.revision,
            "weights_sha256": None if on_hub else model_files.weights_fingerprint(Path(self.base.name)),
            "config_sha256": model_files.digest(Path(self.base.name), ("config.json", "generation_config.json")),
            "bits": self.base.bits,
            "adapter_sha256": self.adapter and adapter_sha256(self.adapter),
            "tokenizer_sha256": self._tokenizer_sha256(),
        }

    def _tokenizer_sha256(self) -> str:
        files = model_files.digest(self.tokenizer, model_files.TOKENIZER_FILES)
        if not self.chat_templates:
            return files
        return hashlib.sha256(json.dumps([files, self.chat_templates], sort_keys=True).encode()).hexdigest()

    @property
    def context_tokens(self) -> int | None:
        """Maximum length of a prompt and its completion in tokens, or None if the configuration does not specify it."""
        config = json_files.read_object(Path(self.base.name) / "config.json")
        longest = (config.get("text_config") or config).get("max_position_embeddings")
        return longest if isinstance(longest, int) else None

    def without_adapter(self) -> Self:
        """Return the model before training, with the same tokenizer: the base, or the base and an adapter."""
        if self.adapter is None:
            raise UserError(
                f"--compare base needs an adapter, and {self.label} has none; name the other model with --compare"
            )
        if self.start and not (self.start / ADAPTER_WEIGHTS).is_file():
            raise UserError(f"{self.start} is missing; pass --compare {self.base_name} for the base without an adapter")
        return dataclasses.replace(self, label=START if self.start else BASE, adapter=self.start)


def resolve(name: str, flags: ModelFlags, *, bits: int | None = None, any_base: bool = False) -> ModelSpec:
    """Resolve `starter`, a Hub id, or the folder of a run, an adapter or a model; raise a UserError for other names.

    Args:
        bits: precision of the weights. None: that of the run, else 16.
        any_base: accept a base with different weights than the one that the run was trained on.
    """
    if _is_missing_folder(name):
        expected = "a run, an adapter, a model, a Hub id or a file of samples"
        raise UserError(model_files.missing_folder(name, expected))
    folder, commit = model_files.find(name, flags.revision)
    run = run_of(folder)
    if not run and not (folder / ADAPTER_CONFIG).is_file():
        if flags.base:
            raise UserError(f"--base {flags.base} needs an adapter, and {name} has none; remove the flag")
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{name} has no run.json, adapter_config.json or config.json; give a run, an adapter or a model"
            )
        base = _base(folder, commit, bits, flags)
        template_from: Literal["base"] | None = "base" if model_files.chat_templates(folder) else None
        return ModelSpec(Path(name).name, base, name, None, folder, template_from=template_from)

    adapter = folder / "adapter" if run == folder else folder
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        raise UserError(
            f"{adapter} has no {ADAPTER_WEIGHTS} (pickled weights are not loaded); finish its run with --resume, or "
            "give another folder"
        )
    saved = read_adapter(adapter)
    record, start, known = None, None, None
    if run:  # run.json identifies the base of an adapter exactly
        record = read_record(run)
        trained, policy = record["config"]["model"], record["policy"]
        stored, revision = trained["name"], flags.revision or policy.get("revision")
        known, bits = policy.get("fingerprint"), bits or trained["bits"]
        folder_name = adapter.resolve().name
        label = "trained" if folder_name == "adapter" else folder_name
        if record["config"].get("lora", {}).get("from") and label != START:
            start = run / START
        if trained["trust_remote_code"] and not flags.trust_remote_code:
            raise UserError(
                f"{run}/run.json would run Python code from the repository of {flags.base or stored}; if you trust "
                "it, pass --trust-remote-code"
            )
    else:
        label, stored, revision = "adapter", saved.base_model_name_or_path, saved.revision
    requested = flags.base or stored
    if not requested or (not flags.base and _is_missing_folder(requested)):
        raise UserError(
            f"the base of the adapter in {adapter}, {requested or 'which it does not name'}, does not exist here; pass "
            "it with --base"
        )
    path, commit = model_files.find(requested, revision)
    base = _base(path, commit, bits, flags)
    if known and not any_base and model_files.weights_fingerprint(path) != known:
        raise UserError(
            f"{requested} is not the base that the run in {run} was trained on, {stored}: its weights differ from "
            "those in run.json; pass that base with --base"
        )
    has_tokenizer = any((adapter / file).is_file() for file in ("tokenizer.json", "vocab.json"))
    if (adapter / "tokenizer.model").is_file():  # transformers cannot load it alone
        has_tokenizer = has_tokenizer or (adapter / "tokenizer_config.json").is_file()
    tokenizer = adapter if has_tokenizer else path
    shown = stored if run else requested
    return _with_template(ModelSpec(label, base, shown, adapter, tokenizer, record, start))


def _with_template(spec: ModelSpec) -> ModelSpec:
    """Return a model with an adapter and the chat template that the adapter was trained with.

    That is the adapter's own, also if it is the only file of a tokenizer that the adapter has. A tokenizer without a
    template takes the base's, except in a run: there, it was saved by a training without one.
    """
    assert spec.adapter is not None
    of_adapter = model_files.chat_templates(spec.adapter)
    of_base = model_files.chat_templates(Path(spec.base.name))
    has_own_tokenizer = spec.tokenizer == spec.adapter
    if of_adapter:
        replaced = {} if has_own_tokenizer else of_adapter
        return dataclasses.replace(spec, chat_templates=replaced, template_from="adapter")
    if not of_base or (has_own_tokenizer and spec.run is not None):
        return spec
    replaced = of_base if has_own_tokenizer else {}
    return dataclasses.replace(spec, chat_templates=replaced, template_from="base")


def _is_missing_folder(name: str) -> bool:
    return model_files.is_folder_name(name) and not Path(name).expanduser().is_dir()


def _base(folder: Path, commit: str | None, bits: int | None, flags: ModelFlags) -> ModelConfig:
    model_files.check_folder(str(folder), "the model")
    trust = flags.trust_remote_code
    return ModelConfig(str(folder), bits=4 if bits == 4 else 16, trust_remote_code=trust, revision=commit)


def choose_adapter(name: str, what: str | None) -> str:
    """Return the path of a run's `best` folder if `--what` is `best`, else the name unchanged."""
    if what != BEST:
        return name
    folder = Path(name).expanduser() / BEST
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"--what best needs {folder}, which does not exist: no validation pass beat the run's start")
    return str(folder)


def source_adapter(folder: Path) -> Path:
    """Return the adapter of a run that a folder in it is, or was made from: `best-merged` and `best-gguf` from `best`.

    The merged model and the GGUF files of the last adapter are in `merged` and `gguf`.
    """
    return folder.parent / (BEST if folder.name.partition("-")[0] == BEST else "adapter")


def run_of(folder: Path) -> Path | None:
    """Return the folder of the run that a folder is, or that it belongs to as an adapter or a checkpoint."""
    if (folder / "run.json").is_file():
        return folder
    if (folder / ADAPTER_CONFIG).is_file():
        above = folder.resolve().parents
        return next((run for run in above[:2] if (run / "run.json").is_file()), None)
    return None
