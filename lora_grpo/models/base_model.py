"""The base model: set up torch, load the model in 4 or 16 bits and its tokenizer, and keep the weights frozen.

Engines (Unsloth and vLLM) are optional packages; `starting` turns their errors into one line.
"""

import contextlib
import gc
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.models.model_files import source


def prepare_torch(seed: int) -> None:
    """Import and seed torch, silence the libraries, and make results on a CPU deterministic."""
    silence_libraries()
    if is_first := "torch" not in sys.modules:
        gc.disable()  # it takes an eighth of the import time of transformers
    import torch
    from transformers import set_seed
    from transformers.utils import logging as transformers_logging

    if is_first:
        gc.freeze()  # libraries stay, so later collections need not look at them
        gc.enable()
    transformers_logging.disable_progress_bar()
    set_seed(seed)
    if not torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


def silence_libraries() -> None:
    """Silence the messages that libraries log on import. Call this before they are imported."""
    for name in (
        "bitsandbytes.backends.cpu.ops",  # "Failed to load CPU gemm_4bit_forward": a kernel for inference only
        "transformers.tokenization_utils_tokenizers",  # "Ignoring clean_up_tokenization_spaces=True for BPE"
        "torchao",  # "Failed to load ...": GPU kernels. Unsloth installs torchao and transformers imports it
        "torch.utils._pytree",  # "... is deprecated": torchao uses it
    ):
        logging.getLogger(name).setLevel(logging.ERROR)


def compute_dtype() -> Any:
    """Return the dtype of activations: float32 on a CPU, bfloat16 on a GPU that supports it, else float16."""
    import torch

    if not torch.cuda.is_available():
        return torch.float32
    # Older GPUs (T4, RTX 20) emulate bfloat16, which is slow.
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def load_base(settings: ModelConfig) -> Any:
    """Load the model without an adapter, on the GPU if one is available. UserError if files are missing or damaged."""
    import torch
    from transformers import AutoConfig, BitsAndBytesConfig

    dtype, where = compute_dtype(), source(settings.name)
    options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    quantization = None
    if settings.bits == 4:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    with loading(f"the model {settings.name}"):
        config = AutoConfig.from_pretrained(where, **options)
        model = auto_class(config).from_pretrained(
            where,
            quantization_config=quantization,
            dtype=dtype,
            attn_implementation=attention_implementation(config),
            device_map={"": torch.cuda.current_device()} if torch.cuda.is_available() else {"": "cpu"},
            use_safetensors=True,
            **options,
        )
    keep_frozen(model)
    return text_only(model)


def auto_class(config: Any) -> Any:
    """Return transformers' class for a configuration. vLLM expects the names of the multimodal one, if there is one."""
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
    parts, decoder = dict(model.base_model.named_children()), model.get_decoder()
    for name in [name for name, part in parts.items() if decoder in parts.values() and part is not decoder]:
        setattr(model.base_model, name, None)
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


def eos_token_ids(settings: ModelConfig, tokenizer: Any, name: str) -> list[int]:
    """Return the ids of all tokens that end a completion, and set the tokenizer's padding token if it has none.

    They are those of the model's generation config, or those that its config.json implies, and the tokenizer's.
    """
    declared = generation_config(settings, name).eos_token_id
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    ids = sorted({*as_ids(declared), tokenizer.eos_token_id} - {None})
    if not ids:
        raise RunError(f"{name} declares no end-of-sequence token; its completions would never end")
    return ids


def as_ids(declared: Any) -> list[int]:
    """Return the ids in a field of a generation config, which is None, one id or several."""
    if declared is None:
        return []
    return list(declared) if isinstance(declared, (list, tuple)) else [declared]


def generation_config(settings: ModelConfig, name: str) -> Any:
    """Return transformers' GenerationConfig of a model: its file, or what config.json implies if there is none.

    Raises:
        UserError: a file cannot be read; the message has `name`.
    """
    from transformers import AutoConfig, GenerationConfig

    where, revision = source(settings.name), settings.revision
    with loading(f"the generation config of {name}"):
        try:
            return GenerationConfig.from_pretrained(where, revision=revision)
        except OSError:
            if (Path(where) / "generation_config.json").is_file():  # a damaged one
                raise
            config = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=settings.trust_remote_code)
            return GenerationConfig.from_model_config(config)


def is_float32(model: Any) -> bool:
    """Return whether a model computes in float32. Layers in bitsandbytes' 4 bits can; others also round activations."""
    settings = getattr(model.config, "quantization_config", None)
    is_unquantized = settings is None or getattr(settings, "load_in_4bit", False)
    return is_unquantized and model.get_output_embeddings().weight.dtype.itemsize == 4


def keep_frozen(model: Any) -> None:
    """Prevent bitsandbytes (0.50) from repacking 4-bit weights in place.

    On a CPU with AVX512-BF16, its first forward pass in eval mode permanently rounds all block scales to bfloat16, and
    switches the layer to a kernel without a backward pass.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def require_compiler(*, feature: str, otherwise: str) -> None:
    """Raise UserError if the requirements of Triton (3.7) for GPU kernels are not met.

    Triton compiles a small C extension, which fails in the first step or inside vLLM. `feature` needs it, and
    `otherwise` is the alternative, such as "pass --model.engine peft".
    """
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does, for Debian
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not has_compiler or not Path(sysconfig.get_paths(scheme)["include"], "Python.h").is_file():
        raise UserError(
            f"{feature} needs a C compiler and Python's C headers to compile GPU kernels; install them (Ubuntu: `sudo "
            f"apt install gcc python3-dev`), or {otherwise}"
        )


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn every error in a `with` block that loads `what` from files into one line."""
    try:
        yield
    except Exception as error:  # missing and damaged files, wrong values and too little memory raise many types
        # bitsandbytes reports a missing CUDA library only when it is used.
        fix = "; run `python -m bitsandbytes`, or load 16 bits" if "python -m bitsandbytes" in str(error) else ""
        raise UserError(f"{what} cannot be loaded: {first_line(error)}{fix}") from error


@contextlib.contextmanager
def starting(engine: str, *, instead: str) -> Iterator[None]:
    """Turn every error in a `with` block that imports or starts an engine into one line.

    `instead` are the arguments that select another engine.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except (Exception, SystemExit) as error:  # a broken installation raises any type
        raise RunError(f"{engine} does not start ({reason(error)}); pass {instead}") from error


def hide_flashinfer() -> None:
    """Have vLLM find no FlashInfer. Call this before vLLM is imported.

    FlashInfer's sampler is never used, as requests have seeds or logprobs, and its kernels are compiled with nvcc. On
    Python 3.11, FlashInfer 0.6.16 raises a TypeError on import, so vLLM 0.27 does not start. Unsloth hides it too late:
    vLLM has already seen it, and from compute capability 9.0 fails in FlashInfer's autotuner. Unless its sampler is
    off, vLLM imports it without asking whether it is there.
    """
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]  # Python's mark for "cannot be imported"


def reason(error: BaseException) -> str:
    """Return the type and the first line of the error that caused this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    # pydantic names the cause on a later line.
    cause = str(error).rpartition("Value error, ")[2].partition(" [type=")[0]
    return f"{type(error).__name__}: {cause or first_line(error)}"[:300]
