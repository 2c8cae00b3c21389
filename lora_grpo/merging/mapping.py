"""Plan the change of each tensor of the base, before any data is read.

Exactly one output must use each adapter key. Otherwise the merge fails, because an unused key means that part of the
training would be silently lost. PEFT (0.21) saves these keys:

    X.lora_A.weight, X.lora_B.weight                            W_X += scale * B @ A
    X.lora_embedding_A, X.lora_embedding_B                      W_X += scale * (B @ A).T
    X.lora_magnitude_vector                                     DoRA: W_X is rescaled to these norms
    X.weight, X.bias, X.base_layer.weight, X.base_layer.bias    the tensor is replaced
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import StoredTensor, adapter_tensors, same_values
from lora_grpo.merging.base_weights import weight_name
from lora_grpo.merging.outputs import LowRank, Output
from lora_grpo.models import ADAPTER_WEIGHTS, PATTERNS, SELECTION, SavedAdapter, read_adapter

_LORA_KEY = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?")
_WRAPPERS = re.compile(r"\.(base_layer|modules_to_save)\.")
"""Parts of a key that PEFT's wrappers add to the name of a tensor."""
_SUPPORTED = (*("bias", "modules_to_save", "use_dora", *PATTERNS, *SELECTION),)
"""Features of adapters that are merged here."""
SAVE_EMBEDDINGS = "save the adapter from the live model with PEFT's save_embedding_layers=True"
"""What to do about an adapter that was saved without all weights of a resized vocabulary."""


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

    adapter = read_adapter(folder)
    adapter.check(_SUPPORTED, "which cannot be merged here; merge it with PEFT")
    changes = _by_tensor(adapter_tensors(folder / ADAPTER_WEIGHTS))
    embedding, head = (
        weight_name(model, module) for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    if embedding not in base:
        raise UserError(f"the base has no {embedding}, which its config.json implies; pass another model with --base")
    is_declared_tied = model.config.get_text_config().tie_word_embeddings
    # transformers (5.17) does not tie a stored head that has different values.
    tied = head not in base or (is_declared_tied and same_values(base[head], base[embedding]))
    outputs = {name: Output(name, tensor) for name, tensor in base.items() if not (tied and name == head)}
    if tied and head in changes:
        outputs[head] = Output(head, base[embedding])
    # Conv1D stores its weight as (in, out). `fan_in_fan_out` is not reliable: PEFT (0.21) writes it for the last layer.
    conv1d = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}

    unused = []
    for name, parts in changes.items():
        if name in outputs:
            resizable = (embedding, head)
            outputs[name] = _changed(outputs[name], parts, adapter, is_conv1d=name in conv1d, resizable=resizable)
        unused += [tensor.name for tensors in parts.values() for tensor in tensors]
    if unused:
        raise UserError(
            f"{', '.join(unused[:3])}{' and more' if len(unused) > 3 else ''} of {folder} cannot be merged into this "
            "base; pass the adapter's own base with --base, or use the adapter with PEFT"
        )
    # The base may store a different head although its configuration ties the weights.
    tie = _settle_tie(outputs, embedding, head) if tied else False if is_declared_tied else None
    size = outputs[embedding].shape[0]
    if head in outputs and outputs[head].shape[0] != size:
        raise UserError(
            f"the adapter in {folder} leaves {size} rows in {embedding} and {outputs[head].shape[0]} in {head}, "
            f"expected the same number; {SAVE_EMBEDDINGS}"
        )
    return Plan(outputs, tie, size if size != base[embedding].shape[0] else None)


def _by_tensor(weights: Mapping[str, StoredTensor]) -> dict[str, dict[str, list[StoredTensor]]]:
    """Group the adapter's tensors by the name of the base's tensor that they change, and by `A`, `B`, or `whole`."""
    groups: dict[str, dict[str, list[StoredTensor]]] = {}
    for key, tensor in weights.items():
        if ".original_module." in key:  # PEFT saves the original of a replaced module along with its replacement
            continue
        name, part = key.removeprefix("base_model.model."), "whole"
        if found := _LORA_KEY.fullmatch(name):
            name, part = f"{found[1]}.weight", found[2]
        # PEFT (0.21) saves a module that is both resized and trained under both names.
        groups.setdefault(_WRAPPERS.sub(".", name), {}).setdefault(part, []).append(tensor)
    return groups


def _changed(
    output: Output,
    parts: dict[str, list[StoredTensor]],
    adapter: SavedAdapter,
    *,
    is_conv1d: bool,
    resizable: Collection[str],
) -> Output:
    """Return the output with the adapter's change, and remove the tensors that it uses from `parts`."""
    name, whole = output.name, parts.get("whole", [])
    if whole and all(same_values(whole[0], copy) for copy in whole[1:]):
        old, new = output.shape, whole[0].shape
        if old[1:] != new[1:] or (old != new and name not in resizable):  # only the vocabulary can be resized
            raise _misfit(adapter, name, old, new)
        output = replace(output, replacement=whole[0])
        del parts["whole"]
    prefix = "embedding_" if "embedding_A" in parts else ""
    if f"{prefix}A" in parts and f"{prefix}B" in parts:
        [a], [b], [magnitude] = (parts.pop(part, [None]) for part in (f"{prefix}A", f"{prefix}B", "magnitude_vector"))
        assert a and b
        module, update = name.removesuffix(".weight"), (b.shape[0], a.shape[1])
        transposed = bool(prefix) or is_conv1d
        if a.shape[0] != b.shape[1] or (update[::-1] if transposed else update) != output.shape:
            raise _misfit(adapter, module, output.shape, update)
        if magnitude and transposed:
            raise UserError(
                f"{adapter.folder} trains {module} with DoRA; only linear layers with DoRA can be merged here"
            )
        if magnitude and math.prod(magnitude.shape) != update[0]:
            raise _misfit(adapter, magnitude.name, update[:1], magnitude.shape)
        low_rank = LowRank(a, b, adapter.scale(module, a.shape[0]), transposed, magnitude)
        output = replace(output, low_rank=low_rank)
    return output


def _misfit(adapter: SavedAdapter, name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> UserError:
    return UserError(
        f"the adapter in {adapter.folder} was trained on another base: {name} has the shape {list(got)}, expected "
        f"{list(expected)}; pass its own base with --base"
    )


def _settle_tie(outputs: dict[str, Output], embedding: str, head: str) -> bool | None:
    """Return False if a tied head and embedding must be written as two tensors. Otherwise drop the head.

    In the unmerged model, an update to one does not change the other.
    """
    below = outputs[embedding]
    if head not in outputs and not below.changed:
        return None
    if same_values(below, outputs.setdefault(head, Output(head, below.base))):
        del outputs[head]
        return None
    return False
