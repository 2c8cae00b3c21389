"""Whether a model counts the padding on the left of a row. If it does, no faster pass computes the same loss."""

from typing import Any

from lora_grpo.loss.probes import logprob_tolerance, probe_tokens
from lora_grpo.loss.scoring import Score
from lora_grpo.models import base_model, base_of

_ROW_TOKENS = 16
"""Length of the row, a prompt and its completion."""
_COMPLETION_TOKENS = 8
_MAX_PADDING = 64
"""Tokens of padding on the left of the row, fewer if the model has few positions."""


def padding_obstacle(model: Any, score: Score, tokenizer: Any) -> str:
    """Return the reason if padding on the left changes the logprobs of a model, else "".

    TRL passes no positions. Most models attend by distance, or count positions from the attention mask. Others (GPT-2,
    BioGPT, XGLM) count padding, unlike `generate`, this package's sampler, and packed rows.

    Args:
        score: TRL's function, which computes the logprobs of padded rows. Call it in the trainer's autocast.
    """
    import torch

    config = base_of(model).config.get_text_config()
    num_padding = _MAX_PADDING
    max_positions = getattr(config, "max_position_embeddings", None)
    if max_positions:
        num_padding = min(_MAX_PADDING, max_positions // 2)

    # The same tokens, once without and once with padding.
    device = next(model.parameters()).device
    ids = torch.tensor([probe_tokens(model, tokenizer, _ROW_TOKENS)], device=device)
    mask = torch.ones_like(ids)
    padding = torch.full((1, num_padding), tokenizer.pad_token_id, device=device)
    padded_ids = torch.cat([padding, ids], dim=1)
    padded_mask = torch.cat([torch.zeros_like(padding), mask], dim=1)

    base_model.keep_frozen(model)  # before the first pass in eval mode
    model.eval()
    with torch.no_grad():
        logprobs = score(model, ids, mask, _COMPLETION_TOKENS)[0].float()
        padded_logprobs = score(model, padded_ids, padded_mask, _COMPLETION_TOKENS)[0].float()
    difference = (logprobs - padded_logprobs).abs().mean().item()
    # Both passes use the same method, so they must agree more closely than two methods.
    if difference <= logprob_tolerance(model) / 2:
        return ""
    cause = f"{num_padding} tokens change logprobs by {difference:.2g} nats"
    return f"TRL counts the padding of {config.model_type} ({cause})"
