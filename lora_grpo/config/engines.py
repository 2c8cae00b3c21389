"""Which engine trains and what draws completions, settled from what is asked and what is installed; imports neither."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal

from lora_grpo import distributed
from lora_grpo.config.hardware import nvidia_gpus
from lora_grpo.config.schema import RunConfig


def vllm_available() -> bool:
    """Tell whether vLLM is installed, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def choose_engine(config: RunConfig) -> Literal["peft", "unsloth"]:
    """Return what loads and trains the model; of itself Unsloth where it and a GPU are, in one process."""
    if config.model.engine != "auto":
        return config.model.engine
    alone = distributed.world_size() == 1 and not config.sampling.server_url
    return "unsloth" if alone and nvidia_gpus()[0] and importlib.util.find_spec("unsloth") else "peft"


def uses_vllm(config: RunConfig) -> bool:
    """Tell whether vLLM draws the rollouts: where it is asked for, and by itself where it, a GPU and plain LoRA are."""
    if config.sampling.server_url:
        return True
    if config.sampling.backend != "auto":
        return config.sampling.backend == "vllm"
    return vllm_available() and bool(nvidia_gpus()[0]) and not config.lora.dora


def drawn_by(config: RunConfig) -> Literal["transformers", "vllm", "shared"]:
    """Return what takes memory of this machine's GPU to draw: `shared` is Unsloth's engine on the trained weights."""
    if config.sampling.server_url or not uses_vllm(config):
        return "transformers"
    return "shared" if choose_engine(config) == "unsloth" else "vllm"


def as_with_gpu_extra(config: RunConfig) -> RunConfig:
    """Return the configuration with what `auto` would mean on a machine with a GPU and the `gpu` extra."""
    model, sampling, alone = (
        config.model,
        config.sampling,
        distributed.world_size() == 1 and not config.sampling.server_url,
    )
    if model.engine == "auto":
        model = dataclasses.replace(model, engine="unsloth" if alone else "peft")
    if sampling.backend == "auto":
        sampling = dataclasses.replace(sampling, backend="transformers" if config.lora.dora else "vllm")
    return dataclasses.replace(config, model=model, sampling=sampling)
