"""Whether a model counts the padding on the left of a row. If it does, no faster pass computes the same loss."""

from typing import Any

from lora_grpo.loss.probes import base_of, logprob_tolerance, probe_tokens
from lora_grpo.loss.scoring import Score
from lora_grpo.models import base_model

_TOKENS, _COMPLETION_TOKENS = 16, 8
"""Length of the row, and of its completion."""
_SHIFT = 64
"""Tokens of padding."""


def why_padding_counts(model: Any, score: Score, tokenizer: Any) -> str:
    """Return the reason if padding on the left changes the logprobs of a model, else "".

    TRL passes no positions. Most models attend by distance, or count positions from the attention mask. Others (GPT-2,
    BioGPT, XGLM) count padding, unlike `generate`, this package's sampler, and packed rows.

    Args:
        score: TRL's function, which computes the logprobs of padded rows. Call it in the trainer's autocast.
    """
    import torch

    config = base_of(model).config.get_text_config()
    max_positions = getattr(config, "max_position_embeddings", None) or 2 * _SHIFT
    shift = min(_SHIFT, max_positions // 2)

    # The same tokens, once without and once with padding.
    device = next(model.parameters()).device
    ids = torch.tensor([probe_tokens(model, tokenizer, _TOKENS)], device=device)
    mask = torch.ones_like(ids)
    padding = torch.full((1, shift), tokenizer.pad_token_id, device=device)
    padded_ids = torch.cat([padding, ids], dim=1)
    padded_mask = torch.cat([torch.zeros_like(padding), mask], dim=1)

    base_model.keep_frozen(model)  # before the first pass in eval mode
    model.eval()
    with torch.no_grad():
        logprobs = score(model, ids, mask, _COMPLETION_TOKENS)[0].float()
        padded_logprobs = score(model, padded_ids, padded_mask, _COMPLETION_TOKENS)[0].float()
    difference = (logprobs - padded_logprobs).abs().mean().item()
    if difference <= logprob_tolerance(model) / 2:
        return ""
    return f"TRL counts the padding of {config.model_type} ({shift} tokens change logprobs by {difference:.2g} nats)"
