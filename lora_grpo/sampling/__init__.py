"""Sampling: generate completions from the policy for training, preview, validation and evaluation.

    sampler = build_sampler(policy, config)            # or build.load_sampler(target, backend, ...)
    params = SamplingParams(num_samples=8, temperature=1.0, top_p=1.0, max_tokens=256)
    seeds = [completion_seed(config.seed, "step 3", n) for n in range(8 * len(prompts))]
    groups = sampler.sample(prompts, params, seeds)    # 8 completions per prompt: SampledTokens

Each completion has its own seed, so a resumed run samples the same completions as an uninterrupted one. To process
completions as they finish, use `with sampler.awake(adapter=True)` and `sampler.stream`. To sample what other threads
ask for, use `sampler.serve(queue)` there: they submit a `Request` to the `RequestQueue`, and get a future.

    build.py                 chooses and loads the sampler for a policy or a model spec
    samples.py               prompts, parameters and completions
    requests.py              completions that other threads ask for, in waves or as they come
    sampler.py               the Sampler interface, and the decoding loop of the built-in sampler
    continuous_batching.py   the batch of that loop: finished completions leave it, and waiting ones join it
    growing_cache.py         its key-value cache
    batch_memory.py          how many completions fit in memory
    token_selection.py       seeds, random numbers, and the token that each selects
    streams.py               completions in the order in which they finish, and groups that are complete
    merged_copy.py           samples from an unquantized copy with the adapter merged (faster on a CPU); its attention
    unsloth_sampler.py       samples with Unsloth's vLLM engine, which shares the trained weights, or with `generate`
    vllm_sampler.py          samples with vLLM, and loads the policy's adapter at each `wake_up`
    vllm_engine.py           its engine in this process
    vllm_server.py           client of a vLLM server, with the engine's interface
    llama_cpp.py             samples from a GGUF file with llama.cpp
    gguf_model.py            the header of such a file
    llama_server.py          starts `llama-server` in a process of its own
    xllamacpp_server.py      the server of the package xllamacpp, as a program with llama-server's flags
"""

from lora_grpo.sampling import build
from lora_grpo.sampling.build import build_sampler, check_server, sampler_in_process
from lora_grpo.sampling.gguf_model import GgufModel, read_gguf, read_header
from lora_grpo.sampling.llama_cpp import GgufSampler
from lora_grpo.sampling.llama_server import LlamaServer
from lora_grpo.sampling.merged_copy import plain_copy
from lora_grpo.sampling.requests import Request, RequestQueue, Waiting
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.samples import Decoded, Prompts, SampledTokens, SamplingParams, end_early
from lora_grpo.sampling.streams import in_threads
from lora_grpo.sampling.token_selection import completion_seed
from lora_grpo.sampling.unsloth_sampler import SharedVllmSampler
from lora_grpo.sampling.vllm_sampler import VllmSampler, served_rank
