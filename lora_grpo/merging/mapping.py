"""What merging an adapter will do to each tensor of its base, decided before any tensor is read.

Every key of the adapter is consumed by exactly one output, or the plan is refused: a key that nothing consumes is a
part of what was learned that would be left out in silence. The keys are PEFT's (0.21):

    X.lora_A.weight, X.lora_B.weight                        W_X += scale · B·A
    X.lora_B.bias                                           b_X += scale · bias
    X.lora_embedding_A, X.lora_embedding_B                  W_X += scale · (B·A)ᵀ
    X.lora_magnitude_vector                                 DoRA: W_X is scaled to these norms
    X.token_adapter.trainable_tokens_delta                  rows of W_X are replaced
    X.weight, X.bias, X.base_layer.weight, X.base_layer.bias    the tensor is replaced
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import ITEM_SIZES, StoredTensor, file_tensors, json_files
from lora_grpo.merging.delta import LowRank, Output, Tensor
from lora_grpo.merging.tied import embedding_and_head, is_same, is_tied, resized, settle

_PARTS = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "token_adapter.trainable_tokens_delta",
)
_UNDERSTOOD = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
"""Settings that change nothing here, or that are followed. Any other that is set would change the arithmetic."""
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin an adapter that leave its base as it was."""


@dataclass(frozen=True)
class Plan:
    """All of the merged model's tensors, and what its configuration has to say of them."""

    outputs: dict[str, Output]
    tie_word_embeddings: bool | None
    """What the configuration is set to; None leaves it as it is."""
    vocab_size: int | None
    """The same, where the vocabulary was resized."""
    config: Mapping[str, Any] = field(repr=False)
    """The base's config.json."""

    @property
    def base_dtype(self) -> str:
        """Safetensors' name of the dtype that most of the base's bytes are in."""
        total: Counter[str] = Counter()
        for output in self.outputs.values():
            if output.base is not None:
                total[output.base.dtype] += math.prod(output.base.shape) * ITEM_SIZES.get(output.base.dtype, 1)
        return total.most_common(1)[0][0]


def read_settings(adapter: Path) -> dict[str, Any]:
    """Return adapter_config.json.

    Raises:
        UserError: it cannot be read, or asks for what is not merged here.
    """
    path = adapter / "adapter_config.json"
    settings = json_files.read_object(path)
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{path} is of the type {settings.get('peft_type')!r}; only LORA adapters can be merged here")
    foreign = sorted(name for name, value in settings.items() if value and name not in _UNDERSTOOD)
    if foreign:
        raise UserError(f"{path} sets {', '.join(foreign)}, which cannot be merged here; merge it with PEFT itself")
    if settings.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise UserError(
            f"{path} says init_lora_weights={settings['init_lora_weights']!r}: such an adapter begins by changing its "
            "base; save it with path_initial_model_for_weight_conversion (PEFT), which makes a plain one of it"
        )
    for name in ("rank_pattern", "alpha_pattern"):
        try:
            for key, value in (settings.get(name) or {}).items():
                re.compile(key)
                float(value)
        except (AttributeError, TypeError, ValueError, re.error) as error:
            raise UserError(f"{path} has a {name} that cannot be read: {error}") from None
    for name in ("r", "lora_alpha"):
        if not isinstance(settings.get(name), int | float) or isinstance(settings[name], bool):
            raise UserError(f"{path} has {name}={settings.get(name)!r}; expected a number")
    return settings


def make_plan(base: Mapping[str, Tensor], adapter: Path, config: Mapping[str, Any]) -> Plan:
    """Decide what becomes of every tensor.

    Args:
        base: the base's tensors.
        adapter: the adapter's folder.
        config: the base's config.json.

    Raises:
        UserError: a key of the adapter would be left over or does not fit; says which.
    """
    settings = read_settings(adapter)
    weights = file_tensors(adapter / "adapter_model.safetensors")
    embedding, head = embedding_and_head(base)
    tied = is_tied(config, base, embedding, head)
    parts, plain = _sort(weights)
    outputs = {name: Output(name, tensor) for name, tensor in base.items() if not (tied and name == head)}
    if tied and embedding and any(name == head or name.startswith(f"{head[:-7]}.") for name in (*parts, *plain)):
        outputs[head] = Output(head, base[embedding])
    used: set[str] = set()

    for name, (tensor, *again) in plain.items():
        known = outputs.get(name)
        if known is None or not all(is_same(tensor, other) for other in again):
            continue
        # An embedding may have grown; everything else keeps its shape.
        if known.shape[1:] != tensor.shape[1:] or (known.shape != tensor.shape and name not in (embedding, head)):
            raise UserError(_misfit(adapter, name, known.shape, tensor.shape))
        outputs[name] = replace(known, replacement=tensor)
        used |= {tensor.name, *(other.name for other in again)}
    for module, found in parts.items():
        if f"{module}.weight" in outputs:
            used |= _add(outputs, module, found, settings, adapter, config)
    used |= {key for key in weights if ".original_module." in key}  # the base's own, saved beside what replaces it
    if left := sorted(set(weights) - used):
        raise UserError(_left_over(adapter, {key: weights[key] for key in left}, outputs))
    tie = settle(outputs, embedding, head) if tied and embedding else None
    if not tied and embedding and head in base and config.get("tie_word_embeddings"):
        # The head is a tensor of its own and the configuration denies it. PEFT believes that, and ties trained tokens.
        tie, below, above = False, outputs[embedding], outputs[head]
        outputs[head] = above if above.changed else replace(above, tokens=below.tokens)
    return Plan(outputs, tie, resized(outputs, embedding, head, base, adapter), config)


def _sort(
    weights: Mapping[str, StoredTensor],
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, list[StoredTensor]]]:
    """Sort an adapter's tensors into parts of each module, and whole tensors by their name in the base."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    plain: dict[str, list[StoredTensor]] = {}
    for key, tensor in weights.items():
        name = key.removeprefix("base_model.model.")
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part:
            parts.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
        elif ".original_module." not in name:
            # PEFT (0.21) saves a resized module that is trained as well under each of the two names.
            plain.setdefault(name.replace(".base_layer.", ".").replace(".modules_to_save.", "."), []).append(tensor)
    return parts, plain


def _left_over(adapter: Path, left: Mapping[str, StoredTensor], outputs: Mapping[str, Output]) -> str:
    names = ", ".join([*left][:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
    parts, plain = _sort(left)
    if all(f"{module}.weight" in outputs for module in (*parts, *(name.rpartition(".")[0] for name in plain))):
        return f"{names} of {adapter} cannot be merged into the layers that they belong to; use the adapter with PEFT"
    return (
        f"the base has nothing that {names} of {adapter} could be merged into: it is another base's adapter (give its "
        "own with --base), or of a model whose files call their tensors otherwise (use it with PEFT)"
    )


def _add(
    outputs: dict[str, Output],
    module: str,
    parts: Mapping[str, StoredTensor],
    settings: Mapping[str, Any],
    adapter: Path,
    config: Mapping[str, Any],
) -> set[str]:
    """Add a module's parts to its outputs, and return the keys that this consumed."""
    weight, bias = f"{module}.weight", f"{module}.bias"
    output = outputs[weight]
    used = set()
    embedded = "lora_embedding_A" in parts
    a, b = (parts.get("lora_embedding_A" if embedded else "lora_A.weight"),
            parts.get("lora_embedding_B" if embedded else "lora_B.weight"))  # fmt: skip
    if a is not None and b is not None and len(output.shape) == 2:
        scale = _scale(module, a.shape[0], settings, adapter)
        made, kept = (b.shape[0], a.shape[1]), output.shape
        transposed = embedded or (made != kept if kept[0] != kept[1] else _is_conv1d(module, config))
        if a.shape[0] != b.shape[1] or (made[::-1] if transposed else made) != kept:
            raise UserError(_misfit(adapter, module, kept, made))
        magnitude = parts.get("lora_magnitude_vector")
        if magnitude is not None and math.prod(magnitude.shape) != made[0]:
            raise UserError(_misfit(adapter, magnitude.name, made[:1], magnitude.shape))
        outputs[weight] = output = replace(output, low_rank=LowRank(a, b, scale, transposed, magnitude))
        used |= {a.name, b.name} | ({magnitude.name} if magnitude else set())
        added = parts.get("lora_B.bias")
        if added is not None and bias in outputs:  # PEFT cannot merge it either where the base has no bias
            if added.shape != outputs[bias].shape:
                raise UserError(_misfit(adapter, added.name, outputs[bias].shape, added.shape))
            outputs[bias] = replace(outputs[bias], bias=(added, scale))
            used.add(added.name)
    rows = parts.get("token_adapter.trainable_tokens_delta")
    if rows is not None:
        places = _token_places(settings.get("trainable_token_indices"), module)
        if len(places) != rows.shape[0] or rows.shape[1:] != output.shape[1:] or max(places) >= output.shape[0]:
            raise UserError(
                f"{rows.name} of {adapter} has the shape {_shape(rows.shape)}, for {len(places)} tokens of "
                f"adapter_config.json and {module} of {_shape(output.shape)}"
            )
        outputs[weight] = replace(output, tokens=(rows, places))
        used.add(rows.name)
    return used


def _is_conv1d(module: str, config: Mapping[str, Any]) -> bool:
    """Whether a layer keeps its weight as (in, out), where the shape does not tell.

    Only GPT and GPT-2 have transformers' Conv1D. `fan_in_fan_out` of adapter_config.json is that of the last layer that
    PEFT (0.21) happened to make.
    """
    named = module.rpartition(".")[2] in ("c_attn", "q_attn", "c_fc", "c_proj")
    return named and config.get("model_type") in ("gpt2", "openai-gpt")


def _scale(module: str, rank: int, settings: Mapping[str, Any], adapter: Path) -> float:
    """Return alpha / r, or alpha / sqrt(r), as PEFT would for this module."""

    def setting(pattern: str, default: str) -> float:
        for key, value in (settings.get(pattern) or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                return float(value)
        return float(settings[default])

    expected = setting("rank_pattern", "r")
    if expected != rank:
        raise UserError(f"{adapter}: {module} has rank {rank}, and adapter_config.json says {expected:g}")
    return setting("alpha_pattern", "lora_alpha") / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _token_places(indices: Any, module: str) -> tuple[int, ...]:
    if isinstance(indices, dict):
        indices = next((value for name, value in indices.items() if re.match(rf"(.*\.)?{name}$", module)), [])
    return tuple(indices or ())


def _misfit(adapter: Path, name: str, base: tuple[int, ...], found: tuple[int, ...]) -> str:
    return (
        f"the adapter in {adapter} was made for another base: {name} has the shape {_shape(base)} there, and the "
        f"adapter's is {_shape(found)}; give its own with --base"
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"
