"""Find the Hub token, and keep it out of arguments, files, logs, and messages."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from lora_grpo.errors import UserError

_IN_MESSAGES = re.compile(r"\b(hf|api_org)_[A-Za-z0-9_-]{6,}|(?i:bearer)\s+\S+")
_IN_FILES = re.compile(rb"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{20,}")
"""Stricter than the pattern for messages, where masking a harmless name is acceptable."""
_SIGNED_URL = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
"""The query string of a signed URL grants upload access."""


def refuse_tokens_in(arguments: Sequence[str]) -> None:
    """Raise a UserError if an argument is named like a token or looks like one, without printing it."""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not equals:
            value = argument
        looks_like_token = value.startswith(("hf_", "api_org_")) or _IN_FILES.search(value.encode(errors="replace"))
        is_named_token = flag.lstrip("-").replace("_", "-") in ("token", "hf-token")
        if is_named_token or (looks_like_token and not Path(value).exists()):
            raise UserError(
                "a token must not be an argument, because shell history and process lists show it; run `hf auth login` "
                "or set HF_TOKEN, and create a new token if this was a real one"
            )


def find() -> str:
    """Return the token from HF_TOKEN or `hf auth login`. Raises UserError if it is missing or malformed."""
    from huggingface_hub import get_token

    token = get_token()
    if not token:
        raise UserError("no Hub token found; run `hf auth login` or set HF_TOKEN")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError("the Hub token has invalid characters; run `hf auth login` again or set HF_TOKEN")
    return token


def is_in(content: bytes) -> bool:
    """Return whether the content of a file contains this machine's token or text that looks like a token."""
    from huggingface_hub import get_token

    token = get_token() or ""
    # A shorter token is a placeholder, and many files contain it.
    return bool(_IN_FILES.search(content)) or (len(token) >= 8 and token.encode() in content)


def scrub(text: str, token: str) -> str:
    """Return text on one line, with tokens and URL signatures masked. `token` is empty if there is none."""
    if token:
        text = text.replace(token, "***")
    text = _IN_MESSAGES.sub("***", text)
    text = _SIGNED_URL.sub(r"\1", text)
    return " ".join(text.split())


def hide_in_logs(token: str) -> None:
    """Mask tokens and URL signatures in huggingface_hub logs. It logs a signed URL when it retries an upload."""
    import huggingface_hub.utils.logging  # noqa: F401 - installs the handlers

    def mask(record: logging.LogRecord) -> bool:
        record.msg = scrub(record.getMessage(), token)
        record.args = None
        return True

    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(mask)
