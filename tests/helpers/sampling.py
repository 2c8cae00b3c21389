"""Sampling in tests: parameters by name, and one seed for a whole call."""

from lora_grpo.sampling import SamplingParams, completion_seed


def sample(sampler, prompts, num_samples, *, max_tokens, temperature, top_p, seed):
    """Return the completions of each prompt; `seed` is one number, or one seed for each completion."""
    if isinstance(seed, int):
        seed = [completion_seed(seed, "test", number) for number in range(len(prompts) * num_samples)]
    params = SamplingParams(num_samples, temperature, top_p, max_tokens)
    return [group for _, group in sorted(sampler.stream(prompts, params, seed), key=lambda pair: pair[0])]
