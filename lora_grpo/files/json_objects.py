"""A JSON file that holds one object: a configuration, a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line


def read(path: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value
