"""What a failed request to the Hub means: whose fault it is, and whether another attempt may go better."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_grpo.hub import token as hub_token

if TYPE_CHECKING:
    import httpx

_TRANSIENT = (408, 409, 412, 429, 500, 502, 503, 504)
"""Answers that may be others next time; 409 and 412 where the repository changed meanwhile."""
LONGEST_WAIT = 600.0
"""Seconds that a push waits when the Hub asks for it; it ends where more is asked for."""
_XET_REFUSAL = re.compile(r"HTTP status client error \((\d{3}) ")


@dataclass(frozen=True)
class Failure:
    """What a person is told of an exception of httpx, huggingface_hub or hf_xet."""

    reason: str
    """In a few words, without the token."""
    status: int | None
    """The Hub's answer; None where there was none."""
    seconds: float | None
    """How long the Hub asks to wait."""
    passing: bool
    """Whether it may go better next time."""


def explain(error: Exception, token: str) -> Failure:
    """Return what an exception means."""
    status, seconds = _answer(error)
    passing = _is_connection(error) if status is None else status in _TRANSIENT
    return Failure(hub_token.scrub(_reason(error), token), status, seconds, passing)


@contextlib.contextmanager
def no_long_waits() -> Iterator[None]:
    """Have an answer that asks for a long wait raised at once: huggingface_hub (1.33) would sleep for all of it."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    def look(response: httpx.Response) -> None:
        if response.is_error and (_seconds(response.headers) or 0) > LONGEST_WAIT:
            response.read()
            hf_raise_for_status(response)

    hooks = get_session().event_hooks["response"]
    hooks.append(look)
    try:
        yield
    finally:
        hooks.remove(look)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from; what was merely being handled then is another matter."""
    while error is not None:
        yield error
        error = error.__cause__


def _answer(error: Exception) -> tuple[int | None, float | None]:
    """Return the status of the Hub's answer, and the seconds it asks to wait."""
    from huggingface_hub.errors import HfHubHTTPError

    for link in _chain(error):
        if isinstance(link, HfHubHTTPError):
            return link.response.status_code, _seconds(link.response.headers)
        # hf_xet (1.8) has no error of its own for a refusal, which it does not try again; a 5xx it does.
        if isinstance(link, ConnectionError) and (refused := _XET_REFUSAL.search(str(link))):
            return int(refused[1]), None
    return None, None


def _seconds(headers: Mapping[str, str]) -> float | None:
    """Return how long is to be waited, by `Retry-After` or by the rate limit that is used up."""
    from huggingface_hub.utils import parse_ratelimit_headers

    asked = headers.get("Retry-After", "").strip()
    if asked.isdigit():
        return float(asked)
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit and limit.remaining == 0 else None


def _is_connection(error: Exception) -> bool:
    import httpx

    # An address that is none is not a way that may be better next time.
    if any(isinstance(link, httpx.UnsupportedProtocol) for link in _chain(error)):
        return False
    return any(isinstance(link, (httpx.TransportError, ConnectionError, TimeoutError)) for link in _chain(error))


def _reason(error: Exception) -> str:
    """Return what went wrong in a few words: the innermost error of huggingface_hub or httpx."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    for link in _chain(error):
        if isinstance(link, HfHubHTTPError):
            said = link.server_message or link.response.reason_phrase
            return f"the Hub answered {link.response.status_code} ({said[:200]})"
        if isinstance(link, (httpx.TransportError, ConnectionError, TimeoutError)):
            return f"the connection to the Hub broke ({str(link)[:200] or type(link).__name__})"
    return f"{type(error).__name__}: {str(error)[:300]}"
