"""Samplers: from prompts to completions, by the policy as it is now.

One sampler serves training and evaluation. Against `model.generate` it does four things differently: a prompt is read
once for its whole group, rows that ended leave the batch, with `slots` set the next completions take their places, and
the random numbers depend on the seed that is passed, not on what ran before, so that a resumed run draws what an
uninterrupted one would have drawn.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lora_grpo.errors import RunError
from lora_grpo.sampling.decoding_slots import Rows, begin, can_join, to_begin
from lora_grpo.sampling.slot_memory import ran_out_of_memory, rows_that_fit

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
    log_probs: list[float] | None = field(default=None, compare=False)
    """Of each token, in nats, under the distribution it was drawn from: at its temperature, within its nucleus. None
    where the engine was not asked for them, and for greedy decoding."""


@dataclass(frozen=True)
class Draw:
    """How one call of `Sampler.rollouts` samples; see there."""

    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | Sequence[int]


@dataclass(frozen=True)
class Drawn:
    """What `Sampler._decode` returns of R completions."""

    token_ids: list[list[int]]
    """(R, T) with each row as long as its completion."""
    log_probs: list[list[float]] | None = None
    """(R, T), see `Rollout.log_probs`."""


class Sampler:
    """Samples from a causal language model with a key-value cache.

    Args:
        model: a transformers model, or a PEFT model around one.
        tokenizer: its tokenizer.
        eos_token_ids: the tokens that end a completion.
    """

    serves_training = True
    """False where the engine draws training rollouts itself and this sampler serves evaluation alone."""
    is_other_engine = False
    """True where the policy has a second implementation here: TRL corrects for it by importance sampling."""
    streams = False
    """True where `stream` yields a prompt's completions as soon as they have ended."""
    slots: int | None = None
    """Most completions decoded at once; None decodes all of a call together, as a training step does."""

    def __init__(self, model: Any, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self.model, self.tokenizer, self.eos_token_ids = model, tokenizer, list(eos_token_ids)

    def refresh(self, *, adapter: bool) -> None:
        """Sample from the policy as it is now, or from its base where `adapter` is False."""
        (self.model.enable_adapter_layers if adapter else self.model.disable_adapter_layers)()

    def sleep(self) -> None:
        """Lend memory that only sampling needs to training; `refresh` takes it back."""

    def close(self) -> None:
        """Free what the sampler holds; nothing can be drawn after it."""
        self.model = None

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of rendered prompts; plain text gets the special tokens that a chat template writes."""
        plain = not getattr(self.tokenizer, "chat_template", None)
        ids: list[list[int]] = self.tokenizer(list(prompts), add_special_tokens=plain)["input_ids"]
        return ids

    def find_batch_size(self, longest_prompt: int, max_tokens: int) -> int:
        """Set `slots` to what the memory that is there holds, and return it; see `rows_that_fit`.

        Args:
            longest_prompt: tokens.
            max_tokens: longest completion, in tokens.
        """
        self.slots = rows_that_fit(self.model, longest_prompt, max_tokens)
        return self.slots

    def stream(
        self,
        prompts: Sequence[str],
        num_samples: int,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Sequence[int],
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """Yield (place of the prompt, its G rollouts) for each prompt; arguments and errors are those of `rollouts`."""
        yield from enumerate(
            self.rollouts(prompts, num_samples, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        )

    def rollouts(
        self,
        prompts: Sequence[str],
        num_samples: int,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Sequence[int],
    ) -> list[list[Rollout]]:
        """Sample `num_samples` completions of each prompt.

        Where memory runs out and `slots` is set, it is halved and the call begins anew.

        Args:
            prompts: B rendered prompts.
            num_samples: G completions of each.
            max_tokens: longest completion.
            temperature: softmax temperature; 0 decodes greedily.
            top_p: nucleus probability, 1 keeps the whole distribution.
            seed: fixes every draw, whatever was drawn before; or B·G seeds, of which each fixes the draws of one
                completion, whatever else is in the call.

        Returns:
            B lists of G rollouts.

        Raises:
            RunError: memory did not suffice for one completion at a time.
        """
        total = len(prompts) * num_samples
        if not isinstance(seed, int) and len(seed) != total:
            raise ValueError(f"{len(seed)} seeds for {total} completions; pass one each")
        drawn = self._decode_in_memory(self.encode(prompts), Draw(num_samples, max_tokens, temperature, top_p, seed))
        flat = self._read(drawn)
        return [flat[start : start + num_samples] for start in range(0, len(flat), num_samples)]

    def _read(self, drawn: Drawn) -> list[Rollout]:
        """Return sampled ids as rollouts."""
        ends = set(self.eos_token_ids)
        texts = self.tokenizer.batch_decode(drawn.token_ids, skip_special_tokens=True)
        log_probs: Sequence[list[float] | None] = drawn.log_probs or [None] * len(texts)
        return [
            Rollout(ids, text, truncated=not ids or ids[-1] not in ends, log_probs=each)
            for ids, text, each in zip(drawn.token_ids, texts, log_probs, strict=True)
        ]

    def _decode_in_memory(self, prompts: list[list[int]], draw: Draw) -> Drawn:
        """Decode, and where memory runs out, anew with half the slots."""
        import torch

        was_training = self.model.training
        self.model.eval()
        try:
            while True:
                try:
                    with torch.no_grad():
                        return self._decode(prompts, draw)
                except RuntimeError as error:
                    if self.slots is None or not ran_out_of_memory(error):
                        raise
                    at_once = min(self.slots, len(prompts) * draw.num_samples)
                    if at_once == 1:
                        raise RunError(
                            "memory did not suffice for one completion at a time; pass a smaller "
                            f"--max-completion-tokens or --bits 4 ({' '.join(str(error).split())})"
                        ) from error
                # Only here, where the error and the frames that it held are gone, is the batch itself free.
                gc.collect()
                torch.cuda.empty_cache()
                self.slots = at_once // 2
                print(
                    f"memory did not suffice for {at_once} completions at once; going on with {self.slots}",
                    file=sys.stderr,
                )
        finally:
            self.model.train(was_training)

    def _decode(self, prompts: list[list[int]], draw: Draw) -> Drawn:
        """Draw R = B·G completions, `slots` of them decoded at once."""
        import torch

        device = next(self.model.parameters()).device
        pad = self.tokenizer.pad_token_id
        total = len(prompts) * draw.num_samples
        slots = min(self.slots or total, total)
        joining = self.slots is not None and can_join(self.model.config)
        uniform = uniform_numbers(draw, total, device)
        ends = torch.tensor(self.eos_token_ids, device=device)
        drawn = torch.full((total, draw.max_tokens), pad, device=device)
        log_probs = torch.zeros((total, draw.max_tokens), device=device)
        lengths = torch.full((total,), draw.max_tokens, device=device)
        begun = 0
        rows: Rows | None = None
        while rows or begun < total:
            while new := to_begin(slots, running=len(rows or ()), waiting=total - begun, joining=joining):
                more = begin(self.model, pad, prompts, range(begun, begun + new), draw.num_samples)
                rows, begun = rows.joined(more) if rows else more, begun + new
            assert rows  # where none ran, some began
            tokens, each = pick(rows.logits.float(), draw.temperature, draw.top_p, uniform[rows.places, rows.steps])
            drawn[rows.places, rows.steps] = tokens
            log_probs[rows.places, rows.steps] = each
            rows.steps = rows.steps + 1
            ended = torch.isin(tokens, ends) | (rows.steps == draw.max_tokens)
            lengths[rows.places[ended]] = rows.steps[ended]
            rows.go_on(self.model, tokens, (~ended).nonzero().squeeze(1))
            if joining:
                rows.trim()
        ids, each_log_probs = (
            [row[:length] for row, length in zip(table.tolist(), lengths.tolist(), strict=True)]
            for table in (drawn, log_probs)
        )
        return Drawn(ids, each_log_probs if draw.temperature else None)


def completion_seed(seed: int, drawn_for: str, number: str | int) -> int:
    """Return the seed of one completion's random numbers, below 2**31.

    Args:
        seed: the run's.
        drawn_for: a held-out row's id, or a training step.
        number: of the completion among those drawn for it.
    """
    digest = hashlib.sha256(json.dumps([seed, drawn_for, number]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def uniform_numbers(draw: Draw, total: int, device: Any) -> torch.Tensor:
    """Return (R, max_tokens) numbers in [0, 1), one a completion and step: nothing depends on when others end."""
    import torch

    if isinstance(draw.seed, int):
        one = torch.Generator(device=device).manual_seed(draw.seed)
        return torch.stack([torch.rand(total, generator=one, device=device) for _ in range(draw.max_tokens)], dim=1)
    each = [torch.Generator().manual_seed(seed) for seed in draw.seed]
    return torch.stack([torch.rand(draw.max_tokens, generator=own) for own in each]).to(device)


def pick(
    logits: torch.Tensor, temperature: float, top_p: float, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at a given uniform number.

    Args:
        logits: (R, V).
        temperature: 0 takes the most likely token.
        top_p: the smallest set of most likely tokens with at least this probability is kept.
        uniform: (R,) numbers in [0, 1).

    Returns:
        (R,) token ids, and (R,) the logarithm of the probability that each had.
    """
    import torch

    if temperature == 0:
        return logits.argmax(dim=-1), logits.new_zeros(len(logits))
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(dim=-1) - ordered >= top_p
        probabilities = probabilities.masked_fill(outside.gather(-1, order.argsort(dim=-1)), 0.0)
    cumulative = probabilities.double().cumsum(dim=-1)
    threshold = uniform.double()[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), (probabilities.gather(-1, tokens) / cumulative[:, -1:]).log().float().squeeze(1)
