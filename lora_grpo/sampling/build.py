"""From a target of an evaluation to what draws its completions."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo.config import ModelConfig, RunConfig, batch_shape, nvidia_gpus, uses_vllm, vllm_available
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.models import ModelSpec, Policy, base_model, context_tokens
from lora_grpo.sampling.generate import GenerateSampler, SharedVllmSampler
from lora_grpo.sampling.merged_copy import MergedCopySampler, merges, plain_copy
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.vllm_engine import VllmEngine
from lora_grpo.sampling.vllm_rollouts import FLAG, HotSwapSampler, adapter_rank
from lora_grpo.sampling.vllm_sampler import VllmSampler
from lora_grpo.sampling.vllm_server import VllmServer, find_base
from lora_grpo.tasks import Row, chat


def check_server(config: RunConfig) -> None:
    """Ask the vLLM server of `sampling.server_url` for its base model, so that a wrong address fails before loading.

    Raises:
        UserError: nothing answers there, it is not a vLLM server, or its context is shorter than the run's.
    """
    if config.sampling.server_url:
        find_base(config.sampling.server_url, config.model.max_sequence_tokens)


def build_sampler(policy: Policy, config: RunConfig) -> Sampler:
    """Return what draws completions from this policy.

    vLLM, where it is asked for or there is a GPU for it: with Unsloth the engine that shares the model's weights.
    Otherwise on a CPU an unpacked copy, on a GPU the model itself, with Unsloth by its `generate`.

    Raises:
        UserError: vLLM is asked for and cannot serve this policy.
        RunError: vLLM does not start.
    """
    parts = (policy.model, policy.tokenizer, policy.eos_token_ids)
    if getattr(policy.model, "vllm_engine", None) is not None:
        return SharedVllmSampler(*parts)
    if uses_vllm(config):
        return HotSwapSampler(*parts, _engine(policy, config))
    if next(policy.model.parameters()).device.type == "cpu" and merges(policy.model):
        return MergedCopySampler(*parts)
    return GenerateSampler(*parts) if policy.engine == "unsloth" else Sampler(*parts)


def _engine(policy: Policy, config: RunConfig) -> VllmEngine | VllmServer:
    rank, longest = adapter_rank(policy.model), config.model.max_sequence_tokens
    if config.sampling.server_url:
        return VllmServer(config.sampling.server_url, config.sampling.server_folder, max_sequence_tokens=longest)
    return VllmEngine(
        config.model,
        rank=rank,
        max_sequence_tokens=longest,
        gpu_memory_share=config.model.gpu_memory_share or 0.5,  # of a GPU's alone, where it is settled
        seed=config.seed,
        flag=FLAG,
        model=policy.model,
        most_at_once=batch_shape(config).completions_per_step,
        sleeps=True,
    )


def choose_backend(asked: str) -> str:
    """Return `vllm` or `transformers` for what the command line asks.

    `auto` takes vLLM where it and a GPU are there: on a CPU the unpacked copy decodes faster (docs/benchmarks.md).

    Raises:
        UserError: vLLM is asked for and is not installed.
    """
    if asked == "auto":
        return "vllm" if vllm_available() and nvidia_gpus()[0] else "transformers"
    if asked == "vllm" and not vllm_available():
        raise UserError(
            "--backend vllm needs the package vllm; run `pip install -e .[gpu]` (on a CPU: `make engines`), or pass "
            "--backend transformers"
        )
    return asked


def load_tokenizer(target: ModelSpec) -> Any:
    """Load the target's tokenizer.

    Raises:
        UserError: it cannot be read.
    """
    return base_model.load_tokenizer(
        ModelConfig(name=str(target.tokenizer), trust_remote_code=target.base.trust_remote_code)
    )


def check_context(target: ModelSpec, tokenizer: Any, rows: Sequence[Row], max_tokens: int) -> int:
    """Return the most tokens that a prompt and its completion take.

    Raises:
        UserError: the model's context is shorter.
    """
    prompts = [chat.render_row(tokenizer, row) for row in rows]
    longest = max(map(len, tokenizer(prompts, add_special_tokens=False)["input_ids"]))
    context = context_tokens(target)
    if context is not None and longest + max_tokens > context:
        room = context - longest
        fix = f"pass --max-completion-tokens {room} or less" if room > 0 else "leave longer rows or examples out"
        raise UserError(
            f"the longest prompt has {longest} tokens, and {max_tokens} more exceed the {context} that "
            f"{target.base_name} takes; {fix}"
        )
    return longest + max_tokens


def load_sampler(target: ModelSpec, backend: str, tokenizer: Any, sequence_tokens: int, seed: int) -> Sampler:
    """Load the model, with its adapter where it has one, and return what draws from it.

    Args:
        target: what to load.
        backend: `vllm` or `transformers`.
        tokenizer: its tokenizer.
        sequence_tokens: the most that a prompt and its completion take.
        seed: of the libraries' own random numbers.

    Raises:
        UserError: the model or the adapter cannot be loaded, or not by this backend.
        RunError: memory does not hold it.
    """
    base_model.prepare_torch(seed)
    ends = base_model.end_tokens(_generation_config(target), tokenizer, target.base_name)
    if backend == "vllm":
        return VllmSampler(
            target.base, tokenizer, ends, adapter=target.adapter, max_sequence_tokens=sequence_tokens, seed=seed
        )
    import torch

    try:
        base = base_model.load_base(target.base)
    except torch.OutOfMemoryError as error:
        smaller = "pass --bits 4" if target.base.bits == 16 else "free it of other programs"
        raise RunError(f"the GPU's memory does not hold {target.base_name}; {smaller}") from error
    on_cpu = next(base.parameters()).device.type == "cpu"
    if target.adapter is None:
        # A 4-bit layer is unpacked at every token, so on a CPU a copy that is unpacked once decodes faster.
        return Sampler(plain_copy(base) if on_cpu and target.base.bits == 4 else base.eval(), tokenizer, ends)
    model = _with_adapter(base, target.adapter)
    return (MergedCopySampler if on_cpu and merges(model) else Sampler)(model, tokenizer, ends)


def describe(target: ModelSpec, backend: str, sampler: Sampler) -> dict[str, Any]:
    """Return what a report says of how completions were drawn."""
    import torch

    engine = f"{backend} {importlib.import_module(backend).__version__}"
    if target.adapter is None:
        served = "no adapter"
    else:
        served = "merged afresh into a copy" if isinstance(sampler, MergedCopySampler) else "adapter beside its base"
    return {
        "engine": engine,
        "torch": torch.__version__,
        "served": served,
        "quantisation": "nf4" if target.base.bits == 4 else "none",
        "dtype": str(base_model.compute_dtype()).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _generation_config(target: ModelSpec) -> Any:
    from transformers import AutoConfig, GenerationConfig

    folder = Path(target.base.name)
    try:
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(folder)
        trusted = target.base.trust_remote_code
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, trust_remote_code=trusted))
    except Exception as error:  # what is damaged raises many types
        raise UserError(f"the configuration of {target.base_name} cannot be read: {first_line(error)}") from error


def _with_adapter(base: Any, adapter: Path) -> Any:
    from peft import PeftModel
    from safetensors import SafetensorError

    try:
        model = PeftModel.from_pretrained(base, adapter, is_trainable=False)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"the adapter in {adapter} cannot be put on its base: {first_line(error)}; "
            "is it another base's? Give its own with --base"
        ) from error
    base_model.keep_frozen(model)
    return model.eval()
