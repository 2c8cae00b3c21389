"""Samplers: from prompts to completions, by the policy as it is now.

One sampler serves training and evaluation. Against `model.generate` it does three things differently: a prompt is read
once for its whole group, rows that ended leave the batch, and the random numbers depend on the seed that is passed, not
on what ran before, so that a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rollout:
    """One sampled completion."""

    token_ids: list[int]
    """Sampled tokens, the end-of-sequence token included where there was one."""
    text: str
    """The decoded completion, special tokens left out."""
    truncated: bool
    """True when the completion hit its length limit before it ended."""


@dataclass(frozen=True)
class Draw:
    """How one call of `Sampler.rollouts` samples; see there."""

    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


class Sampler:
    """Samples from a causal language model with a key-value cache.

    Args:
        model: a transformers model, or a PEFT model around one.
        tokenizer: its tokenizer.
        eos_token_ids: the tokens that end a completion.
    """

    serves_training = True
    """False where the engine draws training rollouts itself and this sampler serves evaluation alone."""

    def __init__(self, model: Any, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self.model, self.tokenizer, self.eos_token_ids = model, tokenizer, list(eos_token_ids)

    def refresh(self, *, adapter: bool) -> None:
        """Sample from the policy as it is now, or from its base where `adapter` is False."""
        (self.model.enable_adapter_layers if adapter else self.model.disable_adapter_layers)()

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of rendered prompts; plain text gets the special tokens that a chat template writes."""
        plain = not getattr(self.tokenizer, "chat_template", None)
        ids: list[list[int]] = self.tokenizer(list(prompts), add_special_tokens=plain)["input_ids"]
        return ids

    def rollouts(
        self,
        prompts: Sequence[str],
        num_samples: int,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> list[list[Rollout]]:
        """Sample `num_samples` completions of each prompt.

        Args:
            prompts: B rendered prompts.
            num_samples: G completions of each.
            max_tokens: longest completion.
            temperature: softmax temperature; 0 decodes greedily.
            top_p: nucleus probability, 1 keeps the whole distribution.
            seed: fixes every draw, whatever was drawn before.

        Returns:
            B lists of G rollouts.
        """
        import torch

        token_ids = self.encode(prompts)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                drawn = self._decode(token_ids, Draw(num_samples, max_tokens, temperature, top_p, seed))
        finally:
            self.model.train(was_training)
        ends = set(self.eos_token_ids)
        texts = self.tokenizer.batch_decode(drawn, skip_special_tokens=True)
        flat = [
            Rollout(ids, text, truncated=not ids or ids[-1] not in ends) for ids, text in zip(drawn, texts, strict=True)
        ]
        return [flat[start : start + num_samples] for start in range(0, len(flat), num_samples)]

    def _decode(self, prompts: list[list[int]], draw: Draw) -> list[list[int]]:
        """Return the sampled ids of B·G rows. Shapes: B prompts, R = B·G rows, of which r have not ended yet."""
        import torch
        from transformers import DynamicCache

        device = next(self.model.parameters()).device
        longest = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        input_ids = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

        cache = DynamicCache(config=self.model.config)
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_repeat_interleave(draw.num_samples)
        logits = output.logits[:, -1].repeat_interleave(draw.num_samples, dim=0)  # (R, V)
        mask = mask.repeat_interleave(draw.num_samples, dim=0)  # (R, P)
        position = positions[:, -1].repeat_interleave(draw.num_samples) + 1  # (r,)

        generator = torch.Generator(device=device).manual_seed(draw.seed)
        ends = torch.tensor(self.eos_token_ids, device=device)
        rows = torch.arange(len(prompts) * draw.num_samples, device=device)  # (r,) places of the rows still running
        total = rows.numel()
        drawn = torch.full((total, draw.max_tokens), pad, device=device)
        lengths = torch.full((total,), draw.max_tokens, device=device)
        for step in range(draw.max_tokens):
            # One number a row and step, ended rows included: a row's draws do not depend on when others end.
            uniform = torch.rand(total, generator=generator, device=device)[rows]
            token = pick(logits.float(), draw.temperature, draw.top_p, uniform)
            drawn[rows, step] = token
            ended = torch.isin(token, ends)
            lengths[rows[ended]] = step + 1
            if step + 1 == draw.max_tokens or bool(ended.all()):
                break
            if bool(ended.any()):
                running = (~ended).nonzero().squeeze(1)
                rows, token, mask, position = rows[running], token[running], mask[running], position[running]
                cache.batch_select_indices(running)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            output = self.model(
                input_ids=token[:, None],
                attention_mask=mask,
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            logits, position = output.logits[:, -1], position + 1
        return [ids[:length] for ids, length in zip(drawn.tolist(), lengths.tolist(), strict=True)]


def pick(logits: torch.Tensor, temperature: float, top_p: float, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token a row by inverting the cumulative distribution at a given uniform number.

    Args:
        logits: (R, V).
        temperature: 0 takes the most likely token.
        top_p: the smallest set of most likely tokens with at least this probability is kept.
        uniform: (R,) numbers in [0, 1).

    Returns:
        (R,) token ids.
    """
    import torch

    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(dim=-1) - ordered >= top_p
        probabilities = probabilities.masked_fill(outside.gather(-1, order.argsort(dim=-1)), 0.0)
    cumulative = probabilities.double().cumsum(dim=-1)
    threshold = uniform.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
