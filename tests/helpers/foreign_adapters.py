"""Adapter folders as other tools write them, made from one adapter of PEFT.

Each function is named after the tool. Its docstring names the source of the format.
"""

import dataclasses
import json
import re
import shutil

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def write(folder, settings, weights, file=WEIGHTS):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2))
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / file, metadata={"format": "pt"})
    return folder


def read(adapter):
    return json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)


def renamed(adapter, folder, rename, **changes):
    """Write PEFT's adapter with other keys."""
    settings, weights = read(adapter)
    return write(folder, {**settings, **changes}, {rename(name): weight for name, weight in weights.items()})


def named(key, adapter_name="default"):
    """Return a key with the name of the adapter, as a PEFT model has it."""
    return re.sub(r"(lora_[AB])", rf"\1.{adapter_name}", key)


# In PEFT's format, with files beside it that do not matter.


def peft(adapter, folder):
    return shutil.copytree(adapter, folder)


def trl_checkpoint(adapter, folder):
    """transformers' Trainer saves a checkpoint so: transformers/trainer.py, `_save_checkpoint` (5.24)."""
    shutil.copytree(adapter, folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "README.md"):
        (folder / name).write_bytes(b"\x80")
    (folder / "trainer_state.json").write_text("{}")
    return folder


UNSLOTH_REGEX = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense|mixer).*?\.(?:q_proj|v_proj"
    r"|down_proj))|(?:\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:self_attn|attention|attn|mixer|mlp"
    r"|feed_forward|ffn|dense|mixer).*?\.(?:(?:q_proj|v_proj|down_proj)))"
)
"""What `get_peft_regex(model, finetune_vision_layers=False, target_modules=["q_proj", "v_proj", "down_proj"])` of
unsloth_zoo/peft_utils.py (2026.10) returns for the bundled model."""


def unsloth(adapter, folder):
    """unsloth/models/vision.py, `get_peft_model` (2026.10)."""
    automatic = {"base_model_class": "Qwen2ForCausalLM", "parent_library": "transformers", "unsloth_fixed": True}
    return renamed(adapter, folder, str, target_modules=UNSLOTH_REGEX, auto_mapping=automatic)


def llama_factory(adapter, folder):
    """src/llamafactory/train/callbacks.py: the value head of PPO and reward models is beside the adapter (0.9)."""
    shutil.copytree(adapter, folder)
    save_file({"v_head.summary.weight": torch.ones(1, 4)}, folder / "value_head.safetensors")
    for name in ("all_results.json", "train_results.json", "trainer_state.json"):
        (folder / name).write_text("{}")
    return folder


def ms_swift(adapter, folder):
    """swift/tuners/peft.py, `LoraConfig.save_pretrained`, and swift/trainers/mixin.py, `_save` (4.6)."""
    shutil.copytree(adapter, folder)
    more = {"lora_dtype": None, "lorap_lr_ratio": None, "lorap_emb_lr": 1e-06}
    (folder / "additional_config.json").write_text(json.dumps(more))
    (folder / "args.json").write_text(json.dumps({"tuner_type": "lora"}))
    return folder


def axolotl(adapter, folder):
    """src/axolotl/train.py: the configurations of the base are in the same folder (0.18)."""
    shutil.copytree(adapter, folder)
    base = json.loads((adapter / CONFIG).read_text())["base_model_name_or_path"]
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "_name_or_path": base}))
    (folder / "checkpoint-5").mkdir()
    shutil.copy(adapter / CONFIG, folder / "checkpoint-5")
    return folder


def verl(adapter, folder):
    """verl/workers/fsdp_workers.py, `save_checkpoint`: asdict of the configuration, in `lora_adapter` (0.8)."""
    settings, weights = read(adapter)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings["r"],
        lora_alpha=settings["lora_alpha"],
        target_modules=settings["target_modules"],
        bias="none",
    )
    values = dataclasses.asdict(config)
    values["task_type"] = values["task_type"].value if hasattr(values["task_type"], "value") else values["task_type"]
    values["peft_type"] = values["peft_type"].value
    values["target_modules"] = list(values["target_modules"])
    values["base_model_name_or_path"] = settings["base_model_name_or_path"]
    return write(folder / "lora_adapter", values, weights)


def torchtune(adapter, folder):
    """torchtune/training/checkpointing/_checkpointer.py and models/convert_weights.py (0.7): four settings."""
    settings, weights = read(adapter)
    names = ("r", "lora_alpha", "target_modules", "peft_type", "base_model_name_or_path")
    write(folder, {name: settings[name] for name in names}, weights)
    (folder / "adapter_model.pt").write_bytes(b"\x80")
    return folder


# With other keys.


def areal(adapter, folder):
    """areal/engine/fsdp_engine.py, `_save_lora_to_hf`, in July 2026: no prefix, and the name of the adapter."""
    return renamed(adapter, folder, lambda key: named(key).removeprefix(PREFIX))


def relax(adapter, folder):
    """`write_hf_peft_adapter` of Relax in July 2026: no prefix."""
    return renamed(adapter, folder, lambda key: key.removeprefix(PREFIX))


def soup(adapter, folder):
    """Soup with use_fsdp2_compile, in July 2026: the wrapper of torch.compile before all keys."""
    return renamed(adapter, folder, lambda key: f"_orig_mod.{key}")


def compiled_layers(adapter, folder):
    """The keys of a PEFT model whose layers torch.compile has wrapped: `named_parameters` of an OptimizedModule."""
    return renamed(adapter, folder, lambda key: named(re.sub(r"(layers\.\d+\.)", r"\1_orig_mod.", key)))


def fsdp(adapter, folder):
    """The keys of `named_parameters` under FSDP and activation checkpointing (torch 2.13)."""
    wrapped = r"\1_fsdp_wrapped_module._checkpoint_wrapped_module."
    return renamed(
        adapter, folder, lambda key: "_fsdp_wrapped_module." + named(re.sub(r"(layers\.\d+\.)", wrapped, key))
    )


def ddp(adapter, folder):
    """The keys of a state dict of DistributedDataParallel, with another adapter name."""
    return renamed(adapter, folder, lambda key: "module." + named(key, "policy"))


def swift_model(adapter, folder):
    """swift/tuners/base.py, `SwiftModel.save_pretrained`, with the settings of swift/tuners/lora.py (4.6)."""
    more = {
        **{"swift_type": "LORA", "model_key_mapping": None, "use_qa_lora": False, "use_merged_linear": False},
        **{"enable_lora": None, "lora_dtype": None, "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-06},
    }
    renamed(adapter, folder / "default", lambda key: named(key).removeprefix(PREFIX), **more)
    (folder / "configuration.json").write_text("{}")
    return folder / "default"


# mlx-lm.


def mlx(adapter, folder, *, kind="lora", **changes):
    """mlx_lm/lora.py and mlx_lm/tuner/lora.py, dora.py (0.32): transposed matrices, and a scale."""
    settings, weights = read(adapter)
    scale = settings["lora_alpha"] / settings["r"]
    config = {
        "model": settings["base_model_name_or_path"],
        "fine_tune_type": kind,
        "num_layers": 16,
        "lora_parameters": {"rank": settings["r"], "dropout": 0.0, "scale": scale},
        "adapter_path": "adapters",
        "optimizer": "adam",
        **changes,
    }
    parts = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b", ".lora_magnitude_vector": ".m"}
    tensors = {}
    for key, weight in weights.items():
        [part] = [part for part in parts if key.endswith(part)]
        tensors[key.removeprefix(PREFIX).removesuffix(part) + parts[part]] = weight.T if weight.ndim == 2 else weight
    return write(folder, config, tensors, "adapters.safetensors")


def mlx_by_unsloth(adapter, folder):
    """unsloth_zoo/mlx/utils.py, `_enrich_mlx_adapter_config` (2026.8): mlx-lm's format with more settings."""
    settings, _ = read(adapter)
    rank = settings["r"]
    base = settings["base_model_name_or_path"]
    more = {"peft_type": "LORA", "rank": rank, "base_model_name_or_path": base, "model": None}
    return mlx(adapter, folder, **more)
