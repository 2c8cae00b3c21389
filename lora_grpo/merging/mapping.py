"""Plan the change of each tensor of the base, before any data is read.

Exactly one output must use each adapter key. Otherwise the merge fails, because an unused key means that part of the
training would be silently lost. These keys of PEFT (0.21) are merged:

    X.lora_A.weight, X.lora_B.weight          W_X += scale * B @ A
    X.lora_embedding_A, X.lora_embedding_B    W_X += scale * (B @ A).T
    X.lora_magnitude_vector                   DoRA: W_X is rescaled to these norms
    X.base_layer.weight                       a copy of the frozen W_X
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import StoredTensor, file_tensors, main_dtype, same_values, unquantized
from lora_grpo.merging.base_weights import current_names, weight_name
from lora_grpo.merging.outputs import LowRank, Output
from lora_grpo.models import ADAPTER_WEIGHTS, PATTERNS, SELECTION, SavedAdapter, read_adapter

_KEY_PREFIX = "base_model.model."
_LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?")

Parts = dict[str, StoredTensor]
"""An adapter's tensors for one tensor of the base, by part: `A`, `B`, `embedding_A`, `embedding_B` or
`magnitude_vector` of LoRA; `base`, a copy of the frozen weight; or `whole`, a weight that was trained without LoRA."""


@dataclass(frozen=True)
class MergePlan:
    """The tensors of the merged model, and whether its configuration ties head and embedding."""

    outputs: dict[str, Output]
    """The tensors by their names in the model."""
    tie_word_embeddings: bool | None
    """The setting of config.json; None if it stays as it is."""

    @property
    def base_dtype(self) -> str:
        """The safetensors dtype name of most parameters in the base."""
        return main_dtype(output.base for output in self.outputs.values())


def plan_merge(base: Mapping[str, StoredTensor], folder: Path, model: Any) -> MergePlan:
    """Plan the merge of an adapter into a base.

    Args:
        base: the result of `base_tensors`.
        folder: the adapter.
        model: the result of `empty_model`.

    Raises:
        UserError: an adapter key is unused or has the wrong shape, the adapter changes nothing, or this type of adapter
            cannot be merged.
    """
    adapter = read_adapter(folder)
    adapter.check({"use_dora", *PATTERNS, *SELECTION}, "which cannot be merged here; merge it with PEFT")
    weights = unquantized(file_tensors(folder / ADAPTER_WEIGHTS), folder, "train the adapter again")
    embedding = weight_name(model, model.get_input_embeddings())
    head = weight_name(model, model.get_output_embeddings())
    known = {*base, head}  # a base need not store a tied head
    changes = _with_current_names(_by_base_tensor(weights), known, model)

    # A tied head has the weights of the embedding. It is a tensor of its own only if the adapter changes it.
    if embedding not in base:
        raise UserError(f"the base has no {embedding}, which its config.json implies; pass another model with --base")
    is_declared_tied = model.config.get_text_config().tie_word_embeddings
    # A stored head with other values than the embedding is not tied by transformers (5.17), whatever is declared.
    is_tied = head not in base or (is_declared_tied and same_values(base[head], base[embedding]))
    outputs = {name: Output(name, tensor) for name, tensor in base.items()}
    if is_tied:
        outputs.pop(head, None)  # stored although it is tied
        if head in changes:
            outputs[head] = Output(head, replace(base[embedding], name=head))

    # Every change goes to one output.
    unused: list[StoredTensor] = []
    for name, parts in changes.items():
        if name in outputs:
            outputs[name], unused_parts = _with_change(outputs[name], parts, adapter)
            unused += unused_parts
        else:
            unused += parts.values()
    if unused:
        trained_whole = [name for name, parts in changes.items() if "whole" in parts]
        has_whole_weights = any(name in outputs for name in trained_whole)
        raise _unused_error(folder, unused, has_whole_weights=has_whole_weights)
    if not any(output.low_rank for output in outputs.values()):
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS} changes no weight of the base, so the merged model would be a copy of it; "
            "restore the file, or train the adapter again"
        )

    tie_word_embeddings = None
    if is_tied:
        tie_word_embeddings = _settle_tie(outputs, embedding, head)
    elif is_declared_tied:  # the base stores a different head although its configuration ties the weights
        tie_word_embeddings = False
    return MergePlan(outputs, tie_word_embeddings)


def _unused_error(folder: Path, unused: Sequence[StoredTensor], *, has_whole_weights: bool) -> UserError:
    names = ", ".join(tensor.name for tensor in unused[:3])
    if has_whole_weights:
        return UserError(
            f"{folder} has whole weights ({names}), as after new tokens in the vocabulary, which cannot be merged "
            "here; merge it with PEFT"
        )
    if len(unused) > 3:
        names += " and more"
    return UserError(
        f"{names} of {folder} cannot be merged into this base; pass the adapter's own base with --base, or use the "
        "adapter with PEFT"
    )


def _by_base_tensor(weights: Mapping[str, StoredTensor]) -> dict[str, Parts]:
    """Group an adapter's tensors by the name of the base's tensor that they change."""
    changes: dict[str, Parts] = {}
    for key, tensor in weights.items():
        name = key.removeprefix(_KEY_PREFIX)
        lora_key = _LORA_KEY.fullmatch(name)
        if lora_key:
            name = f"{lora_key['module']}.weight"
            part = lora_key["part"]
        elif ".base_layer." in key:
            part = "base"
        else:
            part = "whole"
        name = name.replace(".base_layer.", ".")  # the module that PEFT has wrapped
        changes.setdefault(name, {})[part] = tensor
    return changes


def _with_current_names(changes: Mapping[str, Parts], known: Collection[str], model: Any) -> dict[str, Parts]:
    """Return the changes by the model's names of their tensors. Names that are not `known` are replaced if possible.

    An adapter has the names of the version of transformers that it was trained with. PEFT translates these names to
    those of the installed version by the rules that transformers has for the checkpoint of a base.
    """
    renamed = {name: parts for name, parts in changes.items() if name in known}
    unknown = [name for name in changes if name not in known]
    for name, current in zip(unknown, current_names(unknown, model), strict=True):
        if current in known and current not in renamed:
            renamed[current] = changes[name]
        else:
            renamed[name] = changes[name]  # `plan_merge` reports the name as it is in the adapter
    return renamed


def _with_change(output: Output, parts: Parts, adapter: SavedAdapter) -> tuple[Output, list[StoredTensor]]:
    """Return an output with the adapter's change, and the tensors of the adapter that it does not use."""
    unused = dict(parts)
    # PEFT (0.21) saves a copy of the frozen base of an embedding or head, unless its vocabulary was resized.
    if "base" in parts and parts["base"].shape == output.shape:
        del unused["base"]

    is_embedding = "embedding_A" in parts
    if is_embedding:
        part_a = "embedding_A"
        part_b = "embedding_B"
    else:
        part_a = "A"
        part_b = "B"
    if part_a not in parts or part_b not in parts:
        return output, list(unused.values())
    a = unused.pop(part_a)  # (r, in)
    b = unused.pop(part_b)  # (out, r)
    magnitude = unused.pop("magnitude_vector", None)  # (out,)

    # The change, B @ A, must have the shape of the weight, which is (in, out) for an embedding.
    module = _module_of(a)
    change_shape = (b.shape[0], a.shape[1])
    stored_shape = change_shape[::-1] if is_embedding else change_shape
    if a.shape[0] != b.shape[1] or stored_shape != output.shape:
        raise UserError(
            f"the adapter in {adapter.folder} was trained on another base: {module} has the shape "
            f"{list(change_shape)}, expected {list(output.shape)}; pass its own base with --base"
        )
    if magnitude and is_embedding:
        raise UserError(f"{adapter.folder} trains {module} with DoRA; here, only DoRA of linear layers is merged")
    if magnitude and math.prod(magnitude.shape) != change_shape[0]:
        raise UserError(
            f"the adapter in {adapter.folder} is damaged: {magnitude.name} has the shape {list(magnitude.shape)}, "
            f"expected {[change_shape[0]]}"
        )
    low_rank = LowRank(a, b, scale=adapter.scale(module, rank=a.shape[0]), transposed=is_embedding, magnitude=magnitude)
    return replace(output, low_rank=low_rank), list(unused.values())


def _module_of(tensor: StoredTensor) -> str:
    """Return the name of a tensor's module in the adapter, which may differ from the name in the base.

    The patterns of ranks and alphas in adapter_config.json are for the name in the adapter.
    """
    lora_key = _LORA_KEY.fullmatch(tensor.name.removeprefix(_KEY_PREFIX))
    assert lora_key is not None
    return lora_key["module"]


def _settle_tie(outputs: dict[str, Output], embedding: str, head: str) -> bool | None:
    """Return `tie_word_embeddings` of the merged model: False if its head differs from its embedding, otherwise None.

    A tied head and embedding share one weight, but each has its own LoRA update. With different updates, `outputs` gets
    both tensors; with equal ones, only the embedding.
    """
    embedding_output = outputs[embedding]
    if head not in outputs and not embedding_output.low_rank:
        return None
    if head not in outputs:
        outputs[head] = Output(head, replace(embedding_output.base, name=head))
    if same_values(embedding_output, outputs[head]):
        del outputs[head]
        return None
    return False
