"""Measure what TRL's importance sampling correction does to the gradient, by mode and size of the logprob noise.

With vLLM, TRL weights tokens or completions by the ratio of the trainer's probability to the sampler's, and masks or
truncates weights above 3. The first table shows the noise of bfloat16: completions sampled from the bundled model in
bfloat16 and scored in float32. The second simulates completions of up to 2000 tokens with three kinds of noise, whose
size is the mean absolute logprob difference in nats per token:

- `rounding`: every logit has its own noise, and tokens are sampled from the noisy policy;
- `other weights`: the logits after a token have the same noise each time, and tokens are sampled from that policy;
- `offset`: tokens are sampled from the exact policy, and all logprobs of a completion are off by the same number.

    python tools/measure_importance_sampling.py

The simulated policy is a table of the logits of 16 tokens after each token. A completion's reward is 1 if more than
the usual number of its tokens is in a fixed set. Steps have 8 groups of 8 completions, and the loss is `dapo`.

Columns of the second table: tokens and completions masked or truncated; `length`, of the mean gradient along the exact
one, 1 if unbiased; `cosine` between these two; and `completions needed`, compared with a sampler without noise, for the
same signal-to-noise ratio of a step's gradient. `none` trains without a correction.
"""

import argparse
import itertools
from dataclasses import dataclass

import torch  # noqa: TID253

from lora_grpo import starter
from lora_grpo.training import is_masked

LIMIT = 3.0
MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SIZES, LENGTHS = (0.005, 0.012, 0.05), (50, 200, 800, 2000)
KINDS = ("rounding", "other weights", "offset")
BFLOAT16_LENGTHS, PROMPT = (48, 200), 16
VOCABULARY, GROUP, STEP = 16, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=4096, help=f"simulated completions, a multiple of {STEP}")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a completion")
    arguments = parser.parse_args()
    if arguments.completions < 2 * STEP or arguments.completions % STEP:
        parser.error(f"--completions must be a multiple of {STEP}, at least {2 * STEP}")
    print(bfloat16_table())
    print(simulated_table(arguments.completions, sorted(arguments.lengths)))


def weights(difference: torch.Tensor, mask: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token, and whether it is masked or truncated."""
    if mode == "none":
        return torch.ones_like(difference), torch.zeros_like(mask)
    masked = is_masked(difference, mask, mode, None, LIMIT)
    difference = difference * mask
    ratio = (difference.sum(1, keepdim=True) if mode.startswith("sequence") else difference).exp().expand_as(mask)
    return ratio.masked_fill(masked, 0.0 if mode.endswith("mask") else LIMIT), masked


# Bfloat16


def bfloat16_table() -> str:
    """Sample from the bundled model in bfloat16, and return the noise and what each mode masks as a Markdown table."""
    lines = ["| tokens | nats per token | sum over the completion, nats | mode | tokens masked | completions masked |"]
    lines.append("|---:|---:|---:|---|---:|---:|")
    sampled = {tokens: bfloat16_differences(tokens) for tokens in BFLOAT16_LENGTHS}
    for (tokens, difference), mode in itertools.product(sampled.items(), MODES[1:]):
        _, masked = weights(difference, torch.ones_like(difference, dtype=torch.bool), mode)
        total = difference.sum(1)
        cells = [tokens, f"{difference.abs().mean():.4f}", f"{total.mean():+.3f} ± {total.std():.3f}", mode]
        cells += [f"{masked.float().mean():.2%}", f"{masked.any(1).float().mean():.1%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def bfloat16_differences(tokens: int, completions: int = 256) -> torch.Tensor:
    """Return logprobs in float32 minus those in bfloat16, shape (completions, tokens).

    The prompts are random tokens. No completion ends before its last token, so all have the same length.
    """
    from transformers import AutoModelForCausalLM

    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(starter.model_path(), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    torch.manual_seed(0)
    ids, cache, sampled = torch.randint(10, exact.config.vocab_size, (completions, PROMPT)), None, []
    end = exact.generation_config.eos_token_id
    with torch.no_grad():
        for _ in range(tokens):
            output = rounded(ids[:, -1:] if cache else ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits = output.logits[:, -1].float()
            logits[:, end] = -torch.inf
            logprobs = torch.log_softmax(logits, -1)
            token = torch.multinomial(logprobs.exp(), 1)
            sampled.append(logprobs.gather(1, token))
            ids = torch.cat([ids, token], 1)
        logits = exact(ids).logits[:, PROMPT - 1 : -1]
        logits[..., end] = -torch.inf
        scored = torch.log_softmax(logits, -1).gather(2, ids[:, PROMPT:, None]).squeeze(2)
    return scored - torch.cat(sampled, 1)


# Simulation


@dataclass
class Rollouts:
    pairs: torch.Tensor
    """Token before times VOCABULARY plus token, shape (completions, tokens)."""
    difference: torch.Tensor
    """Logprobs of the exact policy minus those of the sampler."""


def simulated_table(completions: int, lengths: list[int]) -> str:
    torch.manual_seed(0)
    logits = torch.randn(VOCABULARY, VOCABULARY) * 3
    exact = [roll_out(logits, completions, lengths[-1], "", 0.0) for _ in range(5)]
    header = "| noise | nats | tokens | mode | tokens masked | completions masked | length | cosine |"
    lines = [header + " completions needed |", "|---|---:|---:|---|---:|---:|---:|---:|---:|"]
    true, noise_free = {}, {}
    for length in lengths:
        threshold = good_share(exact[0], length).median()
        gradients = [step_gradients(logits, each, length, threshold, "none")[0] for each in exact]
        true[length] = threshold, torch.cat(gradients[1:]).mean(0)
        aligned, cosine, _ = compare(gradients[0], true[length][1])
        _, _, noise_free[length] = compare(torch.cat(gradients), true[length][1])
        lines.append(f"| no | 0 | {length} | none | 0 | 0 | {aligned:.2f} | {cosine:.3f} | 1 |")
    for kind, size in itertools.product(KINDS, SIZES):
        rollouts = roll_out(logits, completions, lengths[-1], kind, size)
        for length, mode in itertools.product(lengths, MODES):
            threshold, expected = true[length]
            gradients, masked = step_gradients(logits, rollouts, length, threshold, mode)
            aligned, cosine, noise = compare(gradients, expected)
            shares = f"{masked.float().mean():.2%} | {masked.any(1).float().mean():.1%}"
            needed = noise / noise_free[length]
            row = f"| {kind} | {size} | {length} | {mode} | {shares} | {aligned:.2f} | {cosine:.3f} | {needed:.2f} |"
            lines.append(row)
    return "\n".join(lines)


def roll_out(logits: torch.Tensor, completions: int, length: int, kind: str, size: float) -> Rollouts:
    """Sample completions from the policy with noise of this mean absolute size."""
    if kind == "offset":
        rollouts = sample(logits, completions, length, "", 0.0)
        offsets = torch.randn(completions, 1) * size * (torch.pi / 2) ** 0.5
        return Rollouts(rollouts.pairs, offsets.expand(-1, length))
    if kind:  # logprobs differ in proportion to the noise of the logits
        size *= 0.01 / sample(logits, completions, 50, kind, 0.01).difference.abs().mean().item()
    return sample(logits, completions, length, kind, size)


def sample(logits: torch.Tensor, completions: int, length: int, kind: str, scale: float) -> Rollouts:
    """Sample completions from the policy with noise of this standard deviation on its logits."""
    table = torch.randn(logits.shape) * scale
    last = torch.arange(completions) // GROUP % VOCABULARY  # the prompt
    pairs = torch.empty(completions, length, dtype=torch.int16)
    difference = torch.zeros(completions, length)
    exact, column = torch.log_softmax(logits, 1), torch.arange(completions)
    for place in range(length):
        noisy = exact[last]
        if kind:
            noise = table[last] if kind == "other weights" else torch.randn(completions, VOCABULARY) * scale
            noisy = torch.log_softmax(noisy + noise, 1)
        token = (noisy.exp().cumsum(1) < torch.rand(completions, 1)).sum(1).clamp(max=VOCABULARY - 1)
        difference[:, place] = exact[last, token] - noisy[column, token]
        pairs[:, place] = last * VOCABULARY + token
        last = token
    return Rollouts(pairs, difference)


def good_share(rollouts: Rollouts, length: int) -> torch.Tensor:
    """Return the share of each completion's tokens that are in the set that the reward counts."""
    return (rollouts.pairs[:, :length] % 2 == 0).float().mean(1)


def step_gradients(
    logits: torch.Tensor, rollouts: Rollouts, length: int, threshold: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of each step, and which tokens are masked or truncated."""
    rewards = (good_share(rollouts, length) > threshold).float().view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    difference = rollouts.difference[:, :length]
    weight, masked = weights(difference, torch.ones_like(difference, dtype=torch.bool), mode)
    size, steps = VOCABULARY * VOCABULARY, len(difference) // STEP
    step = (torch.arange(len(difference)) // STEP)[:, None] * size
    index = (rollouts.pairs[:, :length] + step).flatten()
    counts = torch.bincount(index, (weight * advantages.view(-1, 1)).flatten().double(), minlength=steps * size)
    counts = counts.view(steps, VOCABULARY, VOCABULARY) / (STEP * length)
    # The gradient of a logprob with respect to the logits is 1 at the token, minus all probabilities.
    return (counts - counts.sum(2, keepdim=True) * logits.softmax(1)).flatten(1), masked


def compare(gradients: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, float]:
    """Return length along the expected gradient, cosine with it, and noise / signal of a step (variance / length^2)."""
    mean = gradients.mean(0)
    along = (mean @ expected / (expected @ expected)).item()
    cosine = torch.cosine_similarity(mean, expected, dim=0).item()
    return along, cosine, gradients.var(0).sum().item() / along**2


if __name__ == "__main__":
    main()
