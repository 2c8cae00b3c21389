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
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import StoredTensor, file_tensors, same_values, unquantized
from lora_grpo.merging.base_weights import current_names, weight_name
from lora_grpo.merging.outputs import LowRank, Output
from lora_grpo.models import ADAPTER_WEIGHTS, PATTERNS, SELECTION, SavedAdapter, read_adapter

_LORA_KEY = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?")


@dataclass(frozen=True)
class MergePlan:
    """The tensors of the merged model, and whether its configuration ties head and embedding; None if unchanged."""

    outputs: dict[str, Output]
    tie_word_embeddings: bool | None

    @property
    def base_dtype(self) -> str:
        """The safetensors dtype name of most parameters in the base."""
        total: Counter[str] = Counter()
        for output in self.outputs.values():
            total[output.base.dtype] += math.prod(output.base.shape)
        return total.most_common(1)[0][0]


def plan_merge(base: Mapping[str, StoredTensor], folder: Path, model: Any) -> MergePlan:
    """Plan the merge of the adapter in `folder` into a base: the results of `base_tensors` and `empty_model`.

    Raises:
        UserError: an adapter key is unused or has the wrong shape, the adapter changes nothing, or this type of adapter
            cannot be merged.
    """
    adapter = read_adapter(folder)
    adapter.check({"use_dora", *PATTERNS, *SELECTION}, "which cannot be merged here; merge it with PEFT")
    weights = unquantized(file_tensors(folder / ADAPTER_WEIGHTS), folder, "train the adapter again")
    embedding = weight_name(model, model.get_input_embeddings())
    head = weight_name(model, model.get_output_embeddings())
    changes = _with_current_names(_by_tensor(weights), {*base, head}, model)
    if embedding not in base:
        raise UserError(f"the base has no {embedding}, which its config.json implies; pass another model with --base")
    is_declared_tied = model.config.get_text_config().tie_word_embeddings
    # transformers (5.17) does not tie a stored head that has different values.
    tied = head not in base or (is_declared_tied and same_values(base[head], base[embedding]))
    outputs = {name: Output(name, tensor) for name, tensor in base.items() if not (tied and name == head)}
    if tied and head in changes:
        outputs[head] = Output(head, replace(base[embedding], name=head))

    unused = []
    for name, parts in changes.items():
        if name in outputs:
            outputs[name] = _changed(outputs[name], parts, adapter)
        unused += [tensor.name for tensor in parts.values()]
    if unused:
        if any(name in outputs and "whole" in parts for name, parts in changes.items()):
            raise UserError(
                f"{folder} has whole weights ({', '.join(unused[:3])}), as after new tokens in the vocabulary, which "
                "cannot be merged here; merge it with PEFT"
            )
        raise UserError(
            f"{', '.join(unused[:3])}{' and more' if len(unused) > 3 else ''} of {folder} cannot be merged into this "
            "base; pass the adapter's own base with --base, or use the adapter with PEFT"
        )
    if not any(output.low_rank for output in outputs.values()):
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS} changes no weight of the base, so the merged model would be a copy of it; "
            "restore the file, or train the adapter again"
        )
    # The base may store a different head although its configuration ties the weights.
    tie = _settle_tie(outputs, embedding, head) if tied else False if is_declared_tied else None
    return MergePlan(outputs, tie)


def _by_tensor(weights: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Group the adapter's tensors by the name of the base's tensor that they change, and by `A`, `B`, or `base`."""
    groups: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in weights.items():
        name, part = key.removeprefix("base_model.model."), "base" if ".base_layer." in key else "whole"
        if found := _LORA_KEY.fullmatch(name):
            name, part = f"{found[1]}.weight", found[2]
        groups.setdefault(name.replace(".base_layer.", "."), {})[part] = tensor
    return groups


def _with_current_names(
    changes: Mapping[str, dict[str, StoredTensor]], known: Collection[str], model: Any
) -> dict[str, dict[str, StoredTensor]]:
    """Return the changes by the names of today, where those in the adapter are not among the `known` ones of the model.

    An adapter has the names of the transformers that it was trained with. PEFT renames it as transformers renames the
    checkpoint of a base, by the same rules.
    """
    renamed = {name: parts for name, parts in changes.items() if name in known}
    unknown = [name for name in changes if name not in known]
    for name, current in zip(unknown, current_names(unknown, model), strict=True):
        is_free = current in known and current not in renamed
        renamed[current if is_free else name] = changes[name]  # a name that stays unknown is reported as it is
    return renamed


def _changed(output: Output, parts: dict[str, StoredTensor], adapter: SavedAdapter) -> Output:
    """Return the output with the adapter's change, and remove the tensors that it uses from `parts`."""
    prefix = "embedding_" if "embedding_A" in parts else ""
    # PEFT (0.21) saves a copy of the frozen base of an embedding or head, unless its vocabulary was resized.
    if "base" in parts and parts["base"].shape == output.shape:
        del parts["base"]
    if f"{prefix}A" in parts and f"{prefix}B" in parts:
        a, b, magnitude = parts.pop(f"{prefix}A"), parts.pop(f"{prefix}B"), parts.pop("magnitude_vector", None)
        # Patterns of ranks and alphas are for the names in the adapter, which may be older than those of the base.
        module = _LORA_KEY.fullmatch(a.name.removeprefix("base_model.model."))[1]  # type: ignore[index]
        update, transposed = (b.shape[0], a.shape[1]), bool(prefix)
        if a.shape[0] != b.shape[1] or (update[::-1] if transposed else update) != output.shape:
            raise UserError(
                f"the adapter in {adapter.folder} was trained on another base: {module} has the shape {list(update)}, "
                f"expected {list(output.shape)}; pass its own base with --base"
            )
        if magnitude and transposed:
            raise UserError(f"{adapter.folder} trains {module} with DoRA; here, only DoRA of linear layers is merged")
        if magnitude and math.prod(magnitude.shape) != update[0]:
            found = f"{magnitude.name} has the shape {list(magnitude.shape)}, expected {[update[0]]}"
            raise UserError(f"the adapter in {adapter.folder} is damaged: {found}")
        low_rank = LowRank(a, b, adapter.scale(module, a.shape[0]), transposed, magnitude)
        output = replace(output, low_rank=low_rank)
    return output


def _settle_tie(outputs: dict[str, Output], embedding: str, head: str) -> bool | None:
    """Return False if a tied head and embedding must be written as two tensors. Otherwise drop the head.

    In the unmerged model, an update to one does not change the other.
    """
    below = outputs[embedding]
    if head not in outputs and not below.low_rank:
        return None
    if same_values(below, outputs.setdefault(head, Output(head, replace(below.base, name=head)))):
        del outputs[head]
        return None
    return False
