"""Set up torch and the engines that train and sample: their order of import, their messages, and their errors.

Unsloth and vLLM are optional packages that fail in many ways; `starting` turns their errors into one line.
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

from lora_grpo.errors import RunError, UserError, first_line


def prepare_torch(seed: int) -> None:
    """Import and seed torch, silence the libraries, and make results on a CPU deterministic."""
    silence_libraries()
    is_first_import = "torch" not in sys.modules
    if is_first_import:
        gc.disable()  # garbage collection takes an eighth of the import time of transformers
    import torch
    from transformers import set_seed
    from transformers.utils import logging as transformers_logging

    if is_first_import:
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


def require_compiler(*, feature: str, otherwise: str) -> None:
    """Raise UserError if the requirements of Triton (3.7) for GPU kernels are not met.

    Triton compiles a small C extension, which fails in the first step or inside vLLM. `feature` needs it, and
    `otherwise` is the alternative, such as "pass --model.engine peft".
    """
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does, for Debian
    has_headers = Path(sysconfig.get_paths(scheme)["include"], "Python.h").is_file()
    if not has_compiler or not has_headers:
        raise UserError(
            f"{feature} needs a C compiler and Python's C headers to compile GPU kernels; install them (Ubuntu: `sudo "
            f"apt install gcc python3-dev`), or {otherwise}"
        )


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
    Python 3.11, FlashInfer 0.6.16 raises a TypeError on import, so vLLM 0.27 does not start; 0.7.2, which vLLM 0.33
    requires, does not. Unsloth also hides FlashInfer, but too late: vLLM has already seen it, and from compute
    capability 9.0 fails in FlashInfer's autotuner. The variable turns FlashInfer's sampler off, because vLLM would
    import it without asking whether it is installed.
    """
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]  # Python's mark for "cannot be imported"


def reason(error: BaseException) -> str:
    """Return the type and the first line of the error that caused this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    # pydantic has the cause on a later line: "  Value error, CAUSE [type=value_error, ...]".
    _, is_pydantic, cause_and_type = str(error).rpartition("Value error, ")
    cause = cause_and_type.partition(" [type=")[0] if is_pydantic else first_line(error)
    return f"{type(error).__name__}: {cause}"[:300]
