"""A forward pass whose weights come from disk a block of rows at a time, and the divergence of two models by it.

A merge is judged by what the merged model says, on machines whose memory does not hold it. Weights are read in float32,
used and dropped; the same pass serves the base, the base with its adapter, and the merged files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lora_grpo.errors import UserError
from lora_grpo.files import row_blocks
from lora_grpo.merging.base_weights import empty_model

_SMALL_BYTES = 64 * 2**20
"""What a model's other parameters (norms) may take; they are held."""


class Rows(Protocol):
    """A weight that is read by rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, start: int, stop: int) -> Any: ...


class StreamedModel:
    """A causal language model without weights of its own.

    Args:
        folder: of the model's configuration.
        trust_remote_code: run the model's own code.

    Raises:
        UserError: the model cannot be made, or holds large weights outside linear layers and embeddings.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool) -> None:
        import torch

        self._model = empty_model(folder, trust_remote_code=trust_remote_code)
        self._weights: Mapping[str, Rows] = {}
        self._head = ""
        self._rest: list[tuple[Any, str, str]] = []
        head = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            if type(module) is torch.nn.Linear:
                module.forward = self._linear(f"{name}.weight", module.bias is not None and f"{name}.bias")
                if module is head:
                    self._head = f"{name}.weight"
            elif module is self._model.get_input_embeddings() and isinstance(module, torch.nn.Embedding):
                self._embed(module, f"{name}.weight")
            else:
                self._rest += [
                    (module, part, f"{name}.{part}" if name else part)
                    for part, _ in module.named_parameters(recurse=False)
                ]
        if sum(getattr(module, part).numel() * 4 for module, part, _ in self._rest) > _SMALL_BYTES:
            raise UserError(f"{type(self._model).__name__} holds large weights outside linear layers")

    def states(self, weights: Mapping[str, Rows], ids: Sequence[Sequence[int]], keep: int) -> States:
        """Run B texts through all layers below the head.

        Args:
            weights: every weight by its name; a head that is missing is the embedding's.
            ids: token ids of the texts, each of at least `keep` tokens.
            keep: T, how many of a text's last tokens are looked at.

        Raises:
            UserError: a weight is missing, or the model does more to its logits than multiply by the head.
        """
        import torch

        self._weights = weights
        longest = max(map(len, ids))
        # Padded on the right: what comes later is not attended to.
        batch = torch.tensor([[*text, *[0] * (longest - len(text))] for text in ids])
        places = torch.tensor([range(len(text) - keep, len(text)) for text in ids])
        head = self._model.get_output_embeddings()
        seen: list[Any] = []

        def stop_here(hidden: Any) -> Any:
            seen.append(hidden)
            return hidden

        head.forward = stop_here
        for module, part, name in self._rest:
            weight = self._find(name)
            setattr(module, part, torch.nn.Parameter(weight.rows(0, weight.shape[0]).float(), requires_grad=False))
        with torch.no_grad():
            after = self._model(input_ids=batch, use_cache=False).logits
        if len(seen) != 1 or after is not seen[0] or head.bias is not None:
            raise UserError(f"{type(self._model).__name__} changes its logits after the head")
        hidden = after.gather(1, places.unsqueeze(-1).expand(-1, -1, after.shape[-1]))
        return States(hidden.flatten(0, 1), self._find(self._head))

    def _find(self, name: str) -> Rows:
        if name in self._weights:
            return self._weights[name]
        if name == self._head and self._model.config.get_text_config().tie_word_embeddings is not False:
            embedding = self._model.get_input_embeddings()
            tied = next(f"{known}.weight" for known, module in self._model.named_modules() if module is embedding)
            if tied in self._weights:
                return self._weights[tied]
        raise UserError(f"the weights have no {name}")

    def _linear(self, name: str, bias: str | bool) -> Callable[[Any], Any]:
        def forward(inputs: Any) -> Any:
            weight = self._find(name)
            outputs = inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))
            for start, stop in row_blocks(weight.shape):
                outputs[..., start:stop] = inputs @ weight.rows(start, stop).float().T
            if bias:
                added = self._find(str(bias))
                outputs += added.rows(0, added.shape[0]).float()
            return outputs

        return forward

    def _embed(self, module: Any, name: str) -> None:
        """Give the module those rows alone that are asked for, and their numbers among them."""
        import torch

        look_up = module.forward
        module.padding_idx = None

        def forward(ids: Any) -> Any:
            weight = self._find(name)
            tokens, places = ids.unique(return_inverse=True)
            rows = torch.cat([weight.rows(token, token + 1).float() for token in tokens.tolist()])
            module.weight = torch.nn.Parameter(rows, requires_grad=False)
            return look_up(places)

        module.forward = forward


@dataclass(frozen=True)
class States:
    """What a model's head is given, and the head."""

    hidden: Any
    """(positions, hidden size)."""
    head: Rows
    """(V, hidden size)."""


def divergences(models: Mapping[str, States], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Return the mean KL(first ‖ second) over positions, in nats a token, of each pair of models.

    Vocabularies are wide, so logits are made and dropped a block of tokens at a time. With a and b the logits and
    Z = Σ exp, KL = Σ exp(a)·(a - b) / Z_a - log Z_a + log Z_b; sums are kept relative to the largest logit so far, in
    float64, because the rounding of two nearly equal float32 softmaxes is larger than their divergence.

    Args:
        models: by name; all over one vocabulary.
        pairs: names of first and second.
    """
    import torch

    largest = {name: torch.full((len(model.hidden),), -torch.inf).double() for name, model in models.items()}
    total = {name: torch.zeros_like(found) for name, found in largest.items()}
    weighted = {pair: torch.zeros_like(total[pair[0]]) for pair in pairs}
    for start, stop in row_blocks(next(iter(models.values())).head.shape):
        logits, shares, shrink = {}, {}, {}
        for name, model in models.items():
            logits[name] = (model.hidden @ model.head.rows(start, stop).float().T).double()
            before = largest[name]
            largest[name] = torch.maximum(before, logits[name].amax(dim=1))
            shrink[name] = (before - largest[name]).exp()
            shares[name] = (logits[name] - largest[name].unsqueeze(1)).exp()
            total[name] = total[name] * shrink[name] + shares[name].sum(dim=1)
        for first, second in pairs:
            found = (shares[first] * (logits[first] - logits[second])).sum(dim=1)
            weighted[first, second] = weighted[first, second] * shrink[first] + found
    normaliser = {name: largest[name] + total[name].log() for name in models}
    return {
        (first, second): float((summed / total[first] - normaliser[first] + normaliser[second]).mean())
        for (first, second), summed in weighted.items()
    }
