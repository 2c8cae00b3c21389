"""The metadata that describe a model in its GGUF file: license, base model, data sets, sampling settings.

The values come from README.md, config.json and generation_config.json, without local paths.
"""

from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import json_files, local_paths
from lora_grpo.models import model_files

_SAMPLING_FIELDS: dict[str, type] = {
    "sequence": str,
    **dict.fromkeys(("top_k", "penalty_last_n", "mirostat"), int),
    **dict.fromkeys(("top_p", "min_p", "xtc_probability", "xtc_threshold", "temperature"), float),
    **dict.fromkeys(("penalty_repeat", "mirostat_tau", "mirostat_eta"), float),
}
"""Settings of generation_config.json that a GGUF file has, with their types."""
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def read_metadata(folder: Path, name: str, size_label: str) -> Any:
    """Return a `gguf.Metadata` of the model in a folder.

    Args:
        folder: a transformers model.
        name: the model's name in the GGUF file.
        size_label: the model's number of parameters, such as `1.5B`.

    Raises:
        UserError: generation_config.json or README.md has a value that a GGUF file cannot have.
    """
    import gguf

    sampling = _sampling_settings(folder)
    try:
        front_matter = _without_local_paths(gguf.Metadata.load_model_card(folder), folder)
        config = _without_local_paths(gguf.Metadata.load_hf_parameters(folder), folder)
        metadata = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), front_matter, config, folder)
        for field, value in sampling.items():
            attribute = "temp" if field == "temperature" else field
            setattr(metadata, f"sampling_{attribute}", value)
        metadata.name = name
        metadata.size_label = size_label
        _check_texts(metadata)
    except Exception as error:  # odd values raise many types
        raise UserError(
            f"{folder / 'README.md'}: its front matter has a value that a GGUF file cannot have ({first_line(error)}); "
            "correct it"
        ) from error
    return metadata


def _check_texts(metadata: Any) -> None:
    """Raise a ValueError if a value that must be a text is not. The gguf package (0.19) checks only when it writes."""
    import gguf

    writer: Any = gguf.GGUFWriter(None, "llama")
    metadata.set_gguf_meta_model(writer)
    for key, entry in writer.kv_data[0].items():
        if entry.type == gguf.GGUFValueType.STRING:
            texts = [entry.value]
        elif entry.type == gguf.GGUFValueType.ARRAY:
            texts = entry.value
        else:
            continue
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"{key} has {text!r:.80}, expected a text")
            text.encode()  # a lone surrogate raises a ValueError


def _sampling_settings(folder: Path) -> dict[str, Any]:
    """Return the sampling settings of generation_config.json.

    Raises:
        UserError: one has a type that a GGUF file cannot have.
    """
    path = folder / model_files.GENERATION_CONFIG
    generation_config = json_files.read_object(path) if path.is_file() else {}
    settings = {}
    for name, kind in _SAMPLING_FIELDS.items():
        value = generation_config.get(name)
        if value is None:
            continue
        if kind is str:
            is_valid = isinstance(value, str)
            expected = "a text"
        elif kind is int:
            is_valid = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31
            expected = "a whole number of 32 bits"
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_valid = is_number and abs(value) <= _MAX_FLOAT32
            expected = "a number"
        if not is_valid:
            raise UserError(f"{path}: {name} is {value!r:.80}; expected {expected}; correct it, or remove the field")
        settings[name] = value
    return settings


def _without_local_paths(value: Any, folder: Path, field: str = "") -> Any:
    """Return a front matter, a config.json, or a part of them, without the values that are or contain local paths.

    `field` is the name of the innermost field that the value is in.
    """
    if isinstance(value, dict):
        public_fields = {name: _without_local_paths(entry, folder, name) for name, entry in value.items()}
        return {name: entry for name, entry in public_fields.items() if entry not in (None, {}, [])}
    if isinstance(value, list):
        public_entries = [_without_local_paths(entry, folder, field) for entry in value]
        return [entry for entry in public_entries if entry not in (None, {}, [])]
    if not isinstance(value, str):
        return value

    # The name of a model or data set may be a folder. Any other text may be a path, except a license in the model's
    # folder.
    if field.startswith(("base_model", "dataset", "_name_or_path")) and "://" not in value:
        is_path = model_files.is_folder_name(value)
    elif field == "license_link" and value.startswith("./"):
        is_path = False
    else:
        is_path = model_files.is_path(value)

    # A text may also contain one.
    if is_path or local_paths.find(value, folder):
        return None
    return value
