"""Log-probabilities without the logits of the whole vocabulary, on every engine."""

from __future__ import annotations

import sys
from typing import Any

_TOLERANCE = 1e-3
"""Nats that the two ways may differ by in float32. A scale or a cap that one of them leaves out is far more."""
_TOLERANCE_16_BIT = 0.2
"""The same where logits are rounded to 16 bits."""


class ChunkedLogProbs:
    """Mixed in before TRL's GRPOTrainer: logits are made in tiles of 2048 tokens by 8192 vocabulary entries.

    TRL 1.14 has this path (`_chunked_logps`) in plain PyTorch, and hides it behind `use_liger_kernel`, which asks for a
    package that the path does not use. Here the trainer takes it as soon as it is put together. Where the head is not
    the plain linear layer that the path multiplies with (an adapter lies on it), or the model does to its logits what
    the path does not know of, the whole logits are made as before, and that is said once. Unsloth replaces both paths
    on a GPU by one of its own, which makes no whole logits either, and is left alone.

    On a CPU it costs nothing (docs/memory.md), so every run takes it, also where the vocabulary is smaller than a tile.
    """

    model: Any
    use_liger_kernel: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from trl.models.utils import _ForwardRedirection

        if "unsloth" in sys.modules:  # it replaces parts of either path, and on a GPU both
            return
        reason = self._why_whole()
        if reason:
            print(f"logits of the whole vocabulary are made, which takes more memory: {reason}", file=sys.stderr)
            return
        self.use_liger_kernel = True
        self._forward_redirection = _ForwardRedirection()

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Score at most `batch_size` rows at once, as the path with whole logits does.

        TRL's chunked path drops `batch_size`: the pass before the loss, which importance sampling and a KL penalty
        ask for, would take all completions of a step through the layers together.
        """
        import torch

        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        rows = len(args[0])
        given = [value for value in kwargs.values() if value is not None and not isinstance(value, bool)]
        if not self.use_liger_kernel or not batch_size or rows <= batch_size or given:  # images come by the sample
            return score(model, *args, batch_size=batch_size, **kwargs)
        ids, mask, *rest = args
        slices = [slice(start, start + batch_size) for start in range(0, rows, batch_size)]
        parts = [score(model, ids[part], mask[part], *rest, batch_size=batch_size, **kwargs) for part in slices]
        return tuple(None if found[0] is None else torch.cat(found) for found in zip(*parts, strict=True))

    def _why_whole(self) -> str:
        """Return why the chunked path would not compute what the model does; nothing where it would."""
        import torch

        head = self.model.get_output_embeddings()
        if type(head) is not torch.nn.Linear:
            return f"the output head is no plain linear layer but {type(head).__name__}"
        ids = torch.arange(1, 9, device=head.weight.device)[None]
        asked = (self.model, ids, torch.ones_like(ids), 4)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                chunked, whole = self._chunked_logps(*asked)[0], self._full_logits_logps(*asked)[0]  # type: ignore[attr-defined]
        finally:
            self.model.train(was_training)
        apart = (chunked.float() - whole.float()).abs().max().item()
        if apart <= (_TOLERANCE if head.weight.dtype == torch.float32 else _TOLERANCE_16_BIT):
            return ""
        return f"the {self.model.config.model_type} model changes its logits on their way (by {apart:.2g} nats)"
