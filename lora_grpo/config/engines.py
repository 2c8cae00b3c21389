"""Resolves `auto` to a training engine and a sampling backend, from the settings, the packages and the GPU."""

from __future__ import annotations

import importlib.util
from typing import Literal

from lora_grpo import distributed
from lora_grpo.config.hardware import nvidia_gpus
from lora_grpo.config.schema import RunConfig, replace


def vllm_available() -> bool:
    return importlib.util.find_spec("vllm") is not None


def choose_engine(config: RunConfig) -> Literal["peft", "unsloth"]:
    """Return the training engine. `auto` is Unsloth if it is installed and a single process trains on a GPU."""
    if config.model.engine != "auto":
        return config.model.engine
    can_use = _supports_unsloth(config) and nvidia_gpus()[0] and importlib.util.find_spec("unsloth")
    return "unsloth" if can_use else "peft"


def uses_vllm(config: RunConfig) -> bool:
    """Return whether vLLM samples the rollouts. `auto` is vLLM if it is installed, there is a GPU, and DoRA is off."""
    if config.sampling.server_url:
        return True
    if config.sampling.backend != "auto":
        return config.sampling.backend == "vllm"
    return vllm_available() and bool(nvidia_gpus()[0]) and not config.lora.dora


def local_sampler(config: RunConfig) -> Literal["transformers", "vllm", "shared"]:
    """Return the sampler that runs on this machine; `shared` is Unsloth's vLLM, which shares the trained weights."""
    if config.sampling.server_url or not uses_vllm(config):
        return "transformers"
    return "shared" if choose_engine(config) == "unsloth" else "vllm"


def with_gpu_defaults(config: RunConfig) -> RunConfig:
    """Return the configuration with `auto` resolved as on a machine with a GPU and the `gpu` extra."""
    engine, backend = config.model.engine, config.sampling.backend
    if engine == "auto":
        engine = "unsloth" if _supports_unsloth(config) else "peft"
    if backend == "auto":
        backend = "transformers" if config.lora.dora else "vllm"
    resolved: RunConfig = replace(config, {"model": {"engine": engine}, "sampling": {"backend": backend}})
    return resolved


def _supports_unsloth(config: RunConfig) -> bool:
    # Unsloth's trainer computes the KL penalty against the base, not against the adapter that a run starts from.
    other_reference = config.lora.from_ and config.train.beta
    return distributed.world_size() == 1 and not config.sampling.server_url and not other_reference
