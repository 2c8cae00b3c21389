"""Plan what the merge does to each tensor of the base, before any data is read.

Exactly one output must use each adapter key. Otherwise the merge fails, because an unused key means that part of the
training would be silently lost. PEFT (0.21) saves these keys:

    X.lora_A.weight, X.lora_B.weight                            W_X += scale * B @ A
    X.lora_B.bias                                               b_X += scale * bias
    X.lora_embedding_A, X.lora_embedding_B                      W_X += scale * (B @ A).T
    X.lora_magnitude_vector                                     DoRA: W_X is rescaled to these norms
    X.token_adapter.trainable_tokens_delta                      rows of W_X are replaced
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
from lora_grpo.files import StoredTensor, file_tensors, json_files, same_values
from lora_grpo.merging.base_weights import Tensor
from lora_grpo.merging.outputs import LowRank, Output
from lora_grpo.merging.tied import embedding_and_head, is_tied, settle

_PARTS = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "token_adapter.trainable_tokens_delta",
)
_SUPPORTED = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
"""Settings that do not change the arithmetic or that are implemented here. All other settings must be unset."""
_BASE_PRESERVING_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Adapter initializations that leave the base unchanged."""

Parts = dict[str, dict[str, StoredTensor]]
"""Map each module to its tensors, keyed by an entry of `_PARTS`."""


@dataclass(frozen=True)
class Plan:
    """The tensors of the merged model and the changes to its configuration."""

    outputs: dict[str, Output]
    tie_word_embeddings: bool | None
    """The new value of the setting; None if unchanged."""
    vocab_size: int | None
    """The new size; None if unchanged."""
    config: Mapping[str, Any] = field(repr=False)
    """The base's config.json."""

    @property
    def base_dtype(self) -> str:
        """The safetensors dtype name of most parameters in the base."""
        total: Counter[str] = Counter()
        for output in self.outputs.values():
            total[output.base.dtype] += math.prod(output.base.shape)
        return total.most_common(1)[0][0]


def read_settings(adapter: Path) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    Raises:
        UserError: the file cannot be read, or this type of adapter cannot be merged.
    """
    path = adapter / "adapter_config.json"
    settings = json_files.read_object(path)
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{path} has peft_type {settings.get('peft_type')!r}; only LORA adapters can be merged here")
    unsupported = sorted(name for name, value in settings.items() if value and name not in _SUPPORTED)
    if unsupported:
        raise UserError(f"{path} sets {', '.join(unsupported)}, which cannot be merged here; merge it with PEFT")
    init = settings.get("init_lora_weights", True)
    if init not in _BASE_PRESERVING_INITS:
        raise UserError(
            f"{path} has init_lora_weights={init!r}, which changes the base; convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    return settings


def make_plan(base: Mapping[str, Tensor], adapter: Path, config: Mapping[str, Any]) -> Plan:
    """Plan the merge of every tensor.

    Args:
        base: the base's tensors.
        adapter: the adapter's folder.
        config: the base's config.json.

    Raises:
        UserError: an adapter key is unused or has the wrong shape.
    """
    settings = read_settings(adapter)
    weights = file_tensors(adapter / "adapter_model.safetensors")
    parts, whole = _group(weights)
    embedding, head = embedding_and_head(base)
    tied = is_tied(config, base, embedding, head)
    outputs = {name: Output(name, tensor) for name, tensor in base.items() if not (tied and name == head)}
    if tied and embedding and (head.removesuffix(".weight") in parts or head in whole):
        outputs[head] = Output(head, base[embedding])
    used = {
        key for key in weights if ".original_module." in key
    }  # the original module, saved along with its replacement

    for name, (tensor, *copies) in whole.items():
        if name not in outputs or not all(same_values(tensor, copy) for copy in copies):
            continue
        old, new = outputs[name].shape, tensor.shape
        if old[1:] != new[1:] or (old != new and name not in (embedding, head)):  # only the vocabulary can be resized
            raise _misfit(adapter, name, old, new)
        outputs[name] = replace(outputs[name], replacement=tensor)
        used |= {tensor.name, *(copy.name for copy in copies)}
    for module, found in parts.items():
        if f"{module}.weight" in outputs:
            used |= _add_update(outputs, module, found, settings, adapter, config)
            used |= _add_tokens(outputs, module, found, settings, adapter)
    if unused := sorted(weights.keys() - used):
        raise UserError(
            f"{', '.join(unused[:3])}{' and more' if len(unused) > 3 else ''} of {adapter} cannot be merged into this "
            "base; pass the adapter's own base with --base, or use the adapter with PEFT"
        )
    tie = settle(outputs, embedding, head) if tied and embedding else None
    if not tied and embedding and head in base and config.get("tie_word_embeddings"):
        # The base stores a different head, but its configuration ties the weights. PEFT then ties trained tokens.
        tie = False
        if not outputs[head].changed:
            outputs[head] = replace(outputs[head], tokens=outputs[embedding].tokens)
    return Plan(outputs, tie, _new_vocab_size(outputs, embedding, head, adapter), config)


def _group(weights: Mapping[str, StoredTensor]) -> tuple[Parts, dict[str, list[StoredTensor]]]:
    """Group adapter tensors by module and part, and replacement tensors by their name in the base."""
    parts: Parts = {}
    whole: dict[str, list[StoredTensor]] = {}
    for key, tensor in weights.items():
        name = key.removeprefix("base_model.model.")
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part:
            parts.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
        elif ".original_module." not in name:
            # PEFT (0.21) saves a module that is both resized and trained under both names.
            whole.setdefault(name.replace(".base_layer.", ".").replace(".modules_to_save.", "."), []).append(tensor)
    return parts, whole


def _add_update(
    outputs: dict[str, Output],
    module: str,
    parts: Mapping[str, StoredTensor],
    settings: Mapping[str, Any],
    adapter: Path,
    config: Mapping[str, Any],
) -> set[str]:
    """Add a module's low-rank update to its outputs, and return the keys it used."""
    weight, bias = f"{module}.weight", f"{module}.bias"
    embedded = "lora_embedding_A" in parts
    a = parts.get("lora_embedding_A" if embedded else "lora_A.weight")
    b = parts.get("lora_embedding_B" if embedded else "lora_B.weight")
    magnitude, added = parts.get("lora_magnitude_vector"), parts.get("lora_B.bias")
    shape = outputs[weight].shape
    if a is None or b is None or len(shape) != 2:
        return set()
    update = (b.shape[0], a.shape[1])
    transposed = embedded or (update != shape if shape[0] != shape[1] else _is_conv1d(module, config))
    if a.shape[0] != b.shape[1] or (update[::-1] if transposed else update) != shape:
        raise _misfit(adapter, module, shape, update)
    if magnitude is not None and math.prod(magnitude.shape) != update[0]:
        raise _misfit(adapter, magnitude.name, update[:1], magnitude.shape)
    scale = _scale(module, a.shape[0], settings, adapter)
    outputs[weight] = replace(outputs[weight], low_rank=LowRank(a, b, scale, transposed, magnitude))
    used = {tensor.name for tensor in (a, b, magnitude) if tensor is not None}
    if added is not None and bias in outputs:  # if the base has no bias, PEFT cannot merge this either
        if added.shape != outputs[bias].shape:
            raise _misfit(adapter, added.name, outputs[bias].shape, added.shape)
        outputs[bias] = replace(outputs[bias], bias=(added, scale))
        used.add(added.name)
    return used


def _add_tokens(
    outputs: dict[str, Output],
    module: str,
    parts: Mapping[str, StoredTensor],
    settings: Mapping[str, Any],
    adapter: Path,
) -> set[str]:
    """Add a module's trained tokens to its output, and return the keys it used."""
    rows = parts.get("token_adapter.trainable_tokens_delta")
    if rows is None:
        return set()
    indices, output = settings.get("trainable_token_indices") or [], outputs[f"{module}.weight"]
    if isinstance(indices, dict):
        indices = next((value for name, value in indices.items() if _matches(name, module)), [])
    if len(indices) != rows.shape[0] or rows.shape[1:] != output.shape[1:] or max(indices) >= output.shape[0]:
        raise _misfit(adapter, rows.name, (len(indices), *output.shape[1:]), rows.shape)
    outputs[output.name] = replace(output, tokens=(rows, tuple(indices)))
    return {rows.name}


def _is_conv1d(module: str, config: Mapping[str, Any]) -> bool:
    """Return whether a square weight is stored as (in, out).

    Only GPT and GPT-2 use the Conv1D of transformers. The `fan_in_fan_out` value in adapter_config.json is not
    reliable, because PEFT (0.21) writes the value of the last layer that it created.
    """
    is_candidate = module.rpartition(".")[2] in ("c_attn", "q_attn", "c_fc", "c_proj")
    return is_candidate and config.get("model_type") in ("gpt2", "openai-gpt")


def _scale(module: str, rank: int, settings: Mapping[str, Any], adapter: Path) -> float:
    """Return alpha / r, or alpha / sqrt(r) for rsLoRA. A pattern that matches the module overrides r or alpha."""

    def value(patterns: str, default: str) -> float:
        matching = (each for key, each in (settings.get(patterns) or {}).items() if _matches(key, module))
        return float(next(matching, settings[default]))

    try:
        expected, alpha = value("rank_pattern", "r"), value("alpha_pattern", "lora_alpha")
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise UserError(f"{adapter}/adapter_config.json has an invalid rank or alpha: {error}") from None
    if expected != rank:
        raise UserError(f"{adapter}: {module} has rank {rank}, and adapter_config.json has {expected:g}")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _matches(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _new_vocab_size(outputs: Mapping[str, Output], embedding: str | None, head: str, adapter: Path) -> int | None:
    if embedding is None:
        return None
    size = outputs[embedding].shape[0]
    if head in outputs and outputs[head].shape[0] != size:
        raise UserError(
            f"{adapter} has an embedding of {size} tokens, and the head has {outputs[head].shape[0]}; save both with "
            "PEFT's save_embedding_layers=True"
        )
    return size if size != outputs[embedding].base.shape[0] else None


def _misfit(adapter: Path, name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> UserError:
    return UserError(
        f"the adapter in {adapter} was trained on another base: {name} has the shape {list(got)}, expected "
        f"{list(expected)}; pass its own base with --base"
    )
