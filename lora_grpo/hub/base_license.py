"""Find the license of a base model: in its folder, in the local Hub cache, or by one request to the Hub."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from lora_grpo.errors import first_line
from lora_grpo.hub import token

_SECONDS = 10
"""Time limit of the request."""


def of_folder(folder: Path) -> dict[str, str]:
    """Return the license entries of the model card in a folder; {} if there are none."""
    from huggingface_hub import ModelCard

    try:
        return _entries(ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data)
    except (OSError, ValueError):
        return {}


def of_hub_model(hub_id: str, revision: str | None) -> dict[str, str]:
    """Return the license entries of a model on the Hub, from the local cache if its card is there.

    Training does not download the card. If the Hub does not answer, the reason is a note on stderr.
    """
    from huggingface_hub import HfApi, get_token, is_offline_mode, try_to_load_from_cache

    card = try_to_load_from_cache(hub_id, "README.md", revision=revision)
    try:
        if isinstance(card, str):
            found = of_folder(Path(card).parent)
        elif is_offline_mode():
            raise ConnectionError("HF_HUB_OFFLINE is set")
        else:
            found = _entries(HfApi().model_info(hub_id, revision=revision, timeout=_SECONDS).card_data)
    except Exception as error:  # noqa: BLE001 - a card without a license is better than no push
        reason = token.scrub(first_line(error), get_token() or "")
        print(f"note: the card has no license, because {hub_id} was not read: {reason}", file=sys.stderr)
        return {}
    link = found.get("license_link", "")
    if link and "://" not in link:  # a file in the base's repository
        found["license_link"] = f"https://huggingface.co/{hub_id}/blob/main/{link}"
    return found


def _entries(data: Any) -> dict[str, str]:
    names = ("license", "license_name", "license_link")
    found = {name: value for name in names if isinstance(value := getattr(data, name, None), str)}
    # The Hub rejects other license ids, such as "Apache 2.0".
    return found if re.fullmatch(r"[a-z0-9.+-]+", found.get("license", "")) else {}
