"""A saved LoRA adapter, read from its adapter_config.json. Imports neither torch nor PEFT.

A feature is a field of adapter_config.json that a plain adapter does not need, such as `use_dora` or `rank_pattern`,
and that is set. Each use of an adapter calls `SavedAdapter.check` with the features that it supports.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import json_files
from lora_grpo.models.model_files import digest

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

PATTERNS = ("rank_pattern", "alpha_pattern")
"""Features that give some modules another rank or alpha."""
SELECTION = ("exclude_modules", "layers_pattern", "layers_to_transform")
"""Features that only select the modules to adapt. The names of the weights show which modules were selected."""

_PLAIN_FIELDS = {
    # Of every LoRA adapter.
    *("r", "lora_alpha", "target_modules", "use_rslora", "peft_type", "base_model_name_or_path", "revision"),
    # They do not change a trained adapter.
    *("auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode"),
    *("init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
    *("peft_version", "qalora_group_size", "runtime_config", "task_type"),
}
"""Fields that are not features, whatever their value. `init_lora_weights` is one if it changes the base."""
_UNSET: tuple[Any, ...] = (None, False, "none", [], {})
"""Values of a field that is not set."""
_BASE_PRESERVING = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base unchanged."""


class SavedAdapter(BaseModel):
    """A LoRA adapter in a folder. Fields have the names of PEFT's `LoraConfig`."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    r: PositiveInt
    lora_alpha: FiniteFloat
    target_modules: list[str] | str | None = None
    """Names of modules, or a regular expression."""
    base_model_name_or_path: str | None = None
    revision: str | None = None
    """Commit of the base."""
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, PositiveInt] | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = None
    features: tuple[str, ...] = ()
    """Names of the features that are set, such as `use_dora`."""

    def check(self, supported: Collection[str], problem: str) -> None:
        """Raise a UserError that ends with `problem` if the adapter has features other than the supported ones."""
        unsupported = [name for name in self.features if name not in supported]
        if unsupported:
            raise UserError(f"{self.folder / ADAPTER_CONFIG} sets {', '.join(unsupported)}, {problem}")

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of B @ A: alpha / r, or alpha / sqrt(r) for rsLoRA. Patterns override r and alpha.

        Args:
            module: name of a module, such as `model.layers.0.self_attn.q_proj`.
            rank: r of its stored weights.

        Raises:
            UserError: the configuration has another rank for the module.
        """
        expected = _value_for(module, self.rank_pattern, default=self.r)
        if expected != rank:
            raise UserError(f"{self.folder}: {module} has rank {rank}, and {ADAPTER_CONFIG} has {expected}")
        alpha = _value_for(module, self.alpha_pattern, default=self.lora_alpha)
        if self.use_rslora:  # arXiv:2312.03732
            return float(alpha / math.sqrt(rank))
        return float(alpha / rank)


def read_adapter(folder: Path) -> SavedAdapter:
    """Read the adapter_config.json in a folder. Raises UserError for other files and for adapters other than LoRA."""
    path = folder / ADAPTER_CONFIG
    values = json_files.read_object(path)
    if values.get("peft_type") != "LORA":
        raise UserError(f"{path} has peft_type {values.get('peft_type')!r}; only LORA adapters are supported")
    values |= {"folder": str(folder), "features": features(values)}
    adapter: SavedAdapter = json_files.validated(values, SavedAdapter, f"{path} is damaged", "restore or correct it")
    if adapter.lora_alpha == 0:
        # As verl/model_merger/base_model_merger.py (0.5 to 0.10) writes it if it does not know alpha.
        raise UserError(
            f"{path} has lora_alpha 0, with which the adapter changes nothing; verl's model merger writes 0 if it does "
            "not know the value: write that of the training (actor_rollout_ref.model.lora_alpha)"
        )
    _check_expressions(values, path)
    return adapter


def _check_expressions(values: Mapping[str, Any], path: Path) -> None:
    """Raise a UserError if a field of an adapter_config.json has a text that is no regular expression and must be one.

    As in PEFT, these are expressions: the keys of patterns; `target_modules`, `exclude_modules` and `layers_pattern` if
    they are a text; and the entries of `layers_pattern` if it is a list.
    """
    for field in (*PATTERNS, "target_modules", "exclude_modules", "layers_pattern"):
        value = values.get(field)
        expressions: list[Any] = []
        if isinstance(value, str):
            expressions = [value]
        elif isinstance(value, dict) or (isinstance(value, list) and field == "layers_pattern"):
            expressions = list(value)
        for expression in expressions:
            try:
                re.compile(f"({expression})")
            except (re.error, RecursionError, OverflowError) as error:
                raise UserError(
                    f"{path}: {field} has {expression!r:.80}, which is no regular expression ({first_line(error)}); "
                    "correct it"
                ) from None


def features(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the features that are set in a dict of `LoraConfig`'s fields.

    An initialization that changes the base counts as one, because the adapter then does not fit the original base.
    """
    names = [name for name, value in values.items() if name not in _PLAIN_FIELDS and value not in _UNSET]
    if values.get("init_lora_weights", True) not in _BASE_PRESERVING:
        names.append("init_lora_weights")
    return tuple(sorted(names))


def adapter_sha256(folder: Path) -> str:
    """Return a SHA-256 of an adapter's weights and configuration."""
    return digest(folder, (ADAPTER_WEIGHTS, ADAPTER_CONFIG))


def _value_for(module: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, as in PEFT."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
