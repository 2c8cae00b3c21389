"""The policy: a frozen base model with a trainable LoRA adapter. Only this module imports Unsloth.

An adapter is saved in the folder format of PEFT, which vLLM and Unsloth also read.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lora_grpo import console, distributed
from lora_grpo.config import RunConfig, batch_shape, replace
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.files import atomic
from lora_grpo.hardware import choose_engine, machine, use_one_gpu, uses_vllm, vllm_available
from lora_grpo.models import base_model, model_files
from lora_grpo.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_sha256
from lora_grpo.models.architectures import ATTENTION, HAVE_EXPERTS
from lora_grpo.models.base_model import require_compiler, starting
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


_PEFT = "--model.engine peft"


def check_model(config: RunConfig) -> None:
    """Check that the model folder and the engines can be used, or raise a UserError. Does not import torch."""
    model_files.check_folder(config.model.name, "--model.name")
    with_vllm = config.sampling.backend == "vllm" and not config.sampling.server_url
    missing = "--model.engine unsloth" if config.model.engine == "unsloth" and not find_spec("unsloth") else ""
    missing = "--sampling.backend vllm" if with_vllm and not vllm_available() else missing
    if missing:
        raise UserError(
            f"{missing} needs a package that is not installed; run `pip install 'lora-grpo[gpu]'` (on a CPU: `make "
            f"engines`), or pass {missing.partition(' ')[0]} auto"
        )


def load_tokenizer(config: RunConfig, *, dry_run: bool = False, resumed: bool = False) -> Any:
    """Return the tokenizer of a run before its model is loaded, with the chat template of `prepare_tokenizer`.

    `dry_run`: no model follows, so that the engine need not be installed. `resumed`: as in `load_policy`.
    """
    if not dry_run:
        _import_engine(config)
    tokenizer = base_model.load_tokenizer(config.model)
    prepare_tokenizer(tokenizer, config, start_folder(config, resumed=resumed), quiet=not dry_run)
    return tokenizer


def load_policy(config: RunConfig, *, resumed: bool = False) -> Policy:
    """Load the base model with a new, seeded adapter, or with the one that the run starts from.

    `resumed`: whether the folder contains the run, with its copy of that adapter. Raises UserError if a file is missing
    or damaged, or the adapter does not fit the base.
    """
    start = start_folder(config, resumed=resumed)
    engine = _import_engine(config)
    distributed.join()
    import torch

    if not torch.cuda.is_available() and machine.preset_gigabytes(config.preset):
        raise UserError(
            f"preset {config.preset} needs CUDA, but torch {torch.__version__} sees no GPU; install torch's CUDA build "
            "or a newer driver, or pass --preset starter"
        )
    # Unsloth (2026.10) ignores a revision if vLLM samples, so engines get the folder of the commit.
    folder, commit = model_files.find(config.model.name, config.model.revision)
    local = replace(config, {"model": {"name": str(folder), "revision": None}})
    if engine == "unsloth":
        # Unsloth also starts vLLM, if vLLM samples, and its errors do not tell which of the two failed.
        with starting("Unsloth", instead=_PEFT):
            model, tokenizer = _load_unsloth(local)
    else:
        model, tokenizer = _load_peft(local)
    variables = prepare_tokenizer(tokenizer, config, start)
    if not getattr(tokenizer, "chat_template", None):
        console.note(
            f"note: {config.model.name} has no chat template, so prompts are plain text (`Question: ...`, `Answer:`); "
            "for chat prompts, pass an instruct model"
        )
    base = model.get_base_model()
    if start:
        load_adapter(model, start)
    base_model.keep_frozen(model)
    eos_token_ids = base_model.eos_token_ids(local.model, tokenizer, config.model.name)
    # Read by TRL. The model that Unsloth builds from vLLM's weights has only the token in config.json.
    base.generation_config.eos_token_id = eos_token_ids
    saved = model.peft_config["default"]
    saved.base_model_name_or_path, saved.revision = model_files.source(config.model.name), commit
    if (end := chat.end_of_turn(tokenizer)) and tokenizer.convert_tokens_to_ids(end) not in eos_token_ids:
        console.note(
            f"warning: the chat template of {config.model.name} ends an answer with {end}, which is not one of its EOS "
            f"tokens ({', '.join(map(tokenizer.decode, eos_token_ids))}), so completions may run to their maximum "
            "length; correct eos_token_id in generation_config.json"
        )
    device = next(model.parameters()).device
    record = {
        "base_model": config.model.name,
        "revision": commit,
        "fingerprint": None if commit else model_files.weights_fingerprint(folder),
        "engine": engine,
        "bits": config.model.bits,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "trust_remote_code": config.model.trust_remote_code,
        "chat_template_kwargs": variables,
        "start_sha256": start and adapter_sha256(start),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    return Policy(model, tokenizer, eos_token_ids, engine, record, start)


def _import_engine(config: RunConfig) -> str:
    """Import and seed the libraries of the training engine, in the order that they need, and return its name."""
    use_one_gpu()
    engine = choose_engine(config)
    if engine == "unsloth":
        with starting("Unsloth", instead=_PEFT):
            _import_unsloth()
    base_model.prepare_torch(config.seed)
    return engine


def save_adapter(model: Any, tokenizer: Any, path: Path) -> None:
    """Save the adapter and the tokenizer atomically, replacing an existing folder."""
    with atomic.new_folder(path) as folder:
        model.save_pretrained(folder, selected_adapters=["default"])
        tokenizer.save_pretrained(folder)
        # PEFT's model card is only a template that contains the local path of the base.
        (folder / "README.md").unlink(missing_ok=True)
        (folder / ADAPTER_WEIGHTS).chmod(0o644)
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        # PEFT writes this set in hash order, which differs between processes.
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
        broken = [f"{name} is NaN or infinite" for name, weight in weights.items() if not weight.isfinite().all()]
        loaded = set_peft_model_state_dict(model, weights)
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the adapter in {path} does not fit this base: {reason}") from error
    missing = [name for name in loaded.missing_keys if ".lora_" in name and ".default" in name]
    if wrong := [*missing, *loaded.unexpected_keys, *broken]:
        raise UserError(
            f"the adapter in {path} does not fit this base or is damaged: {wrong[0]}; pass another adapter or its base"
        )


def _load_peft(config: RunConfig) -> tuple[Any, Any]:
    import torch
    from peft import LoraConfig, get_peft_model

    base = base_model.load_base(config.model)
    _disable_dropout(base)
    targets: str | list[str] = list(config.lora.targets)
    if targets == ["all-linear"]:
        targets = list(ATTENTION) if base.config.model_type in HAVE_EXPERTS else "all-linear"
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **_lora_options(config))
    given = f"--lora.targets {' '.join(config.lora.targets)}"
    torch.manual_seed(config.seed)
    try:
        model = get_peft_model(base, adapter)
    except ValueError as error:
        raise UserError(f"{given}: {first_line(error)}") from None
    # PEFT (0.21) adapts stacked experts if a target names one of their parts.
    if model.peft_config["default"].target_parameters:
        raise UserError(f"{given}: experts cannot be adapted; pass {' '.join(ATTENTION)}")
    # PEFT (0.21) ignores a target without a module if another one has some.
    adapted = [f".{name}" for name, module in base.named_modules() if hasattr(module, "lora_A")]
    for target in config.lora.targets:
        if target != "all-linear" and not any(name.endswith(f".{target}") for name in adapted):
            raise UserError(f"--lora.targets {target} names no linear layer of this model")
    # Where the adapter is used, the model may have its other parts, with layers of the same names.
    if removed := [name for name, part in base.base_model._modules.items() if part is None]:
        model.peft_config["default"].exclude_modules = rf".*\b({'|'.join(removed)})\..*"
    return model, base_model.load_tokenizer(config.model)


def _disable_dropout(base: Any) -> None:
    """Set all dropout of the frozen base to zero. It would make the trainer's logprobs differ from the sampler's."""
    from torch.nn import Dropout

    for part in (base.config, *base.modules()):
        for name, value in vars(part).items():
            if isinstance(value, float) and (name.endswith("dropout") or (name == "p" and isinstance(part, Dropout))):
                setattr(part, name, 0.0)


def _lora_options(config: RunConfig) -> dict[str, Any]:
    lora = config.lora
    options = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    return options | {"use_rslora": lora.rslora, "use_dora": lora.dora}


def _import_unsloth() -> None:
    # Unsloth patches trl, transformers and peft on import, and only warns if they were imported first. It also reads
    # these variables on import. In standby mode, training uses vLLM's memory between rollouts, and the second one keeps
    # it from overriding gpu_memory_utilization. Where nvcc is installed, Unsloth forces FlashInfer's sampler, which
    # makes vLLM 0.27 fail below compute capability 8.0 (T4); it is never used, as requests have seeds or logprobs.
    for name in ("STANDBY", "STANDBY_UTIL_OVERRIDE", "NO_FLASHINFER"):
        os.environ.setdefault(f"UNSLOTH_VLLM_{name}", "1")
    os.environ.setdefault("VLLM_WSL2_ENABLE_PIN_MEMORY", "1")  # see sampling/vllm_sampler.py
    # Otherwise Unsloth counts users: each start downloads files named after the machine's kind and memory.
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    # Generated trainers, by default in the working directory. Unsloth keeps its other caches here.
    generated = Path("~/.cache/unsloth/unsloth_compiled_cache").expanduser()
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(generated))
    base_model.hide_flashinfer()
    import unsloth  # noqa: F401

    _compile_one_chunk()


def _compile_one_chunk() -> None:
    """Have Unsloth's loss pass compile the logprobs of one chunk of tokens, and recompute its logits for the gradient.

    By default, unsloth_zoo 2026.10.7 compiles a graph with 4 chunks per completion, which takes minutes to trace, and
    keeps the logits of all of them. Losses and gradients are equal (tests/gpu_rig).
    """
    from unsloth_zoo import rl_replacements

    # The variable is read by the pass with gradients only. Both passes import the function by name in every call.
    if os.environ.setdefault("UNSLOTH_GRPO_LOGPROB_RECOMPUTE", "1") == "1":
        name = "chunked_hidden_states_selective_log_softmax"
        setattr(rl_replacements, name, getattr(rl_replacements, f"{name}_recompute"))


def _load_unsloth(config: RunConfig) -> tuple[Any, Any]:
    import torch
    from unsloth import FastLanguageModel

    options: dict[str, Any] = {}
    if torch.cuda.is_available():
        require_compiler(feature="--model.engine unsloth", otherwise=f"pass {_PEFT}")
        if uses_vllm(config):
            completions = batch_shape(config).parallel_samples
            options = {
                "fast_inference": True,
                "max_lora_rank": config.lora.rank,
                # Otherwise Unsloth decodes 8 or 16 at once on most GPUs. It treats its default of 256 as not set.
                "max_num_seqs": completions + (completions == 256),
            }
            if (share := config.model.gpu_memory_share) is not None:  # set by the plan
                # Unsloth expects a fraction of the free memory, and gives vLLM the same fraction of the total memory.
                free, total = torch.cuda.mem_get_info()
                options["gpu_memory_utilization"] = share * total / free
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=config.model.name,
        max_seq_length=config.model.max_sequence_tokens,
        load_in_4bit=config.model.bits == 4,
        dtype=base_model.compute_dtype(),
        trust_remote_code=config.model.trust_remote_code,
        use_exact_model_name=True,  # otherwise Unsloth looks for its own copy of the model on the internet
        **options,
    )
    vllm = getattr(model, "vllm_engine", None)
    if vllm is not None and (context := vllm.model_config.max_model_len) < config.model.max_sequence_tokens:
        # By its arithmetic, vLLM needs about 0.4 GiB more than planned for 14B parameters, and 1.5 GiB more for 32B.
        raise RunError(
            f"Unsloth limits vLLM to {context} tokens of context, less than --model.max-sequence-tokens, because its "
            f"estimate of the memory is higher than the plan's; pass {_PEFT}"
        )
    _disable_dropout(model)
    all_linear = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(config.seed)
    model = FastLanguageModel.get_peft_model(
        model,
        target_modules=all_linear if config.lora.targets == ("all-linear",) else list(config.lora.targets),
        **_lora_options(config),
        use_gradient_checkpointing="unsloth" if config.train.gradient_checkpointing else False,
        random_state=config.seed,
    )
    if vllm is not None:
        # Unsloth's rollouts write the adapter's settings to this folder, by default in the working directory.
        scratch, load_lora = tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-"), model.load_lora
        model.load_lora = lambda folder, **options: load_lora(str(Path(scratch.name, folder)), **options)
    return model, tokenizer
