"""How the next token is drawn: the seed of a completion, its random numbers, and the token that each selects.

A completion has its own seed, and its seed gives one random number for each of its tokens. So its tokens depend neither
on the other completions of a batch nor on when they are sampled, and a resumed run samples the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_BLOCK = 256
"""Number of tokens that `select_tokens` sums at once."""


def completion_seed(seed: int, name: str, number: str | int) -> int:
    """Return the seed of one completion of a row or a training step, below 2**31."""
    digest = hashlib.sha256(json.dumps([seed, name, number]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def uniform_numbers(seeds: Sequence[int], max_tokens: int, device: Any) -> torch.Tensor:
    """Return (R, max_tokens) uniform random numbers in [0, 1), one for each completion and token."""
    import torch

    # The CPU's generators serve the GPU, too, whose own would draw other numbers.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(max_tokens, generator=generator) for generator in generators]).to(device)


def select_tokens(
    logits: torch.Tensor, temperature: float, top_p: float, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row with inverse transform sampling.

    Args:
        logits: (R, V) in float32.
        temperature: 0 selects the most likely token.
        top_p: nucleus probability; 1 disables nucleus sampling.
        uniform: (R,) random numbers in [0, 1).

    Returns:
        (R,) token ids and their (R,) logprobs in nats; zeros for greedy decoding.
    """
    import torch
    from torch.nn.functional import pad

    if temperature == 0:
        return logits.argmax(dim=-1), logits.new_zeros(len(logits))
    vocab_size = logits.shape[-1]
    probabilities = torch.softmax(logits / temperature, dim=-1)  # (R, V)

    # The nucleus: the most likely tokens, up to the one at which their sum reaches top_p.
    if top_p < 1:
        sorted_probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
        sum_before = sorted_probabilities.cumsum(dim=-1) - sorted_probabilities
        is_outside = (sum_before >= top_p).gather(-1, order.argsort(dim=-1))  # in the order of the vocabulary
        probabilities = probabilities.masked_fill(is_outside, 0.0)

    # Token v is selected where cumulative[v - 1] <= threshold < cumulative[v]. In float64, because the float32 sum over
    # a vocabulary rounds away unlikely tokens. First find the block of B tokens, then the token in it: only this block
    # needs the sum at every token.
    blocks = pad(probabilities, (0, -vocab_size % _BLOCK)).unflatten(-1, (-1, _BLOCK))  # (R, V / B, B)
    cumulative = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # (R, V / B)
    total = cumulative[:, -1:]  # (R, 1), the probability of the nucleus
    threshold = uniform.double()[:, None] * total
    selected_block = torch.searchsorted(cumulative, threshold, right=True).clamp(max=cumulative.shape[-1] - 1)
    sum_before_block = pad(cumulative, (1, 0)).gather(-1, selected_block)  # (R, 1)
    block = blocks.gather(1, selected_block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)  # (R, B)
    cumulative_in_block = sum_before_block + block.double().cumsum(dim=-1)
    place_in_block = torch.searchsorted(cumulative_in_block, threshold, right=True)  # (R, 1)
    # The two sums over the block are rounded differently. A threshold between them selects the last possible token.
    last_place = torch.searchsorted(cumulative_in_block, cumulative_in_block[:, -1:].contiguous())
    tokens = selected_block * _BLOCK + torch.minimum(place_in_block, last_place)
    logprobs = (probabilities.gather(-1, tokens) / total).log().float()
    return tokens.squeeze(1), logprobs.squeeze(1)
