"""The base model: load it in 4 or 16 bits, with its tokenizer, and keep its weights frozen."""

import contextlib
from collections.abc import Iterator
from typing import Any

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError, first_line
from lora_grpo.models.engines import silence_libraries
from lora_grpo.models.model_files import source


def load_base(settings: ModelConfig) -> Any:
    """Load the model without an adapter, on the GPU if one is available.

    In 4 bits, bitsandbytes stores every linear layer except the head as NF4: 4 bits a weight, with one scale for each
    block of 64 weights, which is itself quantized to 8 bits ("double quantization"). A layer dequantizes its weights
    to the dtype of the activations in every forward pass. Source: QLoRA, arXiv:2305.14314.

    Raises:
        UserError: files are missing or damaged, or the memory is too small.
    """
    import torch
    from transformers import AutoConfig, BitsAndBytesConfig

    dtype = compute_dtype()
    quantization = None
    if settings.loaded_bits == 4:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    device: str | int = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    folder = source(settings.name)
    options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    with loading(f"the model {settings.name}"):
        config = AutoConfig.from_pretrained(folder, **options)
        model = auto_class(config).from_pretrained(
            folder,
            quantization_config=quantization,
            dtype=dtype,
            attn_implementation=attention_implementation(config),
            device_map={"": device},
            use_safetensors=True,
            **options,
        )
    keep_frozen(model)
    return text_only(model)


def compute_dtype() -> Any:
    """Return the dtype of activations: float32 on a CPU, bfloat16 on a GPU that supports it, else float16."""
    import torch

    if not torch.cuda.is_available():
        return torch.float32
    # Older GPUs (T4, RTX 20) emulate bfloat16, which is slow.
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def auto_class(config: Any) -> Any:
    """Return transformers' class for a configuration: the multimodal class, if any, because vLLM expects its names."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM


def attention_implementation(config: Any) -> str | None:
    """Return "eager" for a model that caps its attention scores, as Gemma 2 does, else None: transformers chooses.

    PyTorch's sdpa has no cap. transformers 5.17 chooses sdpa all the same and leaves the cap out, which changes every
    logprob; 5.24 chooses eager.
    """
    has_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if has_cap else None


def text_only(model: Any) -> Any:
    """Remove the parts of a multimodal model that read images or sound, and return the model."""
    # The base model of a multimodal model consists of the decoder and of parts for images and sound. That of a text
    # model is the decoder itself.
    parts = dict(model.base_model.named_children())
    decoder = model.get_decoder()
    is_multimodal = decoder in parts.values()
    if is_multimodal:
        for name, part in parts.items():
            if part is not decoder:
                setattr(model.base_model, name, None)
    return model


def base_of(model: Any) -> Any:
    """Return the base of a PEFT model, or any other model itself."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def load_tokenizer(settings: ModelConfig) -> Any:
    """Load the tokenizer of a model, or raise a UserError."""
    silence_libraries()
    from transformers import AutoTokenizer

    with loading(f"the tokenizer of {settings.name}"):
        tokenizer = AutoTokenizer.from_pretrained(
            source(settings.name), revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    if not tokenizer("a")["input_ids"]:  # transformers creates an empty tokenizer if the files are missing
        raise UserError(f"the tokenizer of {settings.name} cannot be loaded: it has no vocabulary")
    return tokenizer


def is_float32(model: Any) -> bool:
    """Return whether a model computes in float32.

    Layers in bitsandbytes' 4 bits can compute in float32. Other quantized layers round their activations in any dtype.
    """
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None and not getattr(quantization, "load_in_4bit", False):
        return False
    return model.get_output_embeddings().weight.dtype.itemsize == 4


def keep_frozen(model: Any) -> None:
    """Prevent bitsandbytes (0.50) from repacking 4-bit weights in place.

    On a CPU with AVX512-BF16, the first forward pass of a 4-bit layer in eval mode permanently rounds its block scales
    to bfloat16, and switches the layer to a kernel without a backward pass.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


@contextlib.contextmanager
def loading(description: str) -> Iterator[None]:
    """Turn every error in a `with` block that loads something from files into one line with its description."""
    try:
        yield
    except Exception as error:  # missing and damaged files, wrong values and too little memory raise many types
        from safetensors import SafetensorError

        fix = ""
        if isinstance(error, SafetensorError):
            fix = "; its weights are incomplete: download it again, or run `git lfs pull` in a clone of it"
        if "python -m bitsandbytes" in str(error):  # a missing CUDA library, which is only reported on use
            fix = "; run `python -m bitsandbytes`, or load 16 bits"
        raise UserError(f"{description} cannot be loaded: {first_line(error)}{fix}") from error
