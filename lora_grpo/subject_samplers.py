"""From a subject of an evaluation to what draws its completions."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo import base_model, vllm_engine
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.hardware import nvidia_gpus
from lora_grpo.merged_copy import MergedCopySampler, merges, plain_copy
from lora_grpo.prompts import render_row
from lora_grpo.rollouts import Sampler
from lora_grpo.subjects import Subject, context_tokens
from lora_grpo.tasks import Row
from lora_grpo.vllm_sampler import VllmSampler


def choose_backend(asked: str) -> str:
    """Return `vllm` or `transformers` for what the command line asks.

    `auto` takes vLLM where it and a GPU are there: on a CPU the unpacked copy decodes faster (docs/benchmarks.md).

    Raises:
        UserError: vLLM is asked for and is not installed.
    """
    if asked == "auto":
        return "vllm" if vllm_engine.available() and nvidia_gpus()[0] else "transformers"
    if asked == "vllm" and not vllm_engine.available():
        raise UserError(
            "--backend vllm needs the package vllm; run `pip install -e .[gpu]` (on a CPU: `make engines`), or pass "
            "--backend transformers"
        )
    return asked


def load_tokenizer(subject: Subject) -> Any:
    """Load the subject's tokenizer.

    Raises:
        UserError: it cannot be read.
    """
    return base_model.load_tokenizer(
        ModelConfig(name=str(subject.tokenizer), trust_remote_code=subject.base.trust_remote_code)
    )


def check_context(subject: Subject, tokenizer: Any, rows: Sequence[Row], max_tokens: int) -> int:
    """Return the most tokens that a prompt and its completion take.

    Raises:
        UserError: the model's context is shorter.
    """
    prompts = [render_row(tokenizer, row) for row in rows]
    longest = max(map(len, tokenizer(prompts, add_special_tokens=False)["input_ids"]))
    context = context_tokens(subject)
    if context is not None and longest + max_tokens > context:
        room = context - longest
        fix = f"pass --max-completion-tokens {room} or less" if room > 0 else "leave longer rows or examples out"
        raise UserError(
            f"the longest prompt has {longest} tokens, and {max_tokens} more exceed the {context} that "
            f"{subject.base_name} takes; {fix}"
        )
    return longest + max_tokens


def load_sampler(subject: Subject, backend: str, tokenizer: Any, sequence_tokens: int, seed: int) -> Sampler:
    """Load the model, with its adapter where it has one, and return what draws from it.

    Args:
        subject: what to load.
        backend: `vllm` or `transformers`.
        tokenizer: its tokenizer.
        sequence_tokens: the most that a prompt and its completion take.
        seed: of the libraries' own random numbers.

    Raises:
        UserError: the model or the adapter cannot be loaded, or not by this backend.
        RunError: memory does not hold it.
    """
    base_model.prepare_torch(seed)
    ends = base_model.end_tokens(_generation_config(subject), tokenizer, subject.base_name)
    if backend == "vllm":
        return VllmSampler(
            subject.base, tokenizer, ends, adapter=subject.adapter, max_sequence_tokens=sequence_tokens, seed=seed
        )
    import torch

    try:
        base = base_model.load_base(subject.base)
    except torch.OutOfMemoryError as error:
        smaller = "pass --bits 4" if subject.base.bits == 16 else "free it of other programs"
        raise RunError(f"the GPU's memory does not hold {subject.base_name}; {smaller}") from error
    on_cpu = next(base.parameters()).device.type == "cpu"
    if subject.adapter is None:
        # A 4-bit layer is unpacked at every token, so on a CPU a copy that is unpacked once decodes faster.
        return Sampler(plain_copy(base) if on_cpu and subject.base.bits == 4 else base.eval(), tokenizer, ends)
    model = _with_adapter(base, subject.adapter)
    return (MergedCopySampler if on_cpu and merges(model) else Sampler)(model, tokenizer, ends)


def describe(subject: Subject, backend: str, sampler: Sampler) -> dict[str, Any]:
    """Return what a report says of how completions were drawn."""
    import torch

    engine = f"{backend} {importlib.import_module(backend).__version__}"
    if subject.adapter is None:
        served = "no adapter"
    else:
        served = "merged afresh into a copy" if isinstance(sampler, MergedCopySampler) else "adapter beside its base"
    return {
        "engine": engine,
        "torch": torch.__version__,
        "served": served,
        "quantisation": "nf4" if subject.base.bits == 4 else "none",
        "dtype": str(base_model.compute_dtype()).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _generation_config(subject: Subject) -> Any:
    from transformers import AutoConfig, GenerationConfig

    folder = Path(subject.base.name)
    try:
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(folder)
        trusted = subject.base.trust_remote_code
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, trust_remote_code=trusted))
    except Exception as error:  # what is damaged raises many types
        raise UserError(f"the configuration of {subject.base_name} cannot be read: {first_line(error)}") from error


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
