"""The Hub's token: where it may come from, and that it is in nothing that is printed or raised."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from lora_grpo.errors import UserError

_TOKENS = re.compile(r"\b(hf|api_org)_[A-Za-z0-9_-]{6,}|(?i:bearer)\s+\S+")
_SECRET = re.compile(rb"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{20,}")
"""A token as it stands in a file; stricter than what is taken out of a line, where a name lost does no harm."""
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
"""A signed address: whoever has what follows its question mark may upload."""


def refuse_tokens_in(arguments: Sequence[str]) -> None:
    """Refuse a token on the command line, without showing it.

    Raises:
        UserError: an argument is called a token or looks like one.
    """
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        value = value if equals else flag
        begins = value.startswith(("hf_", "api_org_")) or _SECRET.search(value.encode(errors="replace"))
        looks = begins and not Path(value).exists()
        if looks or flag.lstrip("-").replace("_", "-") in ("token", "hf-token"):
            raise UserError(
                "a token is never an argument: it would stay in your shell's history and be seen by others on this "
                "machine; run `hf auth login` or set HF_TOKEN, and make a new token if this was one"
            )


def find() -> str:
    """Return the token of HF_TOKEN or of `hf auth login`.

    Raises:
        UserError: there is none, or it is no token.
    """
    from huggingface_hub import get_token

    try:
        token = get_token()
    except Exception as error:  # noqa: BLE001 - an identity provider may be asked for it, or a file read
        raise UserError(f"the Hub's token cannot be had: {scrub(str(error))}") from None
    if not token:
        raise UserError("there is no token for the Hub; run `hf auth login` or set HF_TOKEN")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError("the Hub's token holds characters that no token has; run `hf auth login` or set HF_TOKEN again")
    return token


def at_hand() -> list[str]:
    """Return the tokens of the environment and of `hf auth login`; nobody is asked for one."""
    from huggingface_hub import constants

    found = [os.environ.get("HF_TOKEN"), os.environ.get("HUGGING_FACE_HUB_TOKEN")]
    with contextlib.suppress(OSError, ValueError):
        found.append(Path(constants.HF_TOKEN_PATH).read_text(encoding="utf-8"))
    # What is shorter is no token, and may well be a word.
    return [token.strip() for token in found if token and len(token.strip()) >= 8]


def is_in(content: bytes, tokens: Sequence[str] = ()) -> bool:
    """Tell whether a file holds one of these tokens, or what looks like one."""
    return bool(_SECRET.search(content)) or any(token.encode() in content for token in tokens)


def scrub(text: str, token: str | None = None) -> str:
    """Return a text on one line, without the token, anything that looks like one, and what signs an address."""
    text = _TOKENS.sub("***", text.replace(token, "***") if token else text)
    return " ".join(_QUERY.sub(r"\1", text).split())


@contextlib.contextmanager
def scrubbed(token: str) -> Iterator[None]:
    """Have what huggingface_hub logs and warns of printed on a line each, scrubbed.

    huggingface_hub (1.33) logs the whole address when an upload is tried again, signature included.
    """
    logger = logging.getLogger("huggingface_hub")
    handlers, propagate = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [_Lines(token)], False
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(scrub(str(message), token), file=sys.stderr)
            yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate


class _Lines(logging.Handler):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def emit(self, record: logging.LogRecord) -> None:
        print(scrub(record.getMessage(), self._token), file=sys.stderr)
