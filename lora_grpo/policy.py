"""The policy: a frozen 4-bit base and a LoRA adapter. The only module that knows of Unsloth."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.atomic import sha256
from lora_grpo.config import STARTER, RunConfig
from lora_grpo.engine_samplers import GenerateSampler, SharedVllmSampler
from lora_grpo.errors import RunError, UserError
from lora_grpo.hardware import nvidia_gpus, preset_gigabytes, use_one_gpu
from lora_grpo.merged_copy import MergedCopySampler
from lora_grpo.optional import require
from lora_grpo.rollouts import Sampler


@dataclass
class Policy:
    """A trainable model and everything that says what it is."""

    model: Any
    """A PEFT model; its adapter is called `default`."""
    tokenizer: Any
    eos_token_ids: list[int]
    """Every token that ends a completion."""
    engine: str
    """`peft` or `unsloth`."""
    record: dict[str, Any]
    """What run.json says of it: base model, commit or fingerprint, engine, precision, device."""

    def sampler(self) -> Sampler:
        """Return what draws completions from this policy.

        On a CPU an unpacked copy. On a GPU the model itself; with Unsloth its shared vLLM engine, or its `generate`.
        """
        parts = (self.model, self.tokenizer, self.eos_token_ids)
        if getattr(self.model, "vllm_engine", None) is not None:
            return SharedVllmSampler(*parts)
        if next(self.model.parameters()).device.type == "cpu" and not self.model.peft_config["default"].use_dora:
            return MergedCopySampler(*parts)
        return GenerateSampler(*parts) if self.engine == "unsloth" else Sampler(*parts)


def check_model(config: RunConfig) -> None:
    """Refuse a model folder or an engine that cannot be used here, without importing torch.

    Raises:
        UserError: says what is missing and what installs it.
    """
    name = config.model.name
    if _is_folder_name(name):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise UserError(f"--model.name {name} does not exist; give a model's folder or a Hub id such as owner/name")
        if not (folder / "config.json").is_file():
            raise UserError(f"--model.name {name} holds no config.json; give the folder of a transformers model")
        if not list(folder.glob("*.safetensors")):
            raise UserError(f"--model.name {name} holds no .safetensors weights; pickled weights are not loaded")
    if config.model.engine == "unsloth" and importlib.util.find_spec("unsloth") is None:
        raise UserError(
            "--model.engine unsloth needs the package unsloth; run `pip install -e .[gpu]` "
            "(on a CPU: `make engines`), or pass --model.engine peft"
        )


def load_policy(config: RunConfig) -> Policy:
    """Load the base model and put a fresh, seeded adapter on it.

    Raises:
        UserError: the model cannot be found or read, or the engine is not installed.
    """
    # OpenMP's threads spin while they wait, unless told otherwise before torch loads it. On cores that something else
    # wants too, spinning is many times slower; on idle ones it gains next to nothing (docs/benchmarks.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    use_one_gpu()
    engine = config.model.engine
    if engine == "auto":
        engine = "unsloth" if nvidia_gpus()[0] and importlib.util.find_spec("unsloth") else "peft"
    if engine == "unsloth":
        _import_unsloth()

    import torch
    from safetensors import SafetensorError

    if preset_gigabytes(config.preset) and not torch.cuda.is_available():
        raise UserError(
            f"preset {config.preset} needs CUDA, but torch {torch.__version__} sees no GPU while nvidia-smi does; "
            "install torch's CUDA build or a newer driver, or pass --preset starter"
        )
    _quieten()
    _make_repeatable(config.seed)
    path = _source(config)
    try:
        model, tokenizer = (_load_unsloth if engine == "unsloth" else _load_peft)(config, path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"--model.name {config.model.name} cannot be loaded: {_first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    _keep_base_frozen(model)
    base = model.get_base_model()
    device = next(model.parameters()).device
    declared = base.generation_config.eos_token_id
    ends = [declared] if isinstance(declared, int) else list(declared or [])
    ends = sorted({*ends, tokenizer.eos_token_id} - {None})
    if not ends:
        raise RunError(f"{config.model.name} declares no end-of-sequence token; its completions would never end")
    record = {
        "base_model": config.model.name,
        "revision": getattr(base.config, "_commit_hash", None),
        "fingerprint": weights_fingerprint(Path(path)) if Path(path).is_dir() else None,
        "engine": engine,
        "bits": config.model.bits,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "trust_remote_code": config.model.trust_remote_code,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    return Policy(model, tokenizer, ends, engine, record)


def load_tokenizer(config: RunConfig) -> Any:
    """Load the base model's tokenizer alone.

    Raises:
        UserError: it cannot be found or read.
    """
    from transformers import AutoTokenizer

    path = _source(config)
    try:
        return AutoTokenizer.from_pretrained(
            path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer of {config.model.name} cannot be loaded: {_first_line(error)}") from error


def weights_fingerprint(folder: Path) -> str:
    """Return one SHA-256 over the names and bytes of a folder's safetensors files."""
    files = {file.name: sha256(file) for file in sorted(folder.glob("*.safetensors"))}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def compute_dtype() -> Any:
    """Return the dtype of activations: float32 on a CPU, bfloat16 on a GPU that has it, else float16."""
    import torch

    if not torch.cuda.is_available():
        return torch.float32
    # Older cards (T4, RTX 20) emulate bfloat16, slowly.
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _load_peft(config: RunConfig, path: str) -> tuple[Any, Any]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = compute_dtype()
    quantisation = None
    if config.model.bits == 4:
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    device = {"": torch.cuda.current_device()} if torch.cuda.is_available() else {"": "cpu"}
    base = AutoModelForCausalLM.from_pretrained(
        path,
        revision=config.model.revision,
        quantization_config=quantisation,
        dtype=dtype,
        device_map=device,
        use_safetensors=True,
        trust_remote_code=config.model.trust_remote_code,
    )
    targets = config.lora.targets[0] if config.lora.targets == ("all-linear",) else list(config.lora.targets)
    adapter = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=targets,
        **_lora_options(config),
    )
    torch.manual_seed(config.seed)
    return get_peft_model(base, adapter), load_tokenizer(config)


def _lora_options(config: RunConfig) -> dict[str, Any]:
    """Return what PEFT's LoraConfig and Unsloth's get_peft_model call by the same names."""
    return {
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": config.lora.dropout,
        "use_rslora": config.lora.rslora,
        "use_dora": config.lora.dora,
    }


def _import_unsloth() -> None:
    # Unsloth patches trl, transformers and peft as it is imported and only warns when it comes after them.
    # Standby mode (vLLM's memory lent to training between rollouts) is read from the environment at import.
    os.environ.setdefault("UNSLOTH_VLLM_STANDBY", "1")
    require("unsloth", extra="gpu", feature="--model.engine unsloth")


def _load_unsloth(config: RunConfig, path: str) -> tuple[Any, Any]:
    import torch
    from unsloth import FastLanguageModel

    on_gpu = torch.cuda.is_available()
    fast = on_gpu and importlib.util.find_spec("vllm") is not None
    options: dict[str, Any] = {}
    if fast:
        options = {
            "fast_inference": True,
            "gpu_memory_utilization": config.model.gpu_memory_share,
            "max_lora_rank": config.lora.rank,
        }
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=path,
        max_seq_length=config.model.max_sequence_tokens,
        load_in_4bit=config.model.bits == 4,
        dtype=compute_dtype(),
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
        # Otherwise Unsloth takes its own mirror of a known model and leaves the revision out.
        use_exact_model_name=True,
        **options,
    )
    targets = list(config.lora.targets)
    if targets == ["all-linear"]:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(config.seed)
    model = FastLanguageModel.get_peft_model(
        model,
        target_modules=targets,
        **_lora_options(config),
        use_gradient_checkpointing="unsloth" if config.train.gradient_checkpointing else False,
        random_state=config.seed,
    )
    return model, tokenizer


def _quieten() -> None:
    """Drop the libraries' start-up chatter; what they warn of later still shows."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # "Failed to load CPU gemm_4bit_forward": about an optional kernel that only inference uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _make_repeatable(seed: int) -> None:
    """Seed everything; on a CPU also fix the order in which threads add, so that two runs agree in every bit."""
    import torch
    from transformers import set_seed

    set_seed(seed)
    if not torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        # Filling every new tensor with NaN finds bugs and costs time; nothing here reads memory it did not write.
        torch.utils.deterministic.fill_uninitialized_memory = False


def _keep_base_frozen(model: Any) -> None:
    """Stop bitsandbytes (0.50) from repacking 4-bit weights in place.

    On a CPU with AVX512-BF16 its first forward pass in eval mode rounds every block's scale to bfloat16 for good and
    moves the layer to a kernel without a backward pass: the base drifts and the adapter below it stops learning.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _source(config: RunConfig) -> str:
    """Return what `from_pretrained` is given: a folder, or a Hub id."""
    name = config.model.name
    if name == STARTER:
        return str(starter.model_path())
    return str(Path(name).expanduser()) if _is_folder_name(name) else name


def _is_folder_name(name: str) -> bool:
    return name != STARTER and (name.startswith(("/", "./", "../", "~")) or Path(name).exists() or name.count("/") > 1)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
