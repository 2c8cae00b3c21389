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
_EXACT = 1e-4
"""Tolerance in float32, in nats."""
_ROUNDED = 0.1
"""Tolerance in 16 bits, in nats."""
_NUM_PROMPTS = 8
_MAX_TOKENS = 32
_FIRST_NOISE = 1e-2
"""Standard deviation of the first perturbation."""
_NUM_TRIALS = 14
"""Number of perturbations that are tried."""

_FIX = (
    "; it must load the same base in the same precision and decode it as TRL does; --sampling.backend transformers "
    "samples without vLLM"
)


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

    prompt_ids = _shortest(sampler.encode(prompts))
    rounding = tolerance(trainer)
    must_move = MOVED * rounding
    sampling_paths = _sampling_paths(trainer, sampler, prompt_ids)

    with torch.random.fork_rng(), _perturbing(trainer.model) as perturb:
        # As in the step before: the engine loads the adapter as it is, samples, and sleeps.
        completions, *_ = [sample() for sample in sampling_paths.values()]
        if not _has_logprobs(completions):
            return None

        # Perturb the adapter until the trainer's logprobs of these completions have moved.
        unperturbed = _trainer_logprobs(trainer, prompt_ids, completions)
        moved = _perturb_until_moved(
            perturb,
            lambda: _mean_difference(unperturbed, _trainer_logprobs(trainer, prompt_ids, completions)),
            must_move,
        )
        is_moved = moved >= must_move
        if not is_moved and not is_script:
            raise _not_comparable(moved, must_move)

        allowed = rounding
        if not is_moved or rounding == _ROUNDED:
            # Closer to the perturbed adapter than to the one before, which a sampler that misses the change would use.
            # Rounding grows with the noise: to 0.09 nats where SmolLM2-135M moves by 0.54.
            allowed = min(moved, _MAX_MOVED) / 3

        # Sample with the perturbed adapter. Both must compute the same logprobs of what is sampled.
        num_tokens = sum(len(token_ids) for token_ids, _ in completions)
        report = {"moved": moved, "tolerance": allowed, "tokens": num_tokens}
        for name, sample in sampling_paths.items():
            completions = sample()
            sampler_logprobs = _sampler_logprobs(completions)
            difference = _mean_difference(sampler_logprobs, _trainer_logprobs(trainer, prompt_ids, completions))
            report[name] = difference
            if difference <= allowed:
                continue

            # They do not. Tell why: is it the adapter before the perturbation?
            if not is_moved and difference <= rounding:
                raise _not_comparable(moved, must_move)
            perturb(0)
            stale_difference = _mean_difference(sampler_logprobs, _trainer_logprobs(trainer, prompt_ids, completions))
            if stale_difference <= allowed:
                served = "as it was before the adapter changed"
            else:
                served = "other than the one being trained"
            raise _mismatch(served, difference, allowed, name, "" if is_script else _FIX)
    return report


def check_same_logprobs(trainer: Any, sampler: Sampler, prompts: Prompts) -> None:
    """Compare the logprobs of the trainer with those of a sampler that uses the weights of a model without an adapter.

    Raises:
        RunError: the sampler decodes the model in another way than the trainer.
    """
    prompt_ids = _shortest(sampler.encode(prompts))
    [sample] = _sampling_paths(trainer, sampler, prompt_ids).values()
    trainer.model.eval()
    completions = sample()
    if not _has_logprobs(completions):
        return
    trainer_logprobs = _trainer_logprobs(trainer, prompt_ids, completions)
    difference = _mean_difference(_sampler_logprobs(completions), trainer_logprobs)
    allowed = tolerance(trainer)
    if not difference <= allowed:  # also NaN
        raise _mismatch("other than the one being trained", difference, allowed, "difference")


# The perturbation


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


def _perturb_until_moved(perturb: Callable[[float], None], measure: Callable[[], float], target: float) -> float:
    """Perturb the adapter until logprobs move by `target` to `_MAX_MOVED` nats, and return by how much.

    If they never do, the adapter is left with the noise that moves them most without breaking the model.

    Args:
        perturb: adds noise of a given standard deviation to the adapter.
        measure: returns by how much the logprobs have moved.
    """
    # Double the noise until it moves too much, then bisect. With a confident model, twice the noise moved 0.035 and
    # then more than 0.75 nats.
    noise = _FIRST_NOISE
    too_little = 0.0  # largest noise that moved too little
    too_much = math.inf  # smallest noise that moved too much
    best_noise = noise
    best_moved = 0.0
    moved = 0.0
    for trial in range(_NUM_TRIALS):
        perturb(noise)
        moved = measure()
        if target <= moved <= _MAX_MOVED:
            return moved
        if best_moved < moved <= _MAX_MOVED:
            best_noise = noise
            best_moved = moved

        if moved < target:
            too_little = noise
        else:
            too_much = noise
        is_last_trial_next = trial == _NUM_TRIALS - 2
        if too_much == math.inf:
            noise = 2 * too_little
        elif is_last_trial_next:
            noise = too_much
        else:
            noise = (too_little + too_much) / 2

    if moved >= target:  # the last trial may move more
        return moved
    perturb(best_noise)
    return best_moved


# Logprobs of the sampler


def _shortest(prompt_ids: Sequence[list[int]]) -> list[list[int]]:
    return sorted(prompt_ids, key=len)[:_NUM_PROMPTS]


def _sampling_paths(trainer: Any, sampler: Sampler, prompts: Prompts) -> dict[str, Callable[[], list[Decoded]]]:
    """Return functions that sample a completion of each prompt, by the name of the difference that they measure."""
    max_tokens = min(_MAX_TOKENS, trainer.max_completion_length)
    params = SamplingParams(1, trainer.temperature, top_p=1.0, max_tokens=max_tokens)
    seeds = [completion_seed(0, "logprob_check", index) for index in range(len(prompts))]

    def sample() -> list[Decoded]:
        groups = sampler.sample(prompts, params, seeds)
        return [(completion.token_ids, completion.logprobs) for [completion] in groups]

    if sampler.serves_training or not hasattr(trainer, "vllm_generation"):
        return {"difference": sample}
    # The adapter of a rollout of Unsloth's trainer takes another path to vLLM: tensors instead of a file.
    ids = sampler.encode(prompts)
    return {"difference": lambda: sample_rollouts(trainer, ids, max_tokens), "evaluation_difference": sample}


def _has_logprobs(completions: Sequence[Decoded]) -> bool:
    _, logprobs = completions[0]
    return logprobs is not None


def _sampler_logprobs(completions: Sequence[Decoded]) -> list[list[float]]:
    return [logprobs or [] for _, logprobs in completions]


# Logprobs of the trainer


def _trainer_logprobs(
    trainer: Any, prompt_ids: Sequence[list[int]], completions: Sequence[Decoded]
) -> list[list[float]]:
    completion_ids = [token_ids for token_ids, _ in completions]
    return trainer_log_probs(trainer, prompt_ids, completion_ids, trainer.temperature)


def trainer_log_probs(
    trainer: Any, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], temperature: float
) -> list[list[float]]:
    """Return the logprobs that the trained model assigns to the tokens of R completions of at least one token."""
    import torch

    device = next(trainer.model.parameters()).device

    def pad(rows: Sequence[Sequence[int]]) -> torch.Tensor:
        tensors = [torch.tensor(row, device=device) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side="left")

    rows = [prompt + completion for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
    ids = pad(rows)  # (R, T)
    mask = pad([[1] * len(row) for row in rows])
    longest = max(len(completion) for completion in completion_ids)

    # The model reads whole rows. A completion is at the end of its row, and each token is predicted by the one before.
    with torch.no_grad(), trainer.accelerator.autocast():
        outputs = trainer.model(input_ids=ids, attention_mask=mask, logits_to_keep=longest + 1, use_cache=False)
    logits = outputs.logits[:, -longest - 1 : -1]  # (R, longest, V)
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    token_logprobs = logprobs.gather(-1, ids[:, -longest:, None]).squeeze(-1).tolist()  # (R, longest)
    return [row[-len(completion) :] for row, completion in zip(token_logprobs, completion_ids, strict=True)]


def _mean_difference(logprobs: Sequence[Sequence[float]], other_logprobs: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute difference over the tokens of all completions."""
    differences = []
    for row, other_row in zip(logprobs, other_logprobs, strict=True):
        for logprob, other_logprob in zip(row, other_row, strict=True):
            differences.append(abs(logprob - other_logprob))
    return sum(differences) / len(differences)


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
