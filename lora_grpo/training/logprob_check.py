"""Check before training that the sampler samples from the policy being trained.

Samplers have silently used the base, or the adapter of an earlier step (unsloth#8701). Rewards then change only by
chance, and nothing fails. The check perturbs the adapter, samples completions, and compares the sampler's logprobs with
the trainer's, with and without the perturbation. It then restores the adapter. Each engine has loaded another adapter
and slept before, as between two steps, because engines have also lost the adapter in their sleep (vllm#53888).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.models import base_model
from lora_grpo.sampling import Decoded, Prompts, Sampler, SamplingParams, completion_seed
from lora_grpo.training.trl_compat import sample_rollouts

MOVED = 5
"""Smallest change of the trainer's logprobs that the perturbation must cause, in multiples of `tolerance()`."""
_MAX_MOVED = 0.75
"""Largest change that it may cause, in nats. Implementations differ more if the perturbation breaks the model."""
_EXACT, _ROUNDED = 1e-4, 0.1  # tolerances in float32 and in 16 bits
_PROMPTS, _MAX_TOKENS = 8, 32
_FIRST_NOISE, _TRIALS = 1e-2, 14


def tolerance(trainer: Any = None) -> float:
    """Return the largest mean absolute logprob difference that rounding may cause, in nats per token.

    In float32 the difference is about 1e-6 (docs/results.md), and a single update changes the policy by more than
    the tolerance. In 16 bits, two implementations of the same model differ by about 0.01, and by up to 0.057 if a small
    model writes improbable tokens. A sampler that misses one step may go unnoticed, one that uses the base will not.
    """
    import torch

    is_exact = base_model.compute_dtype() == torch.float32
    if trainer is not None:  # of a script, which may also compute in 16 bits on a CPU
        is_exact &= base_model.is_float32(trainer.model) and trainer.accelerator.mixed_precision == "no"
    return _EXACT if is_exact else _ROUNDED


def check_logprobs(
    trainer: Any, sampler: Sampler, prompts: Prompts, *, is_script: bool = False
) -> dict[str, float] | None:
    """Compare the logprobs of sampler and trainer on the shortest of the rendered prompts.

    Args:
        is_script: whether the model may be any, also one with random weights, which no noise moves by much.

    Returns:
        Mean absolute differences per token, in nats: `difference` between rollouts and trainer with the perturbed
        adapter, its `tolerance` (in 16 bits or if noise moves little, `moved` / 3), and `moved` between the trainer
        with and without the perturbation. `evaluation_difference` is that of a sampler that only evaluates. None if
        the sampler returns no logprobs.

    Raises:
        RunError: the engine uses the base, a stale adapter, or another model, or lost the adapter in its sleep; or
            noise moves the logprobs too little to tell.
    """
    import torch

    prompt_ids = sorted(sampler.encode(prompts), key=len)[:_PROMPTS]
    allowed = tolerance(trainer)
    paths = _paths(trainer, sampler, prompt_ids)

    def score(decoded: Sequence[Decoded]) -> list[list[float]]:
        return trainer_log_probs(trainer, prompt_ids, [ids for ids, _ in decoded], trainer.temperature)

    with torch.random.fork_rng(), _perturbing(trainer.model) as perturb:
        # As in the step before: the engine loads this adapter, samples, and sleeps.
        first, *_ = [sample() for sample in paths.values()]
        if first[0][1] is None:
            return None
        before = score(first)
        moved = _move(perturb, lambda: _difference(before, score(first)), MOVED * allowed)
        is_moved = moved >= MOVED * allowed
        if not is_moved and not is_script:
            raise _not_comparable(moved, MOVED * allowed)
        if not is_moved or allowed == _ROUNDED:
            # Closer to the perturbed adapter than to the one before, which a sampler that misses the change would use.
            # Rounding grows with the noise: to 0.09 nats where SmolLM2-135M moves by 0.54.
            allowed = min(moved, _MAX_MOVED) / 3
        found = {"moved": moved, "tolerance": allowed, "tokens": sum(len(ids) for ids, _ in first)}
        for name, sample in paths.items():
            decoded = sample()
            found[name] = difference = _difference(_logprobs(decoded), score(decoded))
            if difference <= allowed:
                continue
            if not is_moved and difference <= tolerance(trainer):
                raise _not_comparable(moved, MOVED * tolerance(trainer))
            perturb(0)
            is_stale = _difference(_logprobs(decoded), score(decoded)) <= allowed
            served = "as it was before the adapter changed" if is_stale else "other than the one being trained"
            raise _mismatch(served, difference, allowed, name, "" if is_script else _FIX)
    return found


def check_same_logprobs(trainer: Any, sampler: Sampler, prompts: Prompts) -> None:
    """Compare the logprobs of the trainer with those of a sampler that uses the weights of a model without an adapter.

    Raises:
        RunError: the sampler decodes the model in another way than the trainer.
    """
    prompt_ids = sorted(sampler.encode(prompts), key=len)[:_PROMPTS]
    [sample] = _paths(trainer, sampler, prompt_ids).values()
    trainer.model.eval()
    decoded = sample()
    if decoded[0][1] is None:
        return
    logprobs = trainer_log_probs(trainer, prompt_ids, [ids for ids, _ in decoded], trainer.temperature)
    difference = _difference(_logprobs(decoded), logprobs)
    if not difference <= tolerance(trainer):  # also NaN
        raise _mismatch("other than the one being trained", difference, tolerance(trainer), "difference")


def _move(perturb: Callable[[float], None], measure: Callable[[], float], target: float) -> float:
    """Perturb the adapter until `measure` returns between `target` and `_MAX_MOVED`, and return it.

    If it does not, the adapter is left with the noise that moves the logprobs most.
    """
    noise, low, high = _FIRST_NOISE, 0.0, math.inf
    most_moved, most_noise = 0.0, noise
    for left in reversed(range(_TRIALS)):
        perturb(noise)
        moved = measure()
        if target <= moved <= _MAX_MOVED:
            return moved
        if most_moved < moved <= _MAX_MOVED:
            most_moved, most_noise = moved, noise
        # Bisection: with a confident model, twice the noise moved 0.035 and then more than 0.75 nats.
        low, high = (noise, high) if moved < target else (low, noise)
        noise = 2 * low if high == math.inf else high if left == 1 else (low + high) / 2
    if moved >= target:  # the last trial may move more
        return moved
    perturb(most_noise)
    return most_moved


_FIX = (
    "; it must load the same base in the same precision and decode it as TRL does; --sampling.backend transformers "
    "samples without vLLM"
)


def _mismatch(served: str, difference: float, allowed: float, name: str, fix: str = "") -> RunError:
    return RunError(
        f"the sampler serves a policy {served}: its logprobs differ from the trainer's by {difference:.2g} "
        f"nats per token ({name}), expected at most {allowed:.2g}{fix}"
    )


def _not_comparable(moved: float, expected: float) -> RunError:
    return RunError(
        "logprobs of sampler and trainer cannot be compared: noise in the adapter moves them by "
        f"{moved:.2g} nats per token, expected {expected:g} or more; check that the adapter reaches the "
        "model (--lora.targets)"
    )


def _logprobs(decoded: Sequence[Decoded]) -> list[list[float]]:
    return [logprobs or [] for _, logprobs in decoded]


def _paths(trainer: Any, sampler: Sampler, prompts: Prompts) -> dict[str, Callable[[], list[Decoded]]]:
    """Return functions that sample a completion of each prompt, by the name of the difference that they measure."""
    max_tokens = min(_MAX_TOKENS, trainer.max_completion_length)
    params = SamplingParams(1, trainer.temperature, top_p=1.0, max_tokens=max_tokens)
    seeds = [completion_seed(0, "logprob_check", index) for index in range(len(prompts))]

    def sample() -> list[Decoded]:
        return [(each.token_ids, each.logprobs) for [each] in sampler.sample(prompts, params, seeds)]

    if sampler.serves_training or not hasattr(trainer, "vllm_generation"):
        return {"difference": sample}
    # The adapter of a rollout of Unsloth's trainer takes another path to vLLM: tensors instead of a file.
    ids = sampler.encode(prompts)
    return {"difference": lambda: sample_rollouts(trainer, ids, max_tokens), "evaluation_difference": sample}


@contextlib.contextmanager
def _perturbing(model: Any) -> Iterator[Callable[[float], None]]:
    """Yield a function that adds noise of a given standard deviation to the adapter, and restore it on exit."""
    import torch

    model.eval()
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
    """Return the logprobs that the trained model assigns to the tokens of R completions of at least one token."""
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


def _difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    each = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(each) / len(each)
