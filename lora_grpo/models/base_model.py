"""The base model: find it in a folder or on the Hub, load it in 4 or 16 bits, and keep it frozen."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.config import STARTER, ModelConfig
from lora_grpo.errors import RunError, UserError, first_line, suggestion
from lora_grpo.files import atomic, json_files
from lora_grpo.optional import require

LICENSE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
_HUB_SECONDS = 5.0
"""Longest wait for the Hub's first answer."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


class HubUnavailable(UserError):
    """The Hub is unreachable, or it does not give access to the model."""


def source(name: str) -> str:
    """Return the argument for `from_pretrained`: a folder or a Hub id."""
    if name == STARTER:
        return str(starter.model_path())
    return str(Path(name).expanduser()) if is_folder_name(name) else name


def is_folder_name(name: str) -> bool:
    """Return whether a name is a folder rather than a Hub id such as `owner/name`."""
    return name != STARTER and (
        name.startswith(("/", "./", "../", "~"))
        or Path(name).exists()
        or name.count("/") > 1
        or ("/" in name and Path(name).parent.is_dir())  # outputs/mistyped
    )


def missing_folder(name: str, expected: str) -> str:
    """Return the error for a folder that does not exist: a similar name, or what is expected."""
    folder = Path(name).expanduser()
    similar = suggestion(folder.name, [path.name for path in folder.parent.glob("*/")], otherwise=f"give {expected}")
    is_id = name.count("/") == 1 and not name.startswith(("/", ".", "~"))
    from_hub = f"; for {name} on the Hub, change to a directory without {folder.parent}/" if is_id else ""
    return f"{name} does not exist; {similar}{from_hub}"


def check_folder(name: str, flag: str) -> None:
    """Check that a folder contains a model, or raise a UserError that names the flag. A Hub id is not checked."""
    if not is_folder_name(name):
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"{flag} {missing_folder(name, 'the folder of a model or a Hub id such as owner/name')}")
    if not (folder / "config.json").is_file():
        raise UserError(f"{flag} {name} has no config.json; give the folder of a transformers model")
    if not list(folder.glob("*.safetensors")):
        raise UserError(f"{flag} {name} has no .safetensors weights; pickled weights are not loaded")


def weights_fingerprint(folder: Path) -> str:
    """Return a SHA-256 of the names and contents of the safetensors files in a folder."""
    paths = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor(4) as threads:
        digests = threads.map(_cached_sha256, paths, [path.stat().st_mtime_ns for path in paths])
        files = {path.name: digest for path, digest in zip(paths, digests, strict=True)}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


@functools.lru_cache
def _cached_sha256(path: Path, modified: int) -> str:
    """Return the SHA-256 of a file, cached by modification time because a base model has gigabytes."""
    return atomic.sha256(path)


def prepare_torch(seed: int) -> None:
    """Import and seed torch, silence the libraries, and make results on a CPU deterministic.

    Raises:
        UserError: bitsandbytes cannot be imported.
    """
    silence_libraries()
    with without_garbage_collection():
        import torch

        if importlib.util.find_spec("bitsandbytes"):  # peft, which transformers imports, imports it if it is installed
            require("bitsandbytes", extra="dev", feature="PEFT", otherwise="uninstall it and load the base in 16 bits")
        from transformers import set_seed
        from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    set_seed(seed)
    if not torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import libraries in this context: garbage collection takes a fifth of the import time of transformers.

    If torch was not imported before, all objects are exempt from later collections too: libraries stay.
    """
    enabled, is_first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if is_first:
            gc.freeze()
        if enabled:
            gc.enable()


def silence_libraries() -> None:
    """Silence the messages that libraries log on import. Call this before they are imported."""
    for name in (
        "bitsandbytes.backends.cpu.ops",  # "Failed to load CPU gemm_4bit_forward": a kernel for inference only
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


def read_config(settings: ModelConfig) -> dict[str, Any]:
    """Return a model's config.json. Imports neither torch nor transformers.

    Raises:
        HubUnavailable: it is not in the Hub cache, and the Hub is unreachable or refuses access.
        UserError: it cannot be read.
    """
    folder = Path(source(settings.name))
    if folder.is_dir() or is_folder_name(settings.name):
        if not folder.is_dir():
            raise UserError(f"--model.name {missing_folder(settings.name, 'the folder of a model or a Hub id')}")
        return json_files.read_object(folder / "config.json")
    try:
        path = _from_hub(settings)
    except HubUnavailable as error:
        raise HubUnavailable(f"the configuration of {settings.name} cannot be read: {error}") from error
    except Exception as error:  # a wrong id, an unreachable Hub and a missing file raise many types
        raise UserError(f"the configuration of {settings.name} cannot be read: {first_line(error)}") from error
    return json_files.read_object(path)


def _from_hub(settings: ModelConfig) -> Path:
    """Return the path of a model's config.json in the Hub cache, and download the file if necessary."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted: dict[str, Any] = {"repo_id": settings.name, "filename": "config.json", "revision": settings.revision}
    with contextlib.suppress(LocalEntryNotFoundError):
        return Path(hf_hub_download(**wanted, local_files_only=True))
    reach_hub(settings)  # hf_hub_download (1.33) retries for half a minute if the Hub is unreachable
    return Path(hf_hub_download(**wanted))


def reach_hub(settings: ModelConfig) -> None:
    """Request a model's metadata from the Hub, or raise HubUnavailable if it is unreachable or refuses access."""
    import httpx
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    url = hf_hub_url(settings.name, "config.json", revision=settings.revision)
    try:
        found = get_hf_file_metadata(url, timeout=_HUB_SECONDS)
    except OfflineModeIsEnabled:
        raise HubUnavailable("it is not cached, and HF_HUB_OFFLINE is set") from None
    except (httpx.RequestError, ConnectionError) as error:
        raise HubUnavailable(f"it is not cached, and the Hub is unreachable ({first_line(error)})") from None
    except GatedRepoError:
        raise HubUnavailable(
            f"it is not cached, and the model is gated; accept its license at huggingface.co/{settings.name}, then run "
            "hf auth login"
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        raise
    except HfHubHTTPError as error:  # the Hub or a proxy
        raise HubUnavailable(f"it is not cached, and the Hub fails ({first_line(error)})") from None
    if found.commit_hash is None:  # a login page of the network
        raise HubUnavailable(f"it is not cached, and {url} is not answered by the Hub; sign in to the network")


def load_base(settings: ModelConfig) -> Any:
    """Load the model without an adapter, on the GPU if one is available, or raise a UserError."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = compute_dtype()
    quantization = None
    if settings.bits == 4:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source(settings.name),
            revision=settings.revision,
            quantization_config=quantization,
            dtype=dtype,
            device_map={"": torch.cuda.current_device()} if torch.cuda.is_available() else {"": "cpu"},
            use_safetensors=True,
            trust_remote_code=settings.trust_remote_code,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # missing or damaged files raise many types
        # bitsandbytes reports a missing CUDA library only when it is used.
        fix = "; run `python -m bitsandbytes`, or load 16 bits" if "python -m bitsandbytes" in str(error) else ""
        raise UserError(f"the model {settings.name} cannot be loaded: {first_line(error)}{fix}") from error
    _check_sizes(model, settings.name)
    keep_frozen(model)
    return model


def _check_sizes(model: Any, name: str) -> None:
    """Check that weights have the sizes in config.json. Transformers (5.17) does not, if it loads them in 4 bits."""
    import torch

    for part, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            stored = tuple((getattr(module.weight, "quant_state", None) or module.weight).shape)
            if stored != (module.out_features, module.in_features):
                raise UserError(
                    f"the model {name} cannot be loaded: {part}.weight has the shape {stored}, but config.json gives "
                    f"{(module.out_features, module.in_features)}; use the config.json that belongs to the weights"
                )


def load_tokenizer(settings: ModelConfig) -> Any:
    """Load the tokenizer of a model, or raise a UserError."""
    silence_libraries()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source(settings.name), revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except Exception as error:  # missing or damaged files raise many types
        raise UserError(f"the tokenizer of {settings.name} cannot be loaded: {first_line(error)}") from error
    if not tokenizer("a")["input_ids"]:  # transformers creates an empty tokenizer if the files are missing
        raise UserError(f"the tokenizer of {settings.name} cannot be loaded: it has no vocabulary")
    return tokenizer


def generation_config(settings: ModelConfig) -> Any:
    """Return the generation config of a model in a folder, or the one that its config.json implies.

    Raises:
        UserError: the file is damaged.
    """
    from transformers import AutoConfig, GenerationConfig

    path = Path(settings.name) / "generation_config.json"
    try:
        if path.is_file():
            return GenerationConfig.from_dict(json_files.read_object(path))
        path = path.with_name("config.json")
        config = AutoConfig.from_pretrained(settings.name, trust_remote_code=settings.trust_remote_code)
        return GenerationConfig.from_model_config(config)
    except UserError:
        raise
    except Exception as error:  # wrong values raise many types
        raise UserError(f"{path} has an invalid value: {first_line(error)}; correct it") from error


def eos_token_ids(generation_config: Any, tokenizer: Any, name: str) -> list[int]:
    """Return the ids of all tokens that end a completion, and set the tokenizer's padding token if it has none."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    declared = generation_config.eos_token_id
    ids = list(declared) if isinstance(declared, (list, tuple)) else [] if declared is None else [declared]
    if odd := next((each for each in ids if type(each) is not int or each < 0), None):
        raise UserError(f"{name} declares the end-of-sequence token {odd!r:.40}; expected the id of a token")
    ids = sorted({*ids, tokenizer.eos_token_id} - {None})
    if not ids:
        raise RunError(f"{name} declares no end-of-sequence token; its completions would never end")
    return ids


def keep_frozen(model: Any) -> None:
    """Prevent bitsandbytes (0.50) from repacking 4-bit weights in place.

    On a CPU with AVX512-BF16, its first forward pass in eval mode permanently rounds all block scales to bfloat16, and
    switches the layer to a kernel without a backward pass.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
