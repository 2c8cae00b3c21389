"""The functions of a trainer that the exact pass calls. TRL's are in `training/trl_compat.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Scored: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]"
"""Logprobs and entropies of the completions' tokens, both of shape (R, completion width), and a router's loss."""

Score: TypeAlias = Callable[..., Any]
"""`score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)`: returns `Scored` for R rows. The last
`logits_to_keep` columns are the completions."""


def joined(parts: Sequence[Scored]) -> Scored:
    """Return the scores of slices of rows as those of all rows. The router's loss is kept if there is one slice."""
    import torch

    if len(parts) == 1:
        return parts[0]
    logprobs = torch.cat([part[0] for part in parts])
    entropies_of_parts = [part[1] for part in parts if part[1] is not None]
    entropies = torch.cat(entropies_of_parts) if entropies_of_parts else None
    return logprobs, entropies, None


class Tiles(Protocol):
    """Logits in tiles of tokens and vocabulary entries, which a trainer may use in place of the full logits."""

    def compare(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logprobs of the last tokens of rows from tiles, and from the full logits."""

    def enable(self) -> Score:
        """Use tiles from now on, and return the function that does."""
