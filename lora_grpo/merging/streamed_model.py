"""A forward pass that reads weights from disk in blocks, and the KL divergence between models.

A merge is evaluated by the merged model's predictions, even on machines without enough memory to load the model. All
models run in float32 and in the same pass, so a weight that several of them have is read and multiplied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import Rows, row_blocks
from lora_grpo.merging.base_weights import weight_name
from lora_grpo.merging.outputs import Output

Weights = Mapping[str, Rows]

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
        self._models: list[Weights] = []
        self._texts = 0
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

    def states(self, models: Mapping[str, Weights], ids: Sequence[Sequence[int]], keep: int) -> dict[str, States]:
        """Run texts of at least `keep` tokens through all layers before the head. Keep that many states of each text.

        The weights of each model are given by name. A missing head is tied to the embedding. Models whose small
        parameters differ run one after the other.

        Raises:
            UserError: a weight is missing, or the logits are not just the product of the states and the head.
        """
        import torch

        groups: list[tuple[list[Any], dict[str, Weights]]] = []
        for label, weights in models.items():
            small = [_read(_find(weights, name)) for _, _, name in self._small]
            for values, members in groups:
                if all(map(torch.equal, values, small)):
                    members[label] = weights
                    break
            else:
                groups.append((small, {label: weights}))
        return {
            label: States(hidden, _find(models[label], self._head, self._embedding))
            for small, members in groups
            for label, hidden in zip(members, self._run(small, list(members.values()), ids, keep), strict=True)
        }

    def _run(self, small: list[Any], models: list[Weights], ids: Sequence[Sequence[int]], keep: int) -> list[Any]:
        """Return the states of each model, (texts * keep, hidden size). The models are stacked in the batch."""
        import torch

        self._models, self._texts = models, len(ids)
        longest = max(map(len, ids))
        # Right padding needs no mask, because no token attends to later tokens.
        batch = torch.tensor([[*text, *[0] * (longest - len(text))] for text in ids] * len(models))
        indices = torch.tensor([range(len(text) - keep, len(text)) for text in ids] * len(models))
        head = self._model.get_output_embeddings()
        inputs: list[Any] = []

        def skip(hidden: Any) -> Any:
            inputs.append(hidden)
            return hidden

        head.forward = skip
        for (module, part, _), values in zip(self._small, small, strict=True):
            setattr(module, part, torch.nn.Parameter(values, requires_grad=False))
        with torch.no_grad():
            after = self._model(input_ids=batch, use_cache=False).logits
        if len(inputs) != 1 or after is not inputs[0] or head.bias is not None:
            raise UserError(f"{type(self._model).__name__} changes its logits after the head")
        hidden = after.gather(1, indices.unsqueeze(-1).expand(-1, -1, after.shape[-1]))
        return list(hidden.flatten(0, 1).chunk(len(models)))

    def _linear(self, name: str, bias: str | None) -> Callable[[Any], Any]:
        def forward(inputs: Any) -> Any:
            if inputs.shape[0] % (self._texts * len(self._models)):
                raise UserError(f"{type(self._model).__name__} does not pass the batch first to {name}")
            weights = [_find(model, name) for model in self._models]
            flat = inputs.reshape(-1, inputs.shape[-1]).chunk(len(weights))
            outputs = inputs.new_empty((len(flat), len(flat[0]), weights[0].shape[0]))
            for start, stop, block in _products(weights, flat):
                for output, part in zip(outputs, block, strict=True):
                    output[:, start:stop] = part.T
            if bias:
                for output, model in zip(outputs, self._models, strict=True):
                    output += _read(_find(model, bias))
            return outputs.view(*inputs.shape[:-1], -1)

        return forward

    def _embed(self, module: Any) -> None:
        """Load only the embedding rows of tokens in the batch, and renumber the tokens accordingly."""
        import torch

        look_up = module.forward
        module.padding_idx = None

        def forward(ids: Any) -> Any:
            tokens, numbers = ids.unique(return_inverse=True)
            numbers = numbers.view(len(self._models), -1, ids.shape[-1])
            rows: dict[Rows, Any] = {}
            for number, model in enumerate(self._models):
                weight = _find(model, self._embedding)
                if weight not in rows:
                    rows[weight] = torch.cat([weight.rows(token, token + 1).float() for token in tokens.tolist()])
                numbers[number] += list(rows).index(weight) * len(tokens)
            module.weight = torch.nn.Parameter(torch.cat(list(rows.values())), requires_grad=False)
            return look_up(numbers.view(ids.shape))

        module.forward = forward


def _find(weights: Weights, name: str, tied_to: str | None = None) -> Rows:
    found = weights.get(name) or (weights.get(tied_to) if tied_to else None)
    if found is None:
        raise UserError(f"the weights have no {name}")
    return found


def _read(weight: Rows) -> Any:
    return weight.rows(0, weight.shape[0]).float()


def _products(weights: Sequence[Rows], inputs: Sequence[Any]) -> Iterator[tuple[int, int, list[Any]]]:
    """Multiply the weight of each model, (N, K), with the model's inputs, (T, K), a block of rows at a time.

    Yields the range of rows, and for each model the product of shape (rows, T). A low-rank update is applied to the
    inputs, so that the adapter shares the base's weight.
    """
    import torch

    parts = [weight.parts() if isinstance(weight, Output) else (weight, None) for weight in weights]
    members: dict[Rows, list[int]] = {}
    for number, (dense, _) in enumerate(parts):
        members.setdefault(dense, []).append(number)
    # MKL multiplies weight @ inputs.T faster than inputs @ weight.T, and with a multiple of eight columns.
    stacked = {}
    for dense, numbers in members.items():
        together = torch.cat([inputs[number] for number in numbers])
        stacked[dense] = torch.nn.functional.pad(together, (0, 0, 0, -len(together) % 8)).T
    updates = {number: (low[0], low[1] @ inputs[number].T) for number, (_, low) in enumerate(parts) if low}
    for start, stop in row_blocks(weights[0].shape):
        block: dict[int, Any] = {}
        for dense, numbers in members.items():
            products = (dense.rows(start, stop).float() @ stacked[dense]).split(len(inputs[0]), dim=1)
            block |= zip(numbers, products, strict=False)  # the last ones may be padding
        for number, (left, right) in updates.items():
            block[number] += left[start:stop] @ right
        yield start, stop, [block[number] for number in range(len(weights))]


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
    heads, hidden = zip(*((model.head, model.hidden) for model in models.values()), strict=True)
    for _, _, block in _products(heads, hidden):
        logits = {name: part.double() for name, part in zip(models, block, strict=True)}
        terms, shrink = {}, {}
        for name, values in logits.items():
            before = largest[name]
            largest[name] = torch.maximum(before, values.amax(dim=0))
            shrink[name] = (before - largest[name]).exp()
            terms[name] = (values - largest[name]).exp()
            total[name] = total[name] * shrink[name] + terms[name].sum(dim=0)
        for first, second in pairs:
            summed = (terms[first] * (logits[first] - logits[second])).sum(dim=0)
            weighted[first, second] = weighted[first, second] * shrink[first] + summed
    log_z = {name: largest[name] + total[name].log() for name in models}
    return {
        (first, second): float((summed / total[first] - log_z[first] + log_z[second]).mean())
        for (first, second), summed in weighted.items()
    }
