"""Choose and load the sampler for a policy in training or for a model in evaluation."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo import console
from lora_grpo.commands import install_command
from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.errors import UserError, first_line
from lora_grpo.grading import Row
from lora_grpo.hardware import driver_problem, nvidia_gpus, uses_vllm, vllm_available, vllm_extra
from lora_grpo.memory import estimate
from lora_grpo.models import (
    TRAINABLE,
    ModelSpec,
    Policy,
    base_model,
    completion_ends,
    engines,
    load_adapter,
    tokenizer_of,
)
from lora_grpo.prompts import chat, turns
from lora_grpo.sampling.gguf_model import GgufModel
from lora_grpo.sampling.merged_copy import MergedCopySampler, can_merge, plain_copy, use_grouped_attention
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.unsloth_sampler import GenerateSampler, SharedVllmSampler
from lora_grpo.sampling.vllm_engine import VllmEngine, start_engine
from lora_grpo.sampling.vllm_sampler import VllmSampler, served_rank
from lora_grpo.sampling.vllm_server import VllmServer, find_base


def check_server(config: RunConfig) -> None:
    """Check that `sampling.server_url`, if given, is a vLLM server, before anything is loaded. See `find_base`."""
    if config.sampling.server_url:
        find_base(config.sampling.server_url, config.model.max_sequence_tokens)


def build_sampler(policy: Policy, config: RunConfig) -> Sampler:
    """Return the sampler for a policy, or raise an error if vLLM is requested but cannot serve it."""
    shares_engine = getattr(policy.model, "vllm_engine", None) is not None  # Unsloth's
    if shares_engine:
        return SharedVllmSampler(policy.model, policy.tokenizer, policy.eos_token_ids)
    if uses_vllm(config):
        return VllmSampler(_engine(config), policy.tokenizer, policy.eos_token_ids, policy=policy.model)
    if policy.engine == "unsloth":
        return GenerateSampler(policy.model, policy.tokenizer, policy.eos_token_ids)
    return sampler_in_process(policy.model, policy.tokenizer, policy.eos_token_ids)


def _engine(config: RunConfig) -> VllmEngine | VllmServer:
    """Return the vLLM server that the configuration names, or start an engine in this process."""
    max_sequence_tokens = config.model.max_sequence_tokens
    if config.sampling.server_url:
        return VllmServer(
            config.sampling.server_url, config.sampling.server_folder, max_sequence_tokens=max_sequence_tokens
        )
    with engines.starting("vLLM", instead="--sampling.backend transformers"):
        return start_engine(
            config.model,
            rank=estimate.reserved_rank(config.lora.rank),
            max_sequence_tokens=max_sequence_tokens,
            seed=config.seed,
            max_batch_size=batch_shape(config).parallel_samples,
            sleeps=config.sampling.engine_sleep is not False,
            reproducible=config.sampling.reproducible,
        )


def sampler_in_process(model: Any, tokenizer: Any, eos_token_ids: list[int]) -> Sampler:
    """Return the sampler of a model in this process, without vLLM.

    On a CPU, an unquantized copy of a model with an adapter decodes faster.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and can_merge(model):
        return MergedCopySampler(model, tokenizer, eos_token_ids)
    return Sampler(model, tokenizer, eos_token_ids)


def choose_backend(requested: str) -> str:
    """Resolve the value of `--backend` to `vllm` or `transformers`. `auto` is vLLM on a GPU if it is installed."""
    if requested == "auto":
        gpus, _ = nvidia_gpus()
        can_use_vllm = vllm_available() and gpus and not driver_problem(gpus[0])
        return "vllm" if can_use_vllm else "transformers"
    if requested == "vllm" and not vllm_available():
        raise UserError(
            f"--backend vllm needs vllm; run `{install_command(f'lora-grpo[{vllm_extra()}]')}` (on a CPU: "
            "`make engines`)"
        )
    return requested


def check_context(target: ModelSpec | GgufModel, tokenizer: Any, rows: Sequence[Row], max_tokens: int) -> int:
    """Return the maximum length of a prompt plus its completion, or raise a UserError if the context is shorter."""
    if rows[0].get("tools"):
        turns.response_format(tokenizer)  # raises UserError if the template has no tools
    prompts = [chat.render_row(tokenizer, row) for row in rows]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    longest_prompt = max(len(ids) for ids in prompt_ids)
    longest_prompt = rows[0].get("prompt_tokens", longest_prompt)  # an agent makes its own prompts
    context_tokens = target.context_tokens
    if context_tokens is not None and longest_prompt + max_tokens > context_tokens:
        raise UserError(
            f"the longest prompt has {longest_prompt} tokens, and {max_tokens} more exceed the {context_tokens} that "
            f"{target.base_name} takes; pass --max-completion-tokens, or leave longer rows or examples out"
        )
    return longest_prompt + max_tokens


def load_sampler(target: ModelSpec, backend: str, tokenizer: Any, sequence_tokens: int, seed: int) -> Sampler:
    """Load a model, and its adapter if it has one, and return its sampler.

    Args:
        backend: from `choose_backend`.
        tokenizer: from `load_tokenizer`.
        sequence_tokens: maximum length of a prompt plus its completion, from `check_context`.
        seed: of the random generators of the libraries.
    """
    engines.prepare_torch(seed)
    eos_token_ids = completion_ends(target, tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        console.note(f"note: {target.base_name} has no chat template, so prompts are plain text")
    if backend == "vllm":
        with engines.starting("vLLM", instead="--backend transformers"):
            rank = served_rank(target.adapter) if target.adapter else None
            engine = start_engine(target.base, rank=rank, max_sequence_tokens=sequence_tokens, seed=seed)
        return VllmSampler(engine, tokenizer, eos_token_ids, adapter=target.adapter)

    import torch

    base = base_model.load_base(target.base)
    if base._is_stateful and base.config.model_type not in TRAINABLE:
        raise UserError(f"{target.base_name} has a recurrent state, which was not tested; pass --backend vllm")
    if not target.adapter:
        if not torch.cuda.is_available():
            if target.base.loaded_bits == 4:
                base = plain_copy(base)
            base = use_grouped_attention(base)
        return Sampler(base.eval(), tokenizer, eos_token_ids)
    model = with_adapter(base, target.adapter)
    return sampler_in_process(model, tokenizer, eos_token_ids)


def with_adapter(base: Any, adapter: Path) -> Any:
    """Return a base model with a saved adapter, or raise a UserError if they do not fit each other."""
    from peft import PeftModel

    try:
        model = PeftModel.from_pretrained(base, adapter, is_trainable=False)
    except Exception as error:  # settings of the wrong types raise many exception types
        raise UserError(
            f"the adapter in {adapter} cannot be loaded into its base model: {first_line(error)}; "
            "if it was trained on another base, pass that one with --base"
        ) from error
    load_adapter(model, adapter)  # unlike PEFT, this raises an error for NaN and for weights that the file lacks
    base_model.keep_frozen(model)
    return model.eval()


def describe(target: ModelSpec, backend: str, sampler: Sampler) -> dict[str, Any]:
    """Describe how completions are sampled, for the report."""
    import torch

    if not target.adapter:
        served = "no adapter"
    elif isinstance(sampler, MergedCopySampler):
        served = "merged into a copy"
    else:
        served = "adapter not merged"
    return {
        "engine": f"{backend} {importlib.import_module(backend).__version__}",
        "torch": torch.__version__,
        "served": served,
        "quantization": "nf4" if target.base.loaded_bits == 4 else "none",
        "dtype": str(base_model.compute_dtype()).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def load_tokenizer(target: ModelSpec) -> Any:
    """Load the tokenizer of a model spec, and say so if its chat template is not from its own folder."""
    if target.chat_templates:
        owner = "the base's" if target.template_from == "base" else "the adapter's own"
        console.note(f"note: prompts use {owner} chat template")
    return tokenizer_of(target)
