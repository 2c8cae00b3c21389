"""Sampling: what draws completions from a policy or a model."""

from lora_grpo.sampling import build, vllm_engine
from lora_grpo.sampling.build import build_sampler, check_server
from lora_grpo.sampling.generate import SharedVllmSampler
from lora_grpo.sampling.sampler import Rollout, Sampler, completion_seed
from lora_grpo.sampling.slot_memory import ran_out_of_memory
from lora_grpo.sampling.vllm_engine import served_rank
from lora_grpo.sampling.vllm_sampler import VllmSampler

__all__ = [
    "Rollout",
    "Sampler",
    "SharedVllmSampler",
    "VllmSampler",
    "build",
    "build_sampler",
    "check_server",
    "completion_seed",
    "ran_out_of_memory",
    "served_rank",
    "vllm_engine",
]
