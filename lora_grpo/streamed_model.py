"""A forward pass whose weights come from disk a block of rows at a time, and the divergence of two models by it.

A merge is judged by what the merged model says, on machines whose memory does not hold it. Weights are read in float32,
used and dropped; the same pass serves the base, the base with its adapter, and the merged files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from lora_grpo.errors import UserError
from lora_grpo.frozen_base import empty_model
from lora_grpo.merged_tensors import blocks

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
            elif isinstance(module, torch.nn.Embedding):
                self._embed(module, f"{name}.weight")
            else:
                self._rest += [
                    (module, part, f"{name}.{part}" if name else part)
                    for part, _ in module.named_parameters(recurse=False)
                ]
        if sum(getattr(module, part).numel() * 4 for module, part, _ in self._rest) > _SMALL_BYTES:
            raise UserError(f"{type(self._model).__name__} holds large weights outside linear layers")

    def logits(self, weights: Mapping[str, Rows], ids: Sequence[Sequence[int]], keep: int) -> Any:
        """Return the logits of what follows each of the last `keep` tokens of every text.

        Args:
            weights: every weight by its name; a head that is missing is the embedding's.
            ids: token ids of B texts of at least `keep` tokens.
            keep: T positions of each.

        Returns:
            (B·T, V), float32.

        Raises:
            UserError: a weight is missing.
        """
        import torch

        self._weights = weights
        longest = max(map(len, ids))
        # Padded on the right: what comes later is not attended to.
        batch = torch.tensor([[*text, *[0] * (longest - len(text))] for text in ids])
        places = torch.tensor([range(len(text) - keep, len(text)) for text in ids])
        with torch.no_grad(), self._small_weights(), self._only(places):
            return self._model(input_ids=batch, use_cache=False).logits.float().flatten(0, 1)

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
        import torch

        def forward(inputs: Any) -> Any:
            weight = self._find(name)
            parts = [
                torch.nn.functional.linear(inputs, weight.rows(start, stop).float())
                for start, stop in blocks(weight.shape)
            ]
            outputs = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
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

    @contextmanager
    def _small_weights(self) -> Iterator[None]:
        import torch

        for module, part, name in self._rest:
            weight = self._find(name)
            setattr(module, part, torch.nn.Parameter(weight.rows(0, weight.shape[0]).float(), requires_grad=False))
        yield

    @contextmanager
    def _only(self, places: Any) -> Iterator[None]:
        """Let the head see the kept positions alone: a vocabulary is wide."""
        head = self._model.get_output_embeddings()
        whole = head.forward
        head.forward = lambda hidden: whole(hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])))
        try:
            yield
        finally:
            head.forward = whole


def divergence(first: Any, second: Any) -> float:
    """Return the mean KL(first ‖ second) over positions, in nats a token.

    Args:
        first: (positions, V) logits.
        second: the same of the other model.
    """
    total = 0.0
    for one, other in zip(first.split(16), second.split(16), strict=True):
        # In float32 the rounding of two nearly equal softmaxes is larger than their divergence.
        one, other = one.double().log_softmax(dim=-1), other.double().log_softmax(dim=-1)
        total += float((one.exp() * (one - other)).sum())
    return total / len(first)
