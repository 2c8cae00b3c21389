"""Logits in tiles of tokens and vocabulary entries: whether a model allows them, and one micro-batch at a time.

The tiles are TRL's own: 2048 tokens x 8192 entries in TRL 1.14, and in TRL 1.16 4096 x 32,768, or `CPU_TILE` of
`training/trl_compat.py` on a CPU. The logits of the whole vocabulary never exist, which saves most of the memory of the
loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lora_grpo import console
from lora_grpo.loss.probes import logprob_tolerance
from lora_grpo.loss.scoring import Score, Scored, joined
from lora_grpo.models import base_model

if TYPE_CHECKING:
    import torch

_PROBE_TOKENS = 8


def tiles_obstacle(model: Any, compute: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Return why logits that are computed in parts would differ from the model's own, or "".

    The parts, TRL's tiles or SFT's chunks of tokens, are products of hidden states and the weights of the head. They
    lack an adapter on the head, and a scale or cap that the model applies to its logits.

    Args:
        compute: returns two tensors of logprobs for token ids of shape (1, T): from parts, and from the model's own
            logits.
    """
    import torch

    head = model.get_output_embeddings()
    if hasattr(head, "lora_A"):
        return "the adapter changes the output head"
    if type(head) is not torch.nn.Linear:
        return f"the output head is not a plain linear layer but {type(head).__name__}"

    base_model.keep_frozen(model)  # before the first pass in eval mode
    model.eval()
    with torch.no_grad():
        vocabulary_size = len(head.weight)
        first = min(1, vocabulary_size - 1)  # without the first token, which is often padding
        ids = torch.arange(first, first + _PROBE_TOKENS, device=head.weight.device) % vocabulary_size
        logprobs_in_parts, whole_logprobs = compute(ids[None])
    difference = (logprobs_in_parts.float() - whole_logprobs.float()).abs().max().item()
    if difference > logprob_tolerance(model):
        return f"the {model.config.model_type} model transforms its logits (by {difference:.2g} nats)"
    return ""


def report_whole_logits(reason: str) -> None:
    """Print that a run needs the memory of whole logits, and why."""
    console.warning(f"computing logits of the whole vocabulary, which takes more memory: {reason}")


def score_in_slices(
    score: Score,
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    *args: Any,
    batch_size: int | None = None,
    **kwargs: Any,
) -> Scored:
    """Score at most `batch_size` of R rows at once. With tiles, TRL would run all completions of a step at once.

    TRL gives a `batch_size` for old and reference logprobs, and asks for the router's loss only without one.
    """
    slice_size = batch_size or len(ids)
    parts = []
    for start in range(0, len(ids), slice_size):
        rows = slice(start, start + slice_size)
        parts.append(score(model, ids[rows], mask[rows], *args, batch_size=batch_size, **kwargs))
    return joined(parts)
