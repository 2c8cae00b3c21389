"""Which models can be trained, decided from config.json alone: no weights, no torch.

docs/models.md lists the results for each architecture, and tests/models/test_architectures.py measures them.
"""

from collections.abc import Mapping
from typing import Any

from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.hardware import vllm_version
from lora_grpo.tasks import has_conversations

TRAINABLE = (
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3"),
    *("gemma3_text", "gemma4", "gemma4_text", "glm", "glm4", "gpt_neox", "gpt_oss", "granite", "granitemoehybrid"),
    *("helium", "lfm2", "llama", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "nemotron", "olmo"),
    *("olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_text"),
    *("qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
"""Values of `model_type` that passed the tests."""

ONLY_PEFT = ("gemma3", "gemma4", "gemma4_text", "granitemoehybrid", "lfm2", "mistral3", "qwen3_5", "qwen3_5_text")
"""Types that were not tested with Unsloth."""

_IN_VLLM_SINCE = {"ministral3": (0, 30), "mistral3": (0, 31)}
"""Types that older versions of vLLM do not load, or for which they compute other logits (docs/models.md)."""

HAVE_EXPERTS = ("mixtral", "olmoe", "qwen3_moe")
"""Mixtures of experts. An adapter for every expert would have as many parameters as a small model (PEFT 0.21 makes one
for `all-linear`), so only attention is adapted."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def in_vllm(model_type: Any) -> bool:
    """Return whether the installed vLLM computes the logits of a type of model."""
    since = _IN_VLLM_SINCE.get(model_type)
    return since is None or (vllm_version() or (0, 0)) >= since


def with_supported(config: RunConfig, model_type: Any) -> RunConfig:
    """Return the configuration with `auto` resolved for what Unsloth or vLLM does not support."""
    needs_peft = model_type in ONLY_PEFT or has_conversations(config) or config.teacher.name is not None
    if config.model.engine == "auto" and needs_peft:
        config = replace(config, {"model": {"engine": "peft"}})
    if config.sampling.backend == "auto" and not in_vllm(model_type):
        config = replace(config, {"sampling": {"backend": "transformers"}})
    return config


def check_architecture(
    config: Mapping[str, Any], settings: ModelConfig, engine: str, *, role: str = "be trained"
) -> None:
    """Check from its config.json that a model can be trained, or be a teacher, or that its code is trusted.

    Args:
        role: what it would do, for the message.

    Raises:
        UserError: it cannot.
    """
    model_type = config.get("model_type")
    needs_its_code = model_type not in TRAINABLE and config.get("auto_map")
    stored_format = _stored_format(config.get("quantization_config"))
    fix = "pass another model, such as a Llama or Qwen model (docs/models.md lists all types)"
    if stored_format is not None:
        reason = f"its weights are stored in {stored_format}, not in bitsandbytes' 4 bits"
        fix = "pass the 16-bit model"
    elif needs_its_code and settings.trust_remote_code:
        return
    elif needs_its_code:
        reason = "it needs Python code from its repository"
        fix = "read it, then pass --model.trust-remote-code"
    elif engine == "unsloth" and model_type in ONLY_PEFT:
        reason = "with Unsloth, it has not been tested"
        fix = "pass --model.engine peft"
    elif config.get("is_encoder_decoder"):
        reason = "it is an encoder-decoder model, and only decoder-only models are supported"
    elif not model_type:
        reason = "its config.json has no model_type"
    elif model_type not in TRAINABLE:
        reason = "it has not been tested"
    else:
        return
    if not model_type:
        raise UserError(f"{settings.name} cannot {role}: {reason}; {fix}")
    raise UserError(f"{settings.name} is a model of type {model_type}, which cannot {role}: {reason}; {fix}")


def _stored_format(quantization: Any) -> Any:
    """Return the format of the stored weights if it is one that cannot be trained; None for 16 bits and for NF4."""
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        return "an unknown format"
    return None if quantization.get("load_in_4bit") else str(quantization.get("quant_method"))
