"""Sampling: generate completions from the policy for training, preview, validation and evaluation.

    sampler = build_sampler(policy, config)            # or build.load_sampler(target, backend, ...)
    params = SamplingParams(num_samples=8, temperature=1.0, top_p=1.0, max_tokens=256)
    seeds = [completion_seed(config.seed, "step 3", n) for n in range(8 * len(prompts))]
    groups = sampler.sample(prompts, params, seeds)    # 8 completions per prompt: SampledTokens

Each completion has its own seed, so a resumed run samples the same completions as an uninterrupted one. To process
completions as they finish, use `with sampler.awake(adapter=True)` and `sampler.stream`.

    build.py                 chooses and loads the sampler for a policy or a model spec
    sampler.py               the Sampler interface, and decoding with a key-value cache
    continuous_batching.py   replaces finished completions in the batch with waiting ones; its cache and memory
    merged_copy.py           samples from an unquantized copy with the adapter merged (faster on a CPU); its attention
    unsloth_sampler.py       samples with Unsloth's vLLM engine, which shares the trained weights, or with `generate`
    vllm_sampler.py          samples with vLLM, and loads the policy's adapter at each `wake_up`; engine in this process
    vllm_server.py           client of a vLLM server, with the same interface
    llama_cpp.py             samples from a GGUF file with `llama-server`, and reads the header of the file
    xllamacpp_server.py      the server of the package xllamacpp, as a program with llama-server's flags
"""

from lora_grpo.sampling import build
from lora_grpo.sampling.build import build_sampler, check_server, sampler_in_process
from lora_grpo.sampling.llama_cpp import GgufModel, GgufSampler, read_gguf, read_header
from lora_grpo.sampling.sampler import Decoded, Prompts, SampledTokens, Sampler, SamplingParams, completion_seed
from lora_grpo.sampling.unsloth_sampler import SharedVllmSampler
from lora_grpo.sampling.vllm_sampler import VllmSampler, served_rank
