"""Is what is sampled what is trained? Checked at the start, with an adapter that is changed on purpose.

Samplers have served the base in silence, or the adapter of an earlier step (unsloth#8701): rewards then move by luck,
and nothing fails. So before a run begins the adapter is disturbed, completions are drawn, and the sampler's
log-probabilities of them are held against the trainer's own, with the disturbed adapter and without it. Then the
adapter is put back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lora_grpo.errors import RunError
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed

if TYPE_CHECKING:
    import torch

MOVED = 5
"""The disturbance moves the trainer's log-probabilities by at least so many times the tolerance."""
_MOST_MOVED = 0.75
"""And by no more nats than this: two implementations of a model that is wrecked differ more than those of a policy."""
_PROMPTS, _MAX_TOKENS = 8, 32
_FIRST_NOISE, _TRIALS = 1e-2, 14


@dataclass(frozen=True)
class LogprobCheck:
    """What the check measured: means over tokens of absolute differences of log-probabilities, in nats."""

    difference: float
    """Sampler against trainer, both with the disturbed adapter."""
    moved: float
    """Trainer with the disturbed adapter against trainer without."""
    tolerance: float
    """What `difference` may be."""
    tokens: int
    """Compared."""

    def record(self) -> dict[str, Any]:
        """Return it as run.json has it."""
        return asdict(self)


def tolerance(dtype: torch.dtype) -> float:
    """Return the mean absolute difference, in nats a token, that rounding may make between sampler and trainer.

    In float32 it is about 1e-6 (docs/benchmarks.md), and one step's update moves the policy by more than this allows.
    In 16 bits two implementations of one model differ by about 0.01: there one step that was missed may go unseen, the
    base served in place of the policy will not.
    """
    import torch

    return 1e-4 if dtype == torch.float32 else 0.05


def check_logprobs(
    trainer: Any, sampler: Sampler, prompts: Sequence[str], dtype: torch.dtype, temperature: float, max_tokens: int
) -> LogprobCheck | None:
    """See that the sampler draws from the trainer's policy, whatever the adapter is now.

    Args:
        trainer: TRL's; its adapter is bit for bit the same afterwards.
        sampler: what draws the rollouts.
        prompts: rendered; the shortest few are asked.
        dtype: the activations'.
        temperature: of the draws, whose log-probabilities are compared; above 0.
        max_tokens: longest completion of the run; the check's own are shorter still.

    Returns:
        What was measured; None for a sampler that returns no log-probabilities, which is the trained model's own
        `generate`.

    Raises:
        RunError: it serves the base, a stale adapter, or another model.
    """
    import torch

    asked = sorted(prompts, key=len)[:_PROMPTS]
    prompt_ids = sampler.encode(asked)
    allowed = tolerance(dtype)
    with torch.random.fork_rng(), _evaluating(trainer.model), _disturbing(trainer.model) as disturb:
        too_little, too_much, noise = 0.0, math.inf, _FIRST_NOISE
        for _ in range(_TRIALS):
            disturb(noise)
            params = SamplingParams(1, temperature, top_p=1.0, max_tokens=min(_MAX_TOKENS, max_tokens))
            seeds = [completion_seed(0, "logprob_check", index) for index in range(len(asked))]
            groups = sampler.sample(asked, params, seeds)
            sampled = [each.logprobs for [each] in groups if each.logprobs is not None]
            if not sampled:
                return None
            completions = [each.token_ids for [each] in groups]
            after = trainer_log_probs(trainer, prompt_ids, completions, temperature)
            disturb(0)
            before = trainer_log_probs(trainer, prompt_ids, completions, temperature)
            moved = _difference(before, after)
            if MOVED * allowed <= moved <= _MOST_MOVED:
                break
            too_little, too_much = (noise, too_much) if moved < MOVED * allowed else (too_little, noise)
            noise = (too_little + too_much) / 2 if too_much < math.inf else 2 * noise
        if moved < MOVED * allowed:
            raise RunError(
                "sampler and trainer cannot be compared: noise in the adapter moves the log-probabilities by "
                f"{moved:.2g} nats a token, expected {MOVED * allowed:g} or more; does the adapter reach the model "
                "(--lora.targets)?"
            )
    found = LogprobCheck(_difference(sampled, after), moved, allowed, sum(map(len, completions)))
    if found.difference > allowed:
        if _difference(sampled, before) <= allowed:
            what = "the policy as it was before the adapter changed"
        else:
            what = "another policy than the one that is trained"
        raise RunError(
            f"the sampler serves {what}: its log-probabilities differ by {found.difference:.2g} nats a token from the "
            f"trainer's, expected at most {allowed:g}; "
            + (
                "a server must hold the same base in the same bits; --sampling.backend transformers needs no second one"
                if sampler.is_other_engine
                else "the kit's sampler does not decode this architecture as TRL reads it (absolute positions?)"
            )
        )
    return found


@contextlib.contextmanager
def _disturbing(model: Any) -> Iterator[Callable[[float], None]]:
    """Give a function that adds noise of a standard deviation to the adapter as it was; put it back at the end."""
    import torch

    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in adapter]

    def disturb(deviation: float) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter, was in zip(adapter, kept, strict=True):
                parameter.copy_(was)
                if deviation:
                    noise = torch.randn(was.shape, generator=generator) * deviation
                    parameter.add_(noise.to(was.device, was.dtype))

    try:
        yield disturb
    finally:
        disturb(0)


def trainer_log_probs(
    trainer: Any, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], temperature: float
) -> list[list[float]]:
    """Return the log-probability that the trained model gives each token of each completion.

    Args:
        trainer: TRL's.
        prompt_ids: R prompts.
        completion_ids: R completions, one token or more each.
        temperature: softmax temperature.

    Returns:
        R lists, each as long as its completion.
    """
    import torch

    model = trainer.model
    device = next(model.parameters()).device
    longest = max(len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True))
    rows = [[0] * (longest - len(p) - len(c)) + p + c for p, c in zip(prompt_ids, completion_ids, strict=True)]
    masks = [
        [0] * (longest - len(p) - len(c)) + [1] * (len(p) + len(c))
        for p, c in zip(prompt_ids, completion_ids, strict=True)
    ]
    keep = max(map(len, completion_ids))
    with torch.no_grad(), trainer.accelerator.autocast():
        logits = model(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(masks, device=device),
            logits_to_keep=keep + 1,
            use_cache=False,
        ).logits
    found = torch.log_softmax(logits[:, -keep - 1 : -1].float() / temperature, dim=-1)
    targets = torch.tensor([row[-keep:] for row in rows], device=device)
    each = found.gather(-1, targets[..., None]).squeeze(-1).tolist()
    return [row[-len(ids) :] for row, ids in zip(each, completion_ids, strict=True)]


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
