"""Choose and load the sampler for a policy in training or for a model in evaluation."""

import importlib
from collections.abc import Sequence
from typing import Any

from lora_grpo import console
from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.errors import UserError, first_line
from lora_grpo.grading import Row
from lora_grpo.hardware import driver_problem, nvidia_gpus, uses_vllm, vllm_available
from lora_grpo.memory import estimate
from lora_grpo.models import TRAINABLE, ModelSpec, Policy, base_model, completion_ends, load_adapter, tokenizer_of
from lora_grpo.prompts import chat, turns
from lora_grpo.sampling.llama_cpp import GgufModel
from lora_grpo.sampling.merged_copy import MergedCopySampler, can_merge, plain_copy, use_grouped_attention
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.unsloth_sampler import GenerateSampler, SharedVllmSampler
from lora_grpo.sampling.vllm_sampler import VllmEngine, VllmSampler, served_rank, start_engine
from lora_grpo.sampling.vllm_server import VllmServer, find_base


def check_server(config: RunConfig) -> None:
    """Check that `sampling.server_url`, if given, is a vLLM server, before anything is loaded. See `find_base`."""
    if config.sampling.server_url:
        find_base(config.sampling.server_url, config.model.max_sequence_tokens)


def build_sampler(policy: Policy, config: RunConfig) -> Sampler:
    """Return the sampler for a policy, or raise an error if vLLM is requested but cannot serve it."""
    parts = (policy.model, policy.tokenizer, policy.eos_token_ids)
    if getattr(policy.model, "vllm_engine", None) is not None:  # of Unsloth
        return SharedVllmSampler(*parts)
    if uses_vllm(config):
        return VllmSampler(_engine(config), policy.tokenizer, policy.eos_token_ids, policy=policy.model)
    return GenerateSampler(*parts) if policy.engine == "unsloth" else sampler_in_process(*parts)


def _engine(config: RunConfig) -> VllmEngine | VllmServer:
    longest = config.model.max_sequence_tokens
    if config.sampling.server_url:
        return VllmServer(config.sampling.server_url, config.sampling.server_folder, max_sequence_tokens=longest)
    with base_model.starting("vLLM", instead="--sampling.backend transformers"):
        return start_engine(
            config.model,
            rank=estimate.reserved_rank(config.lora.rank),
            max_sequence_tokens=longest,
            seed=config.seed,
            max_batch_size=batch_shape(config).parallel_samples,
            sleeps=True,
        )


def sampler_in_process(model: Any, tokenizer: Any, eos_token_ids: list[int]) -> Sampler:
    """Return the sampler of a model in this process, without vLLM.

    On a CPU, an unquantized copy of a model with an adapter decodes faster.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    return (MergedCopySampler if on_cpu and can_merge(model) else Sampler)(model, tokenizer, eos_token_ids)


def choose_backend(requested: str) -> str:
    """Resolve the value of `--backend` to `vllm` or `transformers`. `auto` is vLLM on a GPU if it is installed."""
    if requested == "auto":
        gpus, _ = nvidia_gpus()
        return "vllm" if vllm_available() and gpus and not driver_problem(gpus[0]) else "transformers"
    if requested == "vllm" and not vllm_available():
        raise UserError("--backend vllm needs vllm; run `pip install 'lora-grpo[gpu]'` (on a CPU: `make engines`)")
    return requested


def check_context(target: ModelSpec | GgufModel, tokenizer: Any, rows: Sequence[Row], max_tokens: int) -> int:
    """Return the maximum length of a prompt plus its completion, or raise a UserError if the context is shorter."""
    if rows[0].get("tools"):
        turns.response_format(tokenizer)  # raises UserError if the template has no tools
    prompts = [chat.render_row(tokenizer, row) for row in rows]
    longest = max(map(len, tokenizer(prompts, add_special_tokens=False)["input_ids"]))
    context = target.context_tokens
    if context is not None and longest + max_tokens > context:
        raise UserError(
            f"the longest prompt has {longest} tokens, and {max_tokens} more exceed the {context} that "
            f"{target.base_name} takes; pass --max-completion-tokens, or leave longer rows or examples out"
        )
    return longest + max_tokens


def load_sampler(target: ModelSpec, backend: str, tokenizer: Any, sequence_tokens: int, seed: int) -> Sampler:
    """Load a model, and its adapter if it has one, and return its sampler.

    Arguments come from `choose_backend`, `load_tokenizer` and `check_context`. `seed` is the seed of the libraries.
    """
    base_model.prepare_torch(seed)
    eos_token_ids = completion_ends(target, tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        console.note(f"note: {target.base_name} has no chat template, so prompts are plain text")
    if backend == "vllm":
        with base_model.starting("vLLM", instead="--backend transformers"):
            rank = served_rank(target.adapter) if target.adapter else None
            engine = start_engine(target.base, rank=rank, max_sequence_tokens=sequence_tokens, seed=seed)
        return VllmSampler(engine, tokenizer, eos_token_ids, adapter=target.adapter)
    import torch
    from peft import PeftModel

    base = base_model.load_base(target.base)
    if base._is_stateful and base.config.model_type not in TRAINABLE:
        raise UserError(f"{target.base_name} has a recurrent state, which was not tested; pass --backend vllm")
    if not target.adapter:
        if not torch.cuda.is_available():
            base = use_grouped_attention(plain_copy(base) if target.base.bits == 4 else base)
        return Sampler(base.eval(), tokenizer, eos_token_ids)
    try:
        model = PeftModel.from_pretrained(base, target.adapter, is_trainable=False)
    except Exception as error:  # settings of the wrong types raise many exception types
        raise UserError(
            f"the adapter in {target.adapter} cannot be loaded into its base model: {first_line(error)}; "
            "if it was trained on another base, pass that one with --base"
        ) from error
    load_adapter(model, target.adapter)  # PEFT accepts NaN, and leaves weights as they are that it does not find
    base_model.keep_frozen(model)
    return sampler_in_process(model.eval(), tokenizer, eos_token_ids)


def describe(target: ModelSpec, backend: str, sampler: Sampler) -> dict[str, Any]:
    """Describe how completions are sampled, for the report."""
    import torch

    served = "merged into a copy" if isinstance(sampler, MergedCopySampler) else "adapter not merged"
    return {
        "engine": f"{backend} {importlib.import_module(backend).__version__}",
        "torch": torch.__version__,
        "served": served if target.adapter else "no adapter",
        "quantization": "nf4" if target.base.bits == 4 else "none",
        "dtype": str(base_model.compute_dtype()).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def load_tokenizer(target: ModelSpec) -> Any:
    """Load the tokenizer of a model spec, and say so if its chat template is not from its own folder."""
    if target.chat_templates:
        whose = "the base's" if target.template_from == "base" else "the adapter's own"
        console.note(f"note: prompts use {whose} chat template")
    return tokenizer_of(target)
