"""A check before training that the sampler samples from the policy being trained.

Samplers have silently served the base, or the adapter of an earlier step (unsloth#8701): rewards then move by luck and
nothing fails. So the adapter is perturbed, completions are sampled, and the sampler's logprobs are compared with the
trainer's, with and without the perturbation. Then the adapter is restored.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_grpo.errors import RunError
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed

if TYPE_CHECKING:
    import torch

MOVED = 5
"""The perturbation changes the trainer's logprobs by at least this many tolerances."""
_MAX_MOVED = 0.75
"""And by at most this many nats: implementations differ more on a model that is ruined."""
_PROMPTS, _MAX_TOKENS = 8, 32
_FIRST_NOISE, _TRIALS = 1e-2, 14


@dataclass(frozen=True)
class LogprobCheck:
    """Means over tokens of absolute differences of logprobs, in nats."""

    difference: float
    """Sampler against trainer, both with the perturbed adapter."""
    moved: float
    """Trainer with the perturbed adapter against trainer without."""
    tolerance: float
    """Largest accepted `difference`."""
    tokens: int
    """Number of tokens compared."""


def tolerance(dtype: torch.dtype) -> float:
    """Return the mean absolute difference, in nats per token, that rounding may cause between sampler and trainer.

    In float32 it is about 1e-6 (docs/benchmarks.md), and a single update moves the policy by more than the tolerance.
    In 16 bits two implementations of one model differ by about 0.01: a missed step may go unnoticed, the base served in
    place of the policy will not.
    """
    import torch

    return 1e-4 if dtype == torch.float32 else 0.05


def check_logprobs(
    trainer: Any, sampler: Sampler, prompts: Sequence[str], dtype: torch.dtype, temperature: float, max_tokens: int
) -> LogprobCheck | None:
    """Compare the logprobs of sampler and trainer.

    Args:
        trainer: TRL's; its adapter is restored bit for bit.
        sampler: generates the rollouts.
        prompts: rendered; the shortest few are used.
        dtype: of activations.
        temperature: softmax temperature, above 0.
        max_tokens: longest completion of the run; the check uses at most 32.

    Returns:
        The measurements; None for a sampler without logprobs, which is the trained model's own `generate`.

    Raises:
        RunError: the sampler serves the base, a stale adapter, or another model.
    """
    import torch

    prompts = sorted(prompts, key=len)[:_PROMPTS]
    prompt_ids, allowed = sampler.encode(prompts), tolerance(dtype)
    params = SamplingParams(1, temperature, top_p=1.0, max_tokens=min(_MAX_TOKENS, max_tokens))
    seeds = [completion_seed(0, "logprob_check", index) for index in range(len(prompts))]
    with torch.random.fork_rng(), _evaluating(trainer.model), _perturbing(trainer.model) as perturb:
        too_little, too_much, noise = 0.0, math.inf, _FIRST_NOISE
        for _ in range(_TRIALS):
            perturb(noise)
            groups = sampler.sample(prompts, params, seeds)
            sampled = [each.logprobs for [each] in groups if each.logprobs is not None]
            if not sampled:
                return None
            completions = [each.token_ids for [each] in groups]
            after = trainer_log_probs(trainer, prompt_ids, completions, temperature)
            perturb(0)
            before = trainer_log_probs(trainer, prompt_ids, completions, temperature)
            moved = _difference(before, after)
            if MOVED * allowed <= moved <= _MAX_MOVED:
                break
            too_little, too_much = (noise, too_much) if moved < MOVED * allowed else (too_little, noise)
            noise = (too_little + too_much) / 2 if too_much < math.inf else 2 * noise
    if moved < MOVED * allowed:
        raise RunError(
            "logprobs of sampler and trainer cannot be compared: noise in the adapter moves them by "
            f"{moved:.2g} nats per token, expected {MOVED * allowed:g} or more; check that the adapter reaches the "
            "model (--lora.targets)"
        )
    found = LogprobCheck(_difference(sampled, after), moved, allowed, sum(map(len, completions)))
    if found.difference > allowed:
        is_stale = _difference(sampled, before) <= allowed
        served = "as it was before the adapter changed" if is_stale else "other than the one being trained"
        fix = (
            "a server must hold the same base in the same precision; --sampling.backend transformers needs no server"
            if sampler.is_other_engine
            else "the kit's sampler does not decode this architecture as TRL reads it (absolute positions?)"
        )
        raise RunError(
            f"the sampler serves a policy {served}: its logprobs differ from the trainer's by {found.difference:.2g} "
            f"nats per token, expected at most {allowed:g}; {fix}"
        )
    return found


@contextlib.contextmanager
def _perturbing(model: Any) -> Iterator[Callable[[float], None]]:
    """Yield a function that adds noise of a standard deviation to the original adapter; restore it at the end."""
    import torch

    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    original = [parameter.detach().clone() for parameter in adapter]

    def perturb(deviation: float) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter, value in zip(adapter, original, strict=True):
                parameter.copy_(value)
                if deviation:
                    noise = torch.randn(value.shape, generator=generator) * deviation
                    parameter.add_(noise.to(value.device, value.dtype))

    try:
        yield perturb
    finally:
        perturb(0)


def trainer_log_probs(
    trainer: Any, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], temperature: float
) -> list[list[float]]:
    """Return the logprobs that the trained model assigns to the tokens of completions.

    Args:
        trainer: TRL's.
        prompt_ids: R prompts.
        completion_ids: R completions, one token or more each.
        temperature: softmax temperature.

    Returns:
        R lists, each as long as its completion.
    """
    import torch

    device = next(trainer.model.parameters()).device

    def pad(rows: list[list[int]]) -> torch.Tensor:
        tensors = [torch.tensor(row, device=device) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side="left")

    rows = [prompt + completion for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
    ids, mask, keep = pad(rows), pad([[1] * len(row) for row in rows]), max(map(len, completion_ids))
    with torch.no_grad(), trainer.accelerator.autocast():
        logits = trainer.model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1, use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, -keep - 1 : -1].float() / temperature, dim=-1)
    chosen = logprobs.gather(-1, ids[:, -keep:, None]).squeeze(-1).tolist()
    return [row[-len(completion) :] for row, completion in zip(chosen, completion_ids, strict=True)]


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute difference over all tokens."""
    each = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(each) / len(each)
