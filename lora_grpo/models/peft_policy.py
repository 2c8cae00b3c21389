"""Load a policy with transformers, bitsandbytes and PEFT: the engine for every model and machine."""

from typing import Any

from lora_grpo.config import RunConfig
from lora_grpo.errors import UserError, first_line
from lora_grpo.models import base_model
from lora_grpo.models.architectures import ATTENTION, HAVE_EXPERTS


def load_peft(config: RunConfig) -> tuple[Any, Any]:
    """Return the base model with a new, seeded adapter, and its tokenizer.

    PEFT replaces each target layer, y = W x with W of shape (out, in), by

        y = W x + (alpha / r) * B (A x)

    W is frozen, in 4 or 16 bits. A (r, in) and B (out, r) are trained, in float32. A is random and B is zero, so the
    policy begins as the base.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    base = base_model.load_base(config.model)
    disable_dropout(base)

    targets: str | list[str] = list(config.lora.targets)
    if targets == ["all-linear"]:
        has_experts = base.config.model_type in HAVE_EXPERTS
        targets = list(ATTENTION) if has_experts else "all-linear"
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **lora_options(config))
    torch.manual_seed(config.seed)  # for the random A
    flag = f"--lora.targets {' '.join(config.lora.targets)}"
    try:
        model = get_peft_model(base, adapter)
    except ValueError as error:
        raise UserError(f"{flag}: {first_line(error)}") from None

    # PEFT (0.21) adapts stacked experts if a target names one of their parts.
    if model.peft_config["default"].target_parameters:
        raise UserError(f"{flag}: experts cannot be adapted; pass {' '.join(ATTENTION)}")

    # PEFT (0.21) ignores a target without a module if another one has some.
    adapted_modules = [f".{name}" for name, module in base.named_modules() if hasattr(module, "lora_A")]
    for target in config.lora.targets:
        is_adapted = any(name.endswith(f".{target}") for name in adapted_modules)
        if target != "all-linear" and not is_adapted:
            raise UserError(f"--lora.targets {target} names no linear layer of this model")

    # Where the adapter is used, the model may have the parts that `text_only` removed, with layers of the same names.
    removed_parts = [name for name, part in base.base_model._modules.items() if part is None]
    if removed_parts:
        model.peft_config["default"].exclude_modules = rf".*\b({'|'.join(removed_parts)})\..*"
    return model, base_model.load_tokenizer(config.model)


def disable_dropout(base: Any) -> None:
    """Set all dropout of the frozen base to zero. It would make the trainer's logprobs differ from the sampler's."""
    from torch.nn import Dropout

    for owner in (base.config, *base.modules()):
        for name, value in vars(owner).items():
            is_dropout = name.endswith("dropout") or (name == "p" and isinstance(owner, Dropout))
            if is_dropout and isinstance(value, float):
                setattr(owner, name, 0.0)


def lora_options(config: RunConfig) -> dict[str, Any]:
    """Return the settings of an adapter by the names that PEFT and Unsloth have for them."""
    lora = config.lora
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
    }
