"""Fingerprints of rows. run.json records them, so that a run is resumed and compared on the same rows only."""

import hashlib
import json
from collections.abc import Sequence

from lora_grpo.errors import UserError
from lora_grpo.grading import Row


def fingerprint(rows: Sequence[Row]) -> str:
    """Return the SHA-256 of the rows' content in order, or raise UserError for text that no tokenizer accepts."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps(row, sort_keys=True, ensure_ascii=False)
        try:
            digest.update(f"{line}\n".encode())
        except UnicodeEncodeError as error:
            character = ascii(error.object[error.start])
            raise UserError(f"row {row['id']}: {character} is not a Unicode character; remove it") from None
    return digest.hexdigest()
