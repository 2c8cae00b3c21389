"""Plan what the merge does to each tensor of the base, before any data is read.

Exactly one output must use each adapter key. Otherwise the merge fails, because an unused key means that part of the
training would be silently lost. PEFT (0.21) saves these keys:

    X.lora_A.weight, X.lora_B.weight                            W_X += scale * B @ A
    X.lora_embedding_A, X.lora_embedding_B                      W_X += scale * (B @ A).T
    X.lora_magnitude_vector                                     DoRA: W_X is rescaled to these norms
    X.token_adapter.trainable_tokens_delta                      rows of W_X are replaced
    X.weight, X.bias, X.base_layer.weight, X.base_layer.bias    the tensor is replaced
    X.token_adapter.base_layer.weight                           the same, below trained rows: a resized vocabulary
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import StoredTensor, adapter_tensors, same_values
from lora_grpo.merging.base_weights import weight_name
from lora_grpo.merging.outputs import LowRank, Output
from lora_grpo.models import ADAPTER_WEIGHTS, PATTERNS, SELECTION, SavedAdapter, read_adapter

_PARTS = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "token_adapter.trainable_tokens_delta",
)
_WRAPPERS = re.compile(r"\.(token_adapter\.base_layer|base_layer|modules_to_save)\.")
"""Parts of a key that PEFT's wrappers add to the name of a tensor."""
_SUPPORTED = (*("bias", "modules_to_save", "trainable_token_indices", "use_dora", *PATTERNS, *SELECTION),)
"""Features of adapters that are merged here."""
SAVE_EMBEDDINGS = (
    "a vocabulary that is resized for training must be saved with the adapter: save it from the live model with PEFT's "
    "save_embedding_layers=True"
)
"""What to do about an adapter that was saved without the embeddings of its new tokens."""


@dataclass(frozen=True)
class Plan:
    """The tensors of the merged model and the changes to its configuration, None if unchanged."""

    outputs: dict[str, Output]
    tie_word_embeddings: bool | None
    vocab_size: int | None

    @property
    def base_dtype(self) -> str:
        """The safetensors dtype name of most parameters in the base."""
        total: Counter[str] = Counter()
        for output in self.outputs.values():
            total[output.base.dtype] += math.prod(output.base.shape)
        return total.most_common(1)[0][0]


def make_plan(base: Mapping[str, StoredTensor], folder: Path, model: Any) -> Plan:
    """Plan the merge of the adapter in `folder` into a base: the results of `base_tensors` and `empty_model`.

    Raises:
        UserError: an adapter key is unused or has the wrong shape, or this type of adapter cannot be merged.
    """
    from transformers.pytorch_utils import Conv1D

    adapter = read_mergeable(folder)
    tensors = adapter_tensors(folder / ADAPTER_WEIGHTS)
    # PEFT saves the original of a replaced module along with its replacement.
    weights = {key: tensor for key, tensor in tensors.items() if ".original_module." not in key}
    parts, whole = _group(weights)
    embedding, head = (
        weight_name(model, module) for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    if embedding not in base:
        raise UserError(f"the base has no {embedding}, which its config.json implies; pass another model with --base")
    is_declared_tied = model.config.get_text_config().tie_word_embeddings
    # transformers (5.17) does not tie a stored head that has different values.
    tied = head not in base or (is_declared_tied and same_values(base[head], base[embedding]))
    outputs = {name: Output(name, tensor) for name, tensor in base.items() if not (tied and name == head)}
    if tied and (head.removesuffix(".weight") in parts or head in whole):
        outputs[head] = Output(head, base[embedding])
    used: set[str] = set()

    for name, (tensor, *copies) in whole.items():
        if name not in outputs or not all(same_values(tensor, copy) for copy in copies):
            continue
        old, new = outputs[name].shape, tensor.shape
        if old[1:] != new[1:] or (old != new and name not in (embedding, head)):  # only the vocabulary can be resized
            raise _misfit(adapter, name, old, new)
        outputs[name] = replace(outputs[name], replacement=tensor)
        used |= {tensor.name, *(copy.name for copy in copies)}
    # Conv1D stores its weight as (in, out). `fan_in_fan_out` is not reliable: PEFT (0.21) writes it for the last layer.
    conv1d = {name for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for module, found in parts.items():
        if f"{module}.weight" in outputs:
            used |= _add_update(outputs, module, found, adapter, is_conv1d=module in conv1d)
            used |= _add_tokens(outputs, module, found, adapter)
    if unused := sorted(weights.keys() - used):
        raise UserError(
            f"{', '.join(unused[:3])}{' and more' if len(unused) > 3 else ''} of {folder} cannot be merged into this "
            "base; pass the adapter's own base with --base, or use the adapter with PEFT"
        )
    tie = _settle_tie(outputs, embedding, head) if tied else None
    if not tied and is_declared_tied:
        # The base stores a different head, but its configuration ties the weights. PEFT then ties trained tokens.
        tie = False
        if not outputs[head].changed:
            outputs[head] = replace(outputs[head], tokens=outputs[embedding].tokens)
    size = outputs[embedding].shape[0]
    if head in outputs and outputs[head].shape[0] != size:
        raise UserError(
            f"the adapter in {folder} leaves {size} rows in {embedding} and {outputs[head].shape[0]} in {head}, "
            "expected the same number; save both with PEFT's save_embedding_layers=True"
        )
    return Plan(outputs, tie, size if size != base[embedding].shape[0] else None)


def read_mergeable(folder: Path) -> SavedAdapter:
    """Read adapter_config.json, and raise a UserError if this type of adapter cannot be merged."""
    adapter = read_adapter(folder)
    adapter.check(_SUPPORTED, "which cannot be merged here; merge it with PEFT")
    return adapter


def _misfit(adapter: SavedAdapter, name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> UserError:
    return UserError(
        f"the adapter in {adapter.folder} was trained on another base: {name} has the shape {list(got)}, expected "
        f"{list(expected)}; pass its own base with --base"
    )


def _group(weights: Mapping[str, StoredTensor]) -> tuple[dict[str, Any], dict[str, list[StoredTensor]]]:
    """Group adapter tensors by module and entry of `_PARTS`, and replacement tensors by their name in the base."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    whole: dict[str, list[StoredTensor]] = {}
    for key, tensor in weights.items():
        name = key.removeprefix("base_model.model.")
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part:
            parts.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
        else:
            # PEFT (0.21) saves a module that is both resized and trained under both names.
            whole.setdefault(_WRAPPERS.sub(".", name), []).append(tensor)
    return parts, whole


def _add_update(
    outputs: dict[str, Output],
    module: str,
    parts: Mapping[str, StoredTensor],
    adapter: SavedAdapter,
    *,
    is_conv1d: bool,
) -> set[str]:
    """Add a module's low-rank update to its outputs, and return the keys it used."""
    weight = f"{module}.weight"
    is_embedding = "lora_embedding_A" in parts
    a = parts.get("lora_embedding_A" if is_embedding else "lora_A.weight")
    b = parts.get("lora_embedding_B" if is_embedding else "lora_B.weight")
    magnitude = parts.get("lora_magnitude_vector")
    if a is None or b is None:
        return set()
    shape, update = outputs[weight].shape, (b.shape[0], a.shape[1])
    transposed = is_embedding or is_conv1d
    if a.shape[0] != b.shape[1] or (update[::-1] if transposed else update) != shape:
        raise _misfit(adapter, module, shape, update)
    if magnitude and transposed:
        raise UserError(f"{adapter.folder} trains {module} with DoRA; only linear layers with DoRA can be merged here")
    if magnitude and math.prod(magnitude.shape) != update[0]:
        raise _misfit(adapter, magnitude.name, update[:1], magnitude.shape)
    low_rank = LowRank(a, b, adapter.scale(module, a.shape[0]), transposed, magnitude)
    outputs[weight] = replace(outputs[weight], low_rank=low_rank)
    return {tensor.name for tensor in (a, b, magnitude) if tensor}


def _add_tokens(
    outputs: dict[str, Output], module: str, parts: Mapping[str, StoredTensor], adapter: SavedAdapter
) -> set[str]:
    """Add a module's trained tokens to its output, and return the keys it used."""
    rows = parts.get("token_adapter.trainable_tokens_delta")
    if rows is None:
        return set()
    indices, output = adapter.token_indices(module), outputs[f"{module}.weight"]
    if not all(0 <= index < output.shape[0] for index in indices):
        raise UserError(
            f"the adapter in {adapter.folder} trains token {max(indices)}, and {output.name} has embeddings of "
            f"{output.shape[0]} tokens; {SAVE_EMBEDDINGS}"
        )
    if len(indices) != rows.shape[0] or rows.shape[1:] != output.shape[1:]:
        raise _misfit(adapter, rows.name, (len(indices), *output.shape[1:]), rows.shape)
    outputs[output.name] = replace(output, tokens=(rows, tuple(indices)))
    return {rows.name}


def _settle_tie(outputs: dict[str, Output], embedding: str, head: str) -> bool | None:
    """Return False if a tied head and embedding must be written as two tensors. Otherwise drop the head.

    In the unmerged model, an update to one does not change the other. Trained tokens are the exception: PEFT ties them.
    """
    below = outputs[embedding]
    if head not in outputs:
        only_tokens = below.tokens is not None and below.low_rank is None and below.replacement is None
        if not below.changed or only_tokens:
            return None
        outputs[head] = Output(head, below.base)
    if same_values(below, outputs[head]):
        del outputs[head]
        return None
    return False
