"""A forward pass that reads weights from disk in blocks, and the KL divergence between models.

A merge is evaluated by the merged model's predictions, even on machines without enough memory to load the model. All
models use the same forward pass, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import Rows, row_blocks
from lora_grpo.merging.base_weights import weight_name

_SMALL_BYTES = 64 * 2**20
"""Limit for all other parameters, such as norms, which are kept in memory."""


@dataclass(frozen=True)
class States:
    """The head of a model, (V, hidden size), and its inputs, (T, hidden size)."""

    hidden: Any
    head: Rows


class StreamedModel:
    """The result of `empty_model`, changed to read its weights from disk."""

    def __init__(self, model: Any) -> None:
        import torch

        if any(parameter.dim() > 2 for parameter in model.parameters()):
            raise UserError("the model is a mixture of experts")
        self._model = model
        self._weights: Mapping[str, Rows] = {}
        embedding = model.get_input_embeddings()
        self._head = weight_name(model, model.get_output_embeddings())
        self._embedding = weight_name(model, embedding)
        self._small: list[tuple[Any, str, str]] = []
        for name, module in model.named_modules():
            if type(module) is torch.nn.Linear:
                module.forward = self._linear(f"{name}.weight", f"{name}.bias" if module.bias is not None else None)
            elif module is embedding:
                self._embed(module)
            else:
                parameters = module.named_parameters(recurse=False)
                self._small += [(module, part, f"{name}.{part}") for part, _ in parameters]
        if sum(getattr(module, part).numel() * 4 for module, part, _ in self._small) > _SMALL_BYTES:
            raise UserError(f"{type(model).__name__} has large weights outside linear layers")

    def states(self, weights: Mapping[str, Rows], ids: Sequence[Sequence[int]], keep: int) -> States:
        """Run texts of at least `keep` tokens through all layers before the head. Keep that many states of each text.

        A missing head is tied to the embedding.

        Raises:
            UserError: a weight is missing, or the logits are not just the product of the states and the head.
        """
        import torch

        self._weights = weights
        longest = max(map(len, ids))
        # Right padding needs no mask, because no token attends to later tokens.
        batch = torch.tensor([[*text, *[0] * (longest - len(text))] for text in ids])
        indices = torch.tensor([range(len(text) - keep, len(text)) for text in ids])
        head = self._model.get_output_embeddings()
        inputs: list[Any] = []

        def skip(hidden: Any) -> Any:
            inputs.append(hidden)
            return hidden

        head.forward = skip
        for module, part, name in self._small:
            setattr(module, part, torch.nn.Parameter(_read(self._find(name)), requires_grad=False))
        with torch.no_grad():
            after = self._model(input_ids=batch, use_cache=False).logits
        if len(inputs) != 1 or after is not inputs[0] or head.bias is not None:
            raise UserError(f"{type(self._model).__name__} changes its logits after the head")
        hidden = after.gather(1, indices.unsqueeze(-1).expand(-1, -1, after.shape[-1]))
        return States(hidden.flatten(0, 1), self._find(self._head))

    def _find(self, name: str) -> Rows:
        if name == self._head and name not in self._weights:
            name = self._embedding
        if name not in self._weights:
            raise UserError(f"the weights have no {name}")
        return self._weights[name]

    def _linear(self, name: str, bias: str | None) -> Callable[[Any], Any]:
        def forward(inputs: Any) -> Any:
            weight = self._find(name)
            outputs = inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))
            for start, stop in row_blocks(weight.shape):
                outputs[..., start:stop] = inputs @ weight.rows(start, stop).float().T
            if bias:
                outputs += _read(self._find(bias))
            return outputs

        return forward

    def _embed(self, module: Any) -> None:
        """Load only the embedding rows of tokens in the batch, and renumber the tokens accordingly."""
        import torch

        look_up = module.forward
        module.padding_idx = None

        def forward(ids: Any) -> Any:
            weight = self._find(self._embedding)
            tokens, numbers = ids.unique(return_inverse=True)
            rows = torch.cat([weight.rows(token, token + 1).float() for token in tokens.tolist()])
            module.weight = torch.nn.Parameter(rows, requires_grad=False)
            return look_up(numbers)

        module.forward = forward


def _read(weight: Rows) -> Any:
    return weight.rows(0, weight.shape[0]).float()


def divergences(models: Mapping[str, States], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Return the mean KL(first || second) in nats per token for each pair of models.

    Logits are computed for one block of the vocabulary at a time and then discarded. With logits a and b and
    Z = sum(exp), KL = sum(exp(a) (a - b)) / Z_a - log Z_a + log Z_b. Sums are relative to the largest logit so far and
    in float64, because the rounding error of two nearly equal float32 softmaxes exceeds their divergence.
    """
    import torch

    largest = {name: torch.full((len(model.hidden),), -torch.inf).double() for name, model in models.items()}
    total = {name: torch.zeros_like(values) for name, values in largest.items()}
    weighted = {pair: torch.zeros_like(total[pair[0]]) for pair in pairs}
    for start, stop in row_blocks(next(iter(models.values())).head.shape):
        logits, terms, shrink = {}, {}, {}
        for name, model in models.items():
            logits[name] = (model.hidden @ model.head.rows(start, stop).float().T).double()
            before = largest[name]
            largest[name] = torch.maximum(before, logits[name].amax(dim=1))
            shrink[name] = (before - largest[name]).exp()
            terms[name] = (logits[name] - largest[name].unsqueeze(1)).exp()
            total[name] = total[name] * shrink[name] + terms[name].sum(dim=1)
        for first, second in pairs:
            block = (terms[first] * (logits[first] - logits[second])).sum(dim=1)
            weighted[first, second] = weighted[first, second] * shrink[first] + block
    log_z = {name: largest[name] + total[name].log() for name in models}
    return {
        (first, second): float((summed / total[first] - log_z[first] + log_z[second]).mean())
        for (first, second), summed in weighted.items()
    }
