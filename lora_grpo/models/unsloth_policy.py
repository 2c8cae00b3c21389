"""Load a policy with Unsloth, which has faster kernels and starts vLLM itself. Only this module imports Unsloth."""

import importlib.metadata
import os
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from lora_grpo import console
from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.errors import RunError
from lora_grpo.hardware import use_tables, uses_vllm
from lora_grpo.models import base_model
from lora_grpo.models.architectures import ATTENTION
from lora_grpo.models.engines import hide_flashinfer, require_compiler
from lora_grpo.models.peft_policy import disable_dropout, lora_options

OTHER_ENGINE = "--model.engine peft"
"""The arguments that choose PEFT in place of Unsloth."""
_ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_PATCHED = ("trl", "transformers", "peft")
"""The packages whose code Unsloth replaces, so that it depends on their versions."""


def import_unsloth() -> None:
    """Import Unsloth. It patches trl, transformers and peft, and only warns if they were imported before.

    Unsloth reads the variables that are set here on import. A variable that the user has set stays, except for the
    standby mode, which `sampling.engine_sleep` decides.
    """
    # In standby mode, training uses vLLM's memory between rollouts, and the override keeps Unsloth from changing
    # gpu_memory_utilization. `_vllm_options` ends this mode if vLLM shall not sleep. It cannot begin later, because
    # without it Unsloth sets up torch's allocator in a way that excludes it.
    os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
    os.environ.setdefault("UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE", "1")
    # Where nvcc is installed, Unsloth forces FlashInfer's sampler, which makes vLLM 0.27 fail below compute capability
    # 8.0 (T4). That sampler is never used, because requests have seeds or logprobs.
    os.environ.setdefault("UNSLOTH_VLLM_NO_FLASHINFER", "1")
    os.environ.setdefault("VLLM_WSL2_ENABLE_PIN_MEMORY", "1")  # see sampling/vllm_engine.py
    # Otherwise Unsloth counts users: each start downloads files named after the machine's kind and memory.
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    # Generated trainers, by default in the working directory. Unsloth keeps its other caches here.
    generated_code = Path("~/.cache/unsloth/unsloth_compiled_cache").expanduser()
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(generated_code))
    # With --sampling.top-p below 1, Unsloth would keep the logits of all completions, which the plan does not count.
    os.environ.setdefault("UNSLOTH_GRPO_TRUNCATED_SUPPORT", "0")
    hide_flashinfer()
    _warn_of_other_versions()
    import unsloth  # noqa: F401


def _warn_of_other_versions() -> None:
    """Print a warning if Unsloth's metadata excludes the installed version of a package that it patches.

    pip installs such versions only with --no-deps, or when they come after Unsloth. Many work: Unsloth 2026.10.9 allows
    TRL up to 1.15 and trains with 1.16.
    """
    excluded = []
    for line in importlib.metadata.requires("unsloth") or ():
        requirement = Requirement(line)
        belongs_to_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if requirement.name not in _PATCHED or belongs_to_extra:
            continue
        version = importlib.metadata.version(requirement.name)
        broken_rules = [str(rule) for rule in requirement.specifier if not rule.contains(version)]
        if broken_rules:
            excluded.append(f"{requirement.name} {version} (expected {', '.join(broken_rules)})")
    if excluded:
        unsloth_version = importlib.metadata.version("unsloth")
        console.note(
            f"warning: Unsloth {unsloth_version} does not allow {' and '.join(sorted(excluded))}; "
            f"if the run fails, install the versions of requirements-gpu.lock, or pass {OTHER_ENGINE}"
        )


def load_unsloth(config: RunConfig) -> tuple[Any, Any]:
    """Return the base model with a new, seeded adapter, and its tokenizer. If vLLM samples, it is started here.

    Raises:
        UserError: there is no compiler for Unsloth's kernels.
        RunError: vLLM has memory for fewer tokens of context than the run needs.
    """
    import torch
    from unsloth import FastLanguageModel

    vllm_options: dict[str, Any] = {}
    if torch.cuda.is_available():
        require_compiler(feature="--model.engine unsloth", otherwise=f"pass {OTHER_ENGINE}")
        if uses_vllm(config):
            vllm_options = _vllm_options(config)
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=config.model.name,
        max_seq_length=config.model.max_sequence_tokens,
        load_in_4bit=config.model.loaded_bits == 4,
        dtype=base_model.compute_dtype(),
        trust_remote_code=config.model.trust_remote_code,
        use_exact_model_name=True,  # otherwise Unsloth looks for its own copy of the model on the internet
        **vllm_options,
    )
    vllm = getattr(model, "vllm_engine", None)
    if vllm is not None:
        # By Unsloth's arithmetic, vLLM needs about 0.4 GiB more than planned for 14B parameters, 1.5 GiB more for 32B.
        context_tokens = vllm.model_config.max_model_len
        if context_tokens < config.model.max_sequence_tokens:
            raise RunError(
                f"Unsloth limits vLLM to {context_tokens} tokens of context, less than --model.max-sequence-tokens, "
                f"because its estimate of the memory is higher than the plan's; pass {OTHER_ENGINE}"
            )
    disable_dropout(model)

    targets = list(config.lora.targets)
    if targets == ["all-linear"]:
        targets = list(_ALL_LINEAR)
    torch.manual_seed(config.seed)
    model = FastLanguageModel.get_peft_model(
        model,
        target_modules=targets,
        **lora_options(config),
        use_gradient_checkpointing="unsloth" if config.train.gradient_checkpointing else False,
        random_state=config.seed,
    )
    if vllm is not None:
        _write_adapters_to_scratch(model)
    return model, tokenizer


def _vllm_options(config: RunConfig) -> dict[str, Any]:
    """Return the arguments with which Unsloth starts vLLM, and set the variables that both read then."""
    import torch

    use_tables(torch.cuda.get_device_name(), reproducible=config.sampling.reproducible)
    # The plan decides whether vLLM sleeps, after `load_tokenizer` has imported Unsloth.
    os.environ["UNSLOTH_VLLM_STANDBY"] = "0" if config.sampling.engine_sleep is False else "1"

    # Otherwise Unsloth decodes 8 or 16 completions at once on most GPUs. It treats its default of 256 as not set.
    parallel_completions = batch_shape(config).parallel_samples
    if parallel_completions == 256:
        parallel_completions = 257
    options: dict[str, Any] = {
        "fast_inference": True,
        "max_lora_rank": config.lora.rank,
        "max_num_seqs": parallel_completions,
    }
    fraction_of_total = config.model.gpu_memory_share  # set by the plan
    if fraction_of_total is not None:
        # Unsloth expects a fraction of the free memory, and gives vLLM the same fraction of the total memory.
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        options["gpu_memory_utilization"] = fraction_of_total * total_bytes / free_bytes
    return options


def _write_adapters_to_scratch(model: Any) -> None:
    """Have Unsloth's rollouts write the adapter's settings to a temporary folder, not to the working directory."""
    scratch = tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-")
    load_lora = model.load_lora

    def load_from_scratch(folder: str, **options: Any) -> Any:
        return load_lora(str(Path(scratch.name, folder)), **options)  # also keeps the folder as long as the model

    model.load_lora = load_from_scratch
