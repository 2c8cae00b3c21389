"""The policy: a frozen base model, in 4 or 16 bits, with a trainable LoRA adapter.

An adapter is saved in the folder format of PEFT, which vLLM and Unsloth also read.
"""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lora_grpo import console, distributed
from lora_grpo.commands import install_command
from lora_grpo.config import RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.files import atomic
from lora_grpo.hardware import (
    check_vllm_quantizes,
    choose_engine,
    machine,
    sampler_kind,
    use_one_gpu,
    uses_gpu,
    vllm_available,
    vllm_extra,
    vllm_serves,
)
from lora_grpo.models import base_model, engines, model_files, stop_tokens, unsloth_policy
from lora_grpo.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_sha256
from lora_grpo.models.peft_policy import load_peft
from lora_grpo.models.start_adapter import prepare_tokenizer, start_folder
from lora_grpo.prompts import chat


@dataclass
class Policy:
    """A trainable model."""

    model: Any
    """A PEFT model whose adapter is named `default`."""
    tokenizer: Any
    eos_token_ids: list[int]
    """Ids of all tokens that end a completion."""
    engine: str
    """`peft` or `unsloth`."""
    record: dict[str, Any]
    """The entry `policy` of run.json."""
    start: Path | None = None
    """Folder of the adapter that training starts from; None for a new one."""


def load_policy(config: RunConfig, *, resumed: bool = False) -> Policy:
    """Load the base model with a new, seeded adapter, or with the one that the run starts from.

    Args:
        config: the checked configuration of the run.
        resumed: whether the output folder already contains the run and a copy of the adapter that it starts from.

    Raises:
        UserError: a file is missing or damaged, or the adapter does not fit the base.
        RunError: the engine does not start.
    """
    start = start_folder(config, resumed=resumed)
    engine = _import_engine(config)
    distributed.join()
    _check_gpu(config)

    # Load the frozen base with a new adapter. Unsloth (2026.10) ignores a revision if vLLM samples, so engines get the
    # folder of the commit.
    folder = model_files.locate(config.model.name, config.model.revision)
    local_config = replace(config, {"model": {"name": str(folder.path), "revision": None}})
    if engine == "unsloth":
        # Unsloth also starts vLLM, if vLLM samples, and its errors do not tell which of the two failed.
        with engines.starting("Unsloth", instead=unsloth_policy.OTHER_ENGINE):
            model, tokenizer = unsloth_policy.load_unsloth(local_config)
    else:
        model, tokenizer = load_peft(local_config)

    # Prompts: the chat template of the run and its variables.
    template_variables = prepare_tokenizer(tokenizer, config, start)
    if not getattr(tokenizer, "chat_template", None):
        console.note(
            f"note: {config.model.name} has no chat template, so prompts are plain text (`Question: ...`, `Answer:`); "
            "for chat prompts, pass an instruct model"
        )

    # Weights: the adapter that the run starts from replaces the weights of the new adapter.
    if start:
        load_adapter(model, start)
    base_model.keep_frozen(model)

    # Tokens that end a completion: TRL reads them from the model's `generation_config`. They are set here, because a
    # model that Unsloth builds from vLLM's weights knows only the token in config.json.
    eos_token_ids = stop_tokens.eos_token_ids(local_config.model, tokenizer, config.model.name)
    model.get_base_model().generation_config.eos_token_id = eos_token_ids
    _warn_of_another_end(config.model.name, tokenizer, eos_token_ids)

    # Saved adapters name the base by the name that the user gave, not by the folder in the cache.
    saved_config = model.peft_config["default"]
    saved_config.base_model_name_or_path = model_files.source(config.model.name)
    saved_config.revision = folder.commit

    device = next(model.parameters()).device
    trainable_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    record = {
        "base_model": config.model.name,
        "revision": folder.commit,
        "fingerprint": None if folder.commit else model_files.weights_fingerprint(folder.path),
        "engine": engine,
        "bits": config.model.loaded_bits,
        "device": _device_name(device),
        "trust_remote_code": config.model.trust_remote_code,
        "chat_template_kwargs": template_variables,
        "start_sha256": adapter_sha256(start) if start else None,
        "trainable_parameters": sum(parameter.numel() for parameter in trainable_parameters),
    }
    return Policy(model, tokenizer, eos_token_ids, engine, record, start)


def check_engines(config: RunConfig) -> None:
    """Check that the engine and the sampling backend are installed and work together. Does not import torch.

    Args:
        config: with the engine and the backend that `auto` means for the run's task and model.

    Raises:
        UserError: they cannot be used on this machine.
    """
    starts_vllm = config.sampling.backend == "vllm" and not config.sampling.server_url
    if starts_vllm and not vllm_available():
        extra = "gpu" if config.model.engine == "unsloth" else vllm_extra()
        raise _not_installed("--sampling.backend", "vllm", extra)
    if config.model.engine == "unsloth" and not find_spec("unsloth"):
        raise _not_installed("--model.engine", "unsloth", "gpu")
    if sampler_kind(config) == "vllm" and config.model.loaded_bits == 4 and uses_gpu(config):
        check_vllm_quantizes()
    if starts_vllm and not vllm_serves(config):
        raise UserError(
            "--sampling.backend vllm computes 4-bit layers in bfloat16, and the trainer in float16 on this GPU; pass "
            "--sampling.backend transformers or --model.bits 16"
        )


def _not_installed(flag: str, value: str, extra: str) -> UserError:
    return UserError(
        f"{flag} {value} needs a package that is not installed; run `{install_command(f'lora-grpo[{extra}]')}` (on a "
        f"CPU: `make engines`), or pass {flag} auto"
    )


def load_tokenizer(config: RunConfig, *, dry_run: bool = False, resumed: bool = False) -> Any:
    """Return the tokenizer of a run before its model is loaded, with the chat template of `prepare_tokenizer`.

    Args:
        dry_run: whether no model will be loaded. The engine need not be installed then.
        resumed: as in `load_policy`.
    """
    if not dry_run:
        _import_engine(config)
    tokenizer = base_model.load_tokenizer(config.model)
    prepare_tokenizer(tokenizer, config, start_folder(config, resumed=resumed), quiet=not dry_run)
    return tokenizer


def _import_engine(config: RunConfig) -> str:
    """Import and seed the libraries of the training engine in the order that they require. Return the engine's name."""
    use_one_gpu()
    engine = choose_engine(config)
    if engine == "unsloth":
        with engines.starting("Unsloth", instead=unsloth_policy.OTHER_ENGINE):
            unsloth_policy.import_unsloth()
    engines.prepare_torch(config.seed)
    return engine


def _check_gpu(config: RunConfig) -> None:
    """Raise a UserError if the preset is for a GPU and torch sees none."""
    import torch

    if not torch.cuda.is_available() and machine.preset_gigabytes(config.preset):
        raise UserError(
            f"preset {config.preset} needs CUDA, but torch {torch.__version__} sees no GPU; install torch's CUDA build "
            "or a newer driver, or pass --preset starter"
        )


def _warn_of_another_end(name: str, tokenizer: Any, eos_token_ids: list[int]) -> None:
    """Print a warning if the chat template ends an answer with a token that is not one of the model's ends."""
    template_end = chat.end_of_turn(tokenizer)
    if not template_end or tokenizer.convert_tokens_to_ids(template_end) in eos_token_ids:
        return
    ends = ", ".join(tokenizer.decode(token_id) for token_id in eos_token_ids)
    console.note(
        f"warning: the chat template of {name} ends an answer with {template_end}, which is not one of its EOS tokens "
        f"({ends}), so completions may run to their maximum length; correct eos_token_id in generation_config.json"
    )


def _device_name(device: Any) -> str:
    """Return the name of a GPU, such as `NVIDIA T4`, or `cpu`."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def save_adapter(model: Any, tokenizer: Any, path: Path) -> None:
    """Save the adapter and the tokenizer atomically, replacing an existing folder."""
    with atomic.new_folder(path) as folder:
        model.save_pretrained(folder, selected_adapters=["default"])
        tokenizer.save_pretrained(folder)
        # PEFT's model card is only a template that contains the local path of the base.
        (folder / "README.md").unlink(missing_ok=True)
        (folder / ADAPTER_WEIGHTS).chmod(0o644)
        # PEFT writes the set of targets in hash order, which differs between processes.
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if isinstance(settings["target_modules"], list):
            settings["target_modules"].sort()
        atomic.write_json(folder / ADAPTER_CONFIG, settings)


def load_adapter(model: Any, path: Path) -> None:
    """Load the weights of a saved adapter into a model with an adapter of the same shape, or raise a UserError."""
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path / ADAPTER_WEIGHTS)
        non_finite = [f"{name} is NaN or infinite" for name, weight in weights.items() if not weight.isfinite().all()]
        mismatches = set_peft_model_state_dict(model, weights)  # names of missing and of unexpected weights
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the adapter in {path} does not fit this base: {reason}") from error

    # PEFT also lists the weights of the base as missing. The names of the adapter's have LoRA's prefix and `default`.
    missing = [name for name in mismatches.missing_keys if ".lora_" in name and ".default" in name]
    problems = [*mismatches.unexpected_keys, *missing, *non_finite]
    if problems:
        raise UserError(
            f"the adapter in {path} does not fit this base or is damaged: {problems[0]}; pass another adapter or its "
            "base"
        )
