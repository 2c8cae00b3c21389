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

_OTHER_POLICY = "other than the one being trained"
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
        is_script: whether a script built the trainer. The model of a script may have random weights, so that even large
            noise in the adapter moves its logprobs little. In a recipe, this is an error. In a script, the comparison
            goes on with a smaller tolerance.

    Returns:
        None if the sampler returns no logprobs. Otherwise these values; all but `tokens` are mean absolute differences
        of logprobs, in nats per token:

        - `difference`: between rollouts and trainer, with the perturbed adapter.
        - `evaluation_difference`: the same of a sampler that only evaluates, if rollouts are sampled in another way.
        - `tolerance`: the largest difference that is accepted; see `_largest_difference`.
        - `moved`: between the trainer with and without the perturbation.
        - `tokens`: number of tokens that were sampled before the perturbation, from which `moved` is computed.

    Raises:
        RunError: the engine uses the base, a stale adapter, or another model, or lost the adapter in its sleep; or
            noise moves the logprobs too little to tell.
    """
    import torch

    prompt_ids = _shortest(sampler.encode(prompts))
    rounding = tolerance(trainer)
    least_movement = MOVED * rounding
    sampling_paths = _sampling_paths(trainer, sampler, prompt_ids)

    with torch.random.fork_rng(), _perturbing(trainer.model) as perturb:
        # As in the step before: each engine loads the adapter as it is, samples, and sleeps.
        samples_before = [sample() for sample in sampling_paths.values()]
        completions_before = samples_before[0]
        if not _has_logprobs(completions_before):
            return None

        # Perturb the adapter until the trainer's logprobs of these completions have moved.
        unperturbed = _trainer_logprobs(trainer, prompt_ids, completions_before)

        def measure_movement() -> float:
            return _mean_difference(unperturbed, _trainer_logprobs(trainer, prompt_ids, completions_before))

        movement = _perturb_until_moved(perturb, measure_movement, least_movement)
        has_moved = movement >= least_movement
        if not has_moved and not is_script:
            raise _not_comparable(movement, least_movement)
        largest_difference = _largest_difference(movement, rounding, has_moved=has_moved)

        # Sample with the perturbed adapter. Sampler and trainer must compute the same logprobs of these tokens.
        num_tokens = sum(len(completion.token_ids) for completion in completions_before)
        report = {"moved": movement, "tolerance": largest_difference, "tokens": num_tokens}
        for name, sample in sampling_paths.items():
            completions = sample()
            sampler_logprobs = _sampler_logprobs(completions)
            trainer_logprobs = _trainer_logprobs(trainer, prompt_ids, completions)
            difference = _mean_difference(sampler_logprobs, trainer_logprobs)
            report[name] = difference
            if difference <= largest_difference:
                continue
            # After too little movement, the accepted difference can be smaller than rounding. A difference between the
            # two is either rounding, or a sampler that misses the change.
            if not has_moved and difference <= rounding:
                raise _not_comparable(movement, least_movement)

            # They differ. Does the sampler use the adapter as it was before the perturbation?
            perturb(0)
            unperturbed_logprobs = _trainer_logprobs(trainer, prompt_ids, completions)
            if _mean_difference(sampler_logprobs, unperturbed_logprobs) <= largest_difference:
                which_policy = "as it was before the adapter changed"
            else:
                which_policy = _OTHER_POLICY
            fix = "" if is_script else _FIX
            raise _mismatch(which_policy, difference, largest_difference, name, fix)
    return report


def _largest_difference(movement: float, rounding: float, *, has_moved: bool) -> float:
    """Return the largest accepted difference between sampler and trainer, in nats per token.

    Args:
        movement: how far the perturbation has moved the trainer's logprobs.
        rounding: the result of `tolerance`.
        has_moved: whether `movement` is at least `MOVED` times `rounding`.
    """
    if has_moved and rounding == _EXACT:
        return rounding
    # A sampler that misses the change differs by about `movement`. A third of that tells the two apart where a fixed
    # tolerance does not: in 16 bits, rounding grows with the noise, to 0.09 nats where SmolLM2-135M moves by 0.54.
    return min(movement, _MAX_MOVED) / 3


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
    rounding = tolerance(trainer)
    if not difference <= rounding:  # also NaN
        raise _mismatch(_OTHER_POLICY, difference, rounding, "difference")


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

    If no trial moves them so, the last one takes the smallest noise that moved them by more. If all noise moves them by
    less, or makes them NaN, the adapter is left with the noise that moved them most.

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
            too_much = noise  # also if `moved` is NaN
        trials_left = _NUM_TRIALS - 1 - trial
        if too_much == math.inf:
            noise = 2 * too_little
        elif trials_left == 1:  # no trial between the two moved the logprobs by the right amount
            noise = too_much
        else:
            noise = (too_little + too_much) / 2

    if moved >= target:  # in the last trial, by more than _MAX_MOVED
        return moved
    perturb(best_noise)
    return best_moved


# Logprobs of the sampler


def _shortest(prompt_ids: Sequence[list[int]]) -> list[list[int]]:
    return sorted(prompt_ids, key=len)[:_NUM_PROMPTS]


def _sampling_paths(trainer: Any, sampler: Sampler, prompts: Prompts) -> dict[str, Callable[[], list[Decoded]]]:
    """Return functions that sample a completion of each prompt, by the name of their difference in the report.

    The first function samples as rollouts are sampled.
    """
    max_tokens = min(_MAX_TOKENS, trainer.max_completion_length)
    params = SamplingParams(1, trainer.temperature, top_p=1.0, max_tokens=max_tokens)
    seeds = [completion_seed(0, "logprob_check", index) for index in range(len(prompts))]

    def sample() -> list[Decoded]:
        groups = sampler.sample(prompts, params, seeds)
        return [Decoded(completion.token_ids, completion.logprobs) for [completion] in groups]

    if sampler.serves_training or not hasattr(trainer, "vllm_generation"):
        return {"difference": sample}
    # The adapter of a rollout of Unsloth's trainer takes another path to vLLM: tensors instead of a file.
    ids = sampler.encode(prompts)
    return {"difference": lambda: sample_rollouts(trainer, ids, max_tokens), "evaluation_difference": sample}


def _has_logprobs(completions: Sequence[Decoded]) -> bool:
    return completions[0].logprobs is not None


def _sampler_logprobs(completions: Sequence[Decoded]) -> list[list[float]]:
    return [completion.logprobs or [] for completion in completions]


# Logprobs of the trainer


def _trainer_logprobs(
    trainer: Any, prompt_ids: Sequence[list[int]], completions: Sequence[Decoded]
) -> list[list[float]]:
    completion_ids = [completion.token_ids for completion in completions]
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


def _mismatch(which_policy: str, difference: float, expected: float, name: str, fix: str = "") -> RunError:
    return RunError(
        f"the sampler serves a policy {which_policy}: its logprobs differ from the trainer's by {difference:.2g} "
        f"nats per token ({name}), expected at most {expected:.2g}{fix}"
    )


def _not_comparable(movement: float, expected: float) -> RunError:
    return RunError(
        "logprobs of sampler and trainer cannot be compared: noise in the adapter moves them by "
        f"{movement:.2g} nats per token, expected {expected:g} or more; check that the adapter reaches the "
        "model (--lora.targets)"
    )
