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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.files import json_files
from lora_grpo.models.model_files import GENERATION_CONFIG, source

_END_FIELDS = ("eos_token_id", "pad_token_id")
"""Fields of a generation config with the ids of tokens that end or fill a completion."""
NO_PAD = -1
"""The `pad_token_id` of early Llama models, which have no such token. Padding is that of the tokenizer."""


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

    Raises:
        UserError: the generation config cannot be read, or declares what is not the id of a token.
        RunError: no token ends a completion.
    """
    return require_ends(declared_ends(settings, tokenizer, name), tokenizer, name)


def declared_ends(settings: ModelConfig, tokenizer: Any, name: str) -> list[int]:
    """Return the ids of `eos_token_ids`; [] if neither the model nor its tokenizer declares one."""
    declared = as_ids(generation_config(settings, name).eos_token_id)
    return sorted({*declared, tokenizer.eos_token_id} - {None})


def require_ends(ids: list[int], tokenizer: Any, name: str) -> list[int]:
    """Return the ids of the tokens that end a completion, and set the tokenizer's padding token if it has none.

    Raises:
        RunError: there is no id.
    """
    if not ids:
        raise RunError(f"{name} declares no end-of-sequence token; its completions would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(ids[0])
    return ids


def as_ids(declared: Any) -> list[int]:
    """Return the ids in a field of a generation config, which is None, one id or several."""
    if declared is None:
        return []
    return list(declared) if isinstance(declared, (list, tuple)) else [declared]


class WrongTokenId(UserError):
    """A model's configuration declares a value that is not the id of one of its tokens."""


def check_token_ids(ids: Mapping[str, Any], vocab_size: int | None, file: Path | str) -> None:
    """Check that a file declares ids of tokens, which are whole numbers from 0 to `vocab_size` - 1.

    Args:
        ids: values by the names of their fields: {"eos_token_id": [1, 2], "pad_token_id": None}. None declares nothing,
            and only an `eos_token_id` may be a list.
        vocab_size: number of the model's embeddings; None if its configuration does not have it.
        file: where the values are from.

    Raises:
        WrongTokenId: a value is none; the message has the file, the field and the value.
    """
    for field, value in ids.items():
        may_be_list = field == "eos_token_id"
        for token_id in as_ids(value) if may_be_list else [value]:
            is_number = isinstance(token_id, int) and not isinstance(token_id, bool)
            if is_number and token_id >= 0 and (vocab_size is None or token_id < vocab_size):
                continue
            if value is None or (field == "pad_token_id" and value == NO_PAD):
                continue
            highest = "" if vocab_size is None else f" to {vocab_size - 1}"
            raise WrongTokenId(
                f"{file}: {field} is {value!r:.80}; expected a whole number from 0{highest}"
                f"{' or a list of them' if may_be_list else ''}; correct it, or remove the field"
            )


def generation_config(settings: ModelConfig, name: str) -> Any:
    """Return transformers' GenerationConfig of a model: its file, or what config.json implies if there is none.

    Raises:
        UserError: a file cannot be read; the message has `name`.
        WrongTokenId: the end or the padding token is none of the model's tokens.
    """
    from transformers import AutoConfig, GenerationConfig

    where, revision = source(settings.name), settings.revision
    path = Path(where) / GENERATION_CONFIG
    has_file = path.is_file()
    if not has_file:
        path = Path(where) / "config.json"

    declared_in: Path | str = f"the generation config of {name}"  # of a Hub id
    if path.is_file():  # types are checked before transformers reads the file, which raises a TypeError for some
        declared_in = path
        written = json_files.read_object(path)
        check_token_ids({field: written.get(field) for field in _END_FIELDS}, None, path)
    with loading(f"the generation config of {name}"):
        config = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=settings.trust_remote_code)
        try:
            generation = GenerationConfig.from_pretrained(where, revision=revision)
        except OSError:
            if has_file:  # a damaged one
                raise
            generation = GenerationConfig.from_model_config(config)
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    check_token_ids({field: getattr(generation, field) for field in _END_FIELDS}, vocab_size, declared_in)
    return generation


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
