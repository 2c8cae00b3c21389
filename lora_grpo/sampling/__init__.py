"""Sampling: from prompts to completions of the policy, in training, preview, validation and evaluation.

    sampler = build_sampler(policy, config)            # or load_sampler(target, backend, ...)
    params = SamplingParams(num_samples=8, temperature=1.0, top_p=1.0, max_tokens=256)
    seeds = [completion_seed(config.seed, "step 3", n) for n in range(8 * len(prompts))]
    groups = sampler.sample(prompts, params, seeds)    # 8 completions per prompt: SampledTokens
    base = sampler.sample(prompts, params, seeds, adapter=False)

Each completion has its own seed, so a resumed run samples what an uninterrupted one would have. `sample` loads the
adapter as it is now, fits the batch to the GPU's memory, and releases that memory at the end. To write completions as
they come, use `with sampler.awake(adapter=True)` and `sampler.stream`.

    build                 which sampler a policy or a model gets
    sampler               the interface, and decoding with a key-value cache
    continuous_batching   waiting completions take the place of finished ones
    batch_memory          how many completions fit in memory at once
    merged_copy           an unquantized copy with the adapter merged: faster on a CPU
    generate              Unsloth: its `generate`, or the vLLM engine that it trains on
    vllm_sampler          vLLM: the adapter is reloaded at each step, never merged
    vllm_start            starts vLLM in this process
    vllm_engine           that engine
    vllm_server           vLLM behind a URL
    vllm_adapter          which adapters vLLM can serve
"""

from lora_grpo.sampling import build
from lora_grpo.sampling.batch_memory import ran_out_of_memory
from lora_grpo.sampling.build import build_sampler, check_server
from lora_grpo.sampling.generate import SharedVllmSampler
from lora_grpo.sampling.sampler import SampledTokens, Sampler, SamplingParams, completion_seed
from lora_grpo.sampling.vllm_adapter import served_rank

__all__ = [
    "SampledTokens",
    "Sampler",
    "SamplingParams",
    "SharedVllmSampler",
    "build",
    "build_sampler",
    "check_server",
    "completion_seed",
    "ran_out_of_memory",
    "served_rank",
]
