"""Reading what a card is written of: run.json, reports and adapter_config.json, each of the types that it has to be.

Whoever reads on from here need not look again. A figure that is not a finite number is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.runs import read_record

_NUMBER = (int, float)
_ROWS = {"source?": str, "rows?": int, "sha256?": str}
_RUN = {
    "config": {
        "model": {"max_sequence_tokens?": int},
        "data": {"prompt_style?": str},
        "sampling": {"num_generations?": int, "max_completion_tokens?": int, "temperature?": _NUMBER},
        "rewards": [str],
        "train": {
            "prompts_per_step?": int, "learning_rate?": _NUMBER, "lr_scheduler?": str, "warmup_steps?": _NUMBER,
            "optimizer?": str, "beta?": _NUMBER, "max_grad_norm?": _NUMBER,
        },
        "grpo?": [str],
    },
    "data": {"task": str, "eval_task?": str, "train?": _ROWS, "eval?": _ROWS},
    "policy": {
        "base_model?": str, "revision?": str, "fingerprint?": str, "engine?": str, "bits?": int,
        "trust_remote_code?": bool,
    },
    "versions": {"*?": str},
    "recipe?": str, "status?": str, "trained_steps?": int, "seed?": int,
}  # fmt: skip
"""What a card reads, by name. `?`: it may be absent or null. `*`: every name. A list: of such entries."""
_ADAPTER = {
    "base_model_name_or_path?": str, "revision?": str, "r?": int, "lora_alpha?": _NUMBER, "lora_dropout?": _NUMBER,
    "use_rslora?": bool, "use_dora?": bool, "target_modules?": (str, list),
}  # fmt: skip
_MERGE = {
    "identity?": {"adapter_sha256": str},
    "base?": {"name?": str, "revision?": str, "fingerprint?": str},
    "adapter?": {"sha256?": str},
    "shards?": [{"file": str, "bytes": int, "sha256": str}],
}
_CALLED = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one where there is no file.

    Raises:
        UserError: it is no JSON object.
    """
    return dict(_clean(json_files.read_object(path))) if path.exists() else {}


def read_run(folder: Path) -> dict[str, Any]:
    """Return the run.json of a run's folder.

    Raises:
        UserError: it is none, or something in it is not what it has to be.
    """
    read_record(folder)
    return _read(folder / "run.json", _RUN)


def read_adapter(folder: Path) -> dict[str, Any]:
    """Return the adapter_config.json of a folder; an empty one where there is none. Raises as `read_run` does."""
    return _read(folder / "adapter_config.json", _ADAPTER)


def read_merge(folder: Path) -> dict[str, Any]:
    """Return the merge_report.json of a folder; an empty one where there is none. Raises as `read_run` does."""
    return _read(folder / "merge_report.json", _MERGE)


def check(value: Any, schema: Any, where: str = "") -> None:
    """Hold a JSON value against a schema.

    Raises:
        ValueError: says where it differs, and how.
    """
    if isinstance(schema, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where or 'it'} is not an object")
        for key, inner in schema.items():
            name = key.removesuffix("?")
            for found in value if name == "*" else [name]:
                place = f"{where}.{found}" if where else found
                if value.get(found) is not None:
                    check(value[found], inner, place)
                elif not key.endswith("?"):
                    raise ValueError(f"{place} is missing")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is not a list")
        for number, entry in enumerate(value):
            check(entry, schema[0], f"{where}.{number}")
    else:
        kinds = schema if isinstance(schema, tuple) else (schema,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{where} is not {_CALLED[kinds[-1]]}")


def _read(path: Path, schema: Any) -> dict[str, Any]:
    value = read_json(path)
    try:
        if value:
            check(value, schema)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return value


def _clean(value: Any) -> Any:
    """Return a JSON value whose numbers are numbers, or null, and whose texts can be written to a file."""
    if isinstance(value, dict):
        return {_clean(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_clean(entry) for entry in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value
