"""Read the adapter folders of other tools. Every command gets PEFT's format, or one line that says what to do.

A folder in PEFT's format, with PEFT's keys, is used as it is. These are converted to it, once in a process, into a
temporary folder. The same adapter becomes the same bytes, so that hashes of it are the same in every process.

raw keys   PEFT's two files, but weights with the names of the training process: an adapter name, as in
           `lora_A.default.weight`; no `base_model.model.`; or the names of wrappers, such as `_orig_mod.` of
           torch.compile. PEFT (0.21) loads none of them, warns, and the adapter changes nothing. AReaL, Relax and Soup
           wrote such files, and ms-swift's SwiftModel still does.
mlx-lm     `adapters.safetensors` with transposed matrices, and a `scale` in place of alpha / r.

Names of modules that a later transformers renamed are left as they are, because PEFT and `merge` translate them for
the model at hand.
"""

import atexit
import functools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import console
from lora_grpo.errors import UserError
from lora_grpo.files import (
    StoredTensor,
    TensorEntry,
    atomic,
    file_tensors,
    json_files,
    unquantized,
    write_tensors,
)
from lora_grpo.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lora_grpo.models.model_files import LICENSE_FILES, MORE_TEMPLATES, PROCESSOR_FILES, TOKENIZER_FILES

MLX_HUB = "mlx-community/"
"""The Hub's organization of models in MLX's format."""
_MLX_WEIGHTS = "adapters.safetensors"
_PICKLED_WEIGHTS = "adapter_model.bin"
_TORCHTUNE_WEIGHTS = "adapter_model.pt"
_WEIGHTS = (ADAPTER_WEIGHTS, _MLX_WEIGHTS, _PICKLED_WEIGHTS, _TORCHTUNE_WEIGHTS)

_PREFIX = "base_model.model."
"""What PEFT puts before the name of a module of the base."""
_WRAPPERS = re.compile(r"(^|(?<=\.))(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
"""Modules of FSDP, of activation checkpointing and of torch.compile."""
_NAMED_WEIGHT = re.compile(r"(?P<stem>.+\.lora_[AB])\.(?P<name>[^.]+)(?P<rest>\.weight|\.bias)")
_NAMED_PARAMETER = re.compile(
    r"(?P<stem>.+\.lora_(embedding_A|embedding_B|magnitude_vector))\.(?P<name>(?!weight$)[^.]+)(?P<rest>(\.weight)?)"
)
_NAMED_MODULE = re.compile(r"(?P<stem>.+)\.modules_to_save\.(?P<name>[^.]+)(?P<rest>\..+)")
_NAMED = (_NAMED_WEIGHT, _NAMED_PARAMETER, _NAMED_MODULE)
"""Keys with the name of the adapter, as in a PEFT model. PEFT saves them without it: stem + rest."""

_MLX_KEY = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_SWIFT_FIELDS = (
    *("swift_type", "model_key_mapping", "use_qa_lora", "use_merged_linear", "enable_lora"),
    *("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),
)
"""Fields that the configuration of ms-swift's SwiftModel has beside PEFT's. Source: swift/tuners/lora.py (4.6)."""


@dataclass(frozen=True)
class _Weight:
    """A weight of a converted adapter."""

    stored: StoredTensor
    is_transposed: bool = False


@dataclass(frozen=True)
class _Adapter:
    """A converted adapter, before it is written."""

    settings: Mapping[str, Any]
    """The content of adapter_config.json."""
    weights: Mapping[str, _Weight]
    """By PEFT's keys."""
    what: str
    """What was converted, for a note."""


_origins: dict[Path, Path] = {}
"""By the folder of a converted adapter, the folder that it is from."""


def holds_adapter(folder: Path) -> bool:
    """Return whether a folder is that of an adapter, of whatever tool, rather than of a model or something else."""
    if (folder / ADAPTER_CONFIG).is_file():
        return True
    has_weights = any((folder / name).is_file() for name in _WEIGHTS)
    return has_weights and not (folder / "config.json").is_file()


def nested_adapter(folder: Path) -> Path | None:
    """Return the folder of an adapter that is one or two levels below a folder, the last one of several, or None.

    Tools write them to `checkpoint-100` (transformers), `default` (ms-swift), `lora_adapter` or `actor/lora_adapter`
    (verl), or `epoch_0` (torchtune).
    """
    configs = [*folder.glob(f"*/{ADAPTER_CONFIG}"), *folder.glob(f"*/*/{ADAPTER_CONFIG}")]
    if not configs:
        return None
    return max((path.parent for path in configs), key=_by_numbers)


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts `checkpoint-100` after `checkpoint-20`."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part) if part.isdigit() else -1, part) for part in parts]


def peft_folder(folder: Path) -> Path:
    """Return a folder with an adapter in PEFT's format: the given folder, or a converted copy of its adapter.

    Raises:
        UserError: the files are of another tool and cannot be converted, or are damaged or incomplete.
    """
    weights = _weights_file(folder)
    modified = tuple(path.stat().st_mtime_ns for path in (weights, folder / ADAPTER_CONFIG))
    return _peft_folder(folder, weights, modified)


def origin_of(folder: Path) -> Path:
    """Return the folder that the adapter in a result of `peft_folder` is from, for messages."""
    return _origins.get(folder, folder)


def _weights_file(folder: Path) -> Path:
    """Return the file with the weights of an adapter, or raise a UserError if it has none that can be read."""
    config = folder / ADAPTER_CONFIG
    names = [name for name in _WEIGHTS if (folder / name).is_file()]
    if names and not config.is_file():
        raise UserError(
            f"{folder} has {names[0]} and no {ADAPTER_CONFIG}, which has the rank and the scale of an adapter; copy "
            "the whole folder that was saved in training"
        )
    if ADAPTER_WEIGHTS in names and not _is_mlx(json_files.read_object(config)):
        return folder / ADAPTER_WEIGHTS
    if _MLX_WEIGHTS in names:
        return folder / _MLX_WEIGHTS
    if _TORCHTUNE_WEIGHTS in names and _PICKLED_WEIGHTS not in names:
        raise UserError(
            f"{folder} has only torchtune's {_TORCHTUNE_WEIGHTS}, because torchtune does not save this model in PEFT's "
            "format; pass the folder of the merged model, which it saves unless save_adapter_weights_only is set"
        )
    if _PICKLED_WEIGHTS in names:
        convert = (
            f"import torch; from safetensors.torch import save_file; save_file(torch.load('{_PICKLED_WEIGHTS}', "
            f"weights_only=True), '{ADAPTER_WEIGHTS}')"
        )
        raise UserError(
            f"{folder} has only {_PICKLED_WEIGHTS}, and pickled weights are not loaded; convert them there: python -c "
            f'"{convert}"'
        )
    raise UserError(
        f"{folder} has no {ADAPTER_WEIGHTS} (pickled weights are not loaded); finish its run with --resume, or give "
        "another folder"
    )


@functools.lru_cache(maxsize=16)
def _peft_folder(folder: Path, weights: Path, modified: tuple[int, ...]) -> Path:
    """Return the folder of `peft_folder`. Cached by the files' modification times, so that a note is printed once."""
    settings = json_files.read_object(folder / ADAPTER_CONFIG)
    tensors = file_tensors(weights)
    if weights.name == _MLX_WEIGHTS:
        adapter = _from_mlx(folder, settings, tensors)
    else:
        _check_complete(folder, settings, tensors)
        if "swift_type" not in settings and all(_peft_key(key) == (key, None) for key in tensors):
            return folder
        adapter = _from_raw_keys(folder, settings, tensors)
    converted = _write(adapter, folder)
    _origins[converted] = folder
    console.note(f"note: {folder}: {adapter.what}; it is used in PEFT's format")
    return converted


def _check_complete(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise a UserError if weights are missing, or if they contradict the configuration."""
    empty = [name for name, tensor in tensors.items() if 0 in tensor.shape]
    if empty or not tensors:
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS} has no values for {empty[0] if empty else 'any weight'}, as DeepSpeed's "
            "ZeRO-3 saves weights that were not gathered; save the adapter again, with "
            "stage3_gather_16bit_weights_on_model_save"
        )
    magnitudes = [name for name in tensors if ".lora_magnitude_vector" in name]
    if magnitudes and not settings.get("use_dora"):
        # torchtune (0.7) writes no `use_dora`. It permutes the rows of lora_B of q_proj and k_proj back to the order of
        # transformers, but not their magnitudes: `tune_to_peft_adapter_weights` in torchtune/models/convert_weights.py.
        raise UserError(
            f"{folder} has the magnitudes of DoRA ({magnitudes[0]}), and its {ADAPTER_CONFIG} does not set use_dora; "
            "torchtune writes it so, with magnitudes in another order than PEFT's: pass its merged model"
        )


def _peft_key(key: str) -> tuple[str, str | None]:
    """Return the key that PEFT's files have for a key of a PEFT model, and the adapter's name in it, if any."""
    key = _WRAPPERS.sub("", key)
    key = key.removeprefix("module.")  # of DistributedDataParallel and DeepSpeed
    if not key.startswith(_PREFIX):
        key = _PREFIX + key
    for pattern in _NAMED:
        match = pattern.fullmatch(key)
        if match:
            return match["stem"] + match["rest"], match["name"]
    return key, None


def _from_raw_keys(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> _Adapter:
    """Return an adapter whose weights have names other than PEFT's."""
    original: dict[str, str] = {}
    adapter_names = set()
    for key in tensors:
        peft_key, adapter_name = _peft_key(key)
        if peft_key in original:
            raise UserError(f"{folder} has two weights for {peft_key}: {original[peft_key]} and {key}; remove one")
        original[peft_key] = key
        adapter_names.add(adapter_name)
    adapter_names.discard(None)
    if len(adapter_names) > 1:
        raise UserError(
            f"{folder} has the weights of several adapters, {', '.join(sorted(map(str, adapter_names)))}; save one "
            "with PEFT's save_pretrained(selected_adapters=[...])"
        )

    if settings.get("use_qa_lora") or settings.get("use_merged_linear"):
        raise UserError(
            f"{folder / ADAPTER_CONFIG} is of ms-swift's SwiftModel with use_qa_lora or use_merged_linear, which PEFT "
            "does not have; merge it with ms-swift (swift export --merge_lora true)"
        )
    peft_settings = {name: value for name, value in settings.items() if name not in _SWIFT_FIELDS}
    if "swift_type" in settings:
        peft_settings["peft_type"] = settings["swift_type"]
    renamed = [key for key, first_key in original.items() if key != first_key]
    what = "the settings are of ms-swift's SwiftModel"
    if renamed:
        what = f"its weights have names such as {original[renamed[0]]}"
    return _Adapter(peft_settings, {key: _Weight(tensors[name]) for key, name in original.items()}, what)


def _is_mlx(settings: Mapping[str, Any]) -> bool:
    """Return whether an adapter_config.json is of mlx-lm, or of Unsloth on Apple silicon, which writes the same."""
    return "lora_parameters" in settings or "fine_tune_type" in settings


def _from_mlx(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> _Adapter:
    """Return an adapter of mlx-lm.

    y = W x + scale * lora_b.T @ (lora_a.T @ x), with `lora_a` of shape (in, r) and `lora_b` of shape (r, out), and with
    DoRA's magnitudes `m` of shape (out,). The last `num_layers` layers have these weights.

    Sources: mlx_lm/lora.py, mlx_lm/tuner/lora.py, dora.py and utils.py (0.32). Before version 0.19, whose files have
    `lora_layers` in place of `num_layers`, the scale was at times multiplied by alpha / r.
    """
    fuse = "fuse it with mlx_lm.fuse --dequantize, and pass the fused model"
    config = folder / ADAPTER_CONFIG
    parameters = settings.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    kind = settings.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise UserError(f"{config} of mlx-lm has fine_tune_type {kind!r}, which is no LoRA adapter; {fuse}")
    if "lora_layers" in settings:
        raise UserError(f"{config} is of mlx-lm before 0.19, which scaled adapters in another way; {fuse}")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale) or scale == 0:
        raise UserError(f"{config} of mlx-lm has no scale in lora_parameters, but {parameters!r:.80}; restore it")

    # The weights.
    weights: dict[str, _Weight] = {}
    modules = set()
    ranks = set()
    for key, tensor in tensors.items():
        match = _MLX_KEY.fullmatch(key)
        if match is None:
            raise UserError(f"{folder / _MLX_WEIGHTS} has {key}, which is no weight of LoRA or DoRA; {fuse}")
        module = match["module"]
        if len(tensor.shape) != (1 if match["part"] == "m" else 2) or module.endswith("embed_tokens"):
            raise UserError(f"{folder / _MLX_WEIGHTS} adapts {module}, stacked experts or an embedding; {fuse}")
        modules.add(module)
        if match["part"] == "m":
            weights[f"{_PREFIX}{module}.lora_magnitude_vector"] = _Weight(tensor)
        elif match["part"] == "lora_a":
            ranks.add(tensor.shape[1])
            weights[f"{_PREFIX}{module}.lora_A.weight"] = _Weight(tensor, is_transposed=True)
        else:
            weights[f"{_PREFIX}{module}.lora_B.weight"] = _Weight(tensor, is_transposed=True)
    if len(ranks) != 1:
        raise UserError(f"{folder / _MLX_WEIGHTS} has the ranks {sorted(ranks)}, expected one; {fuse}")

    # Its configuration.
    rank = ranks.pop()
    alpha = scale * rank
    peft_settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": settings.get("base_model_name_or_path") or settings.get("model"),
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": parameters.get("dropout", 0.0) if isinstance(parameters, dict) else 0.0,
        "target_modules": target_modules(modules),
        "use_dora": kind == "dora",
        "bias": "none",
        "inference_mode": True,
    }
    what = f"an adapter of mlx-lm with rank {rank} and scale {scale:g}, which is lora_alpha {alpha:g}"
    return _Adapter(peft_settings, weights, what)


def adapted_modules(folder: Path) -> set[str]:
    """Return the names of the modules that an adapter in PEFT's format has weights of LoRA for."""
    names = [key.removeprefix(_PREFIX) for key in file_tensors(folder / ADAPTER_WEIGHTS)]
    return {name.partition(".lora_")[0] for name in names if ".lora_" in name}


def target_modules(modules: Iterable[str]) -> list[str]:
    """Return the `target_modules` that select these modules and no others.

    A target selects the modules whose names end with it: `q_proj` those of all layers, and
    `layers.3.self_attn.q_proj` one. mlx-lm adapts the last layers, so all are adapted if the first one is.
    """
    layers_of: dict[str, set[int]] = {}
    by_layer: dict[str, list[str]] = {}
    targets = set()
    for module in modules:
        match = re.search(r"layers\.(\d+)\.(.+)$", module)
        if match is None:
            targets.add(module.rpartition(".")[2])  # lm_head
            continue
        leaf = match[2].rpartition(".")[2]
        layers_of.setdefault(leaf, set()).add(int(match[1]))
        by_layer.setdefault(leaf, []).append(match[0])
    last_layer = max((max(layers) for layers in layers_of.values()), default=0)
    for leaf, layers in layers_of.items():
        if len(layers) == last_layer + 1:
            targets.add(leaf)
        else:
            targets.update(by_layer[leaf])
    return sorted(targets)


def _write(adapter: _Adapter, origin: Path) -> Path:
    """Write an adapter to a temporary folder of this process, with the tokenizer and licenses of its origin."""
    parent = tempfile.mkdtemp(prefix="lora_grpo-adapter-")
    atexit.register(_remove, parent, os.getpid())
    folder = Path(parent) / origin.resolve().name  # commands show the name
    folder.mkdir()

    # PEFT's two files. Keys are sorted, so that the bytes are always the same.
    stored = {key: weight.stored for key, weight in sorted(adapter.weights.items())}
    unquantized(stored, origin, "train the adapter again")
    entries = []
    for key, tensor in stored.items():
        shape = tensor.shape[::-1] if adapter.weights[key].is_transposed else tensor.shape
        entries.append(TensorEntry(key, tensor.dtype, shape))
    blocks = (_content(adapter.weights[key]) for key in stored)
    write_tensors(folder / ADAPTER_WEIGHTS, entries, blocks)
    atomic.write_text(folder / ADAPTER_CONFIG, json.dumps(adapter.settings, indent=2, sort_keys=True) + "\n")

    for pattern in (*TOKENIZER_FILES, *PROCESSOR_FILES, *LICENSE_FILES):
        for path in origin.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    if (origin / MORE_TEMPLATES).is_dir():
        shutil.copytree(origin / MORE_TEMPLATES, folder / MORE_TEMPLATES)
    return folder


def _remove(folder: str, process_id: int) -> None:
    """Remove a folder of this process. A fork inherits the call and must not remove it."""
    if os.getpid() == process_id:
        shutil.rmtree(folder, ignore_errors=True)


def _content(weight: _Weight) -> Any:
    """Return the values of a weight as a torch tensor."""
    values = weight.stored.read()
    return values.T if weight.is_transposed else values
