"""Requests to a server, and its errors in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.sampling import in_threads

_CONCURRENT_REQUESTS = 16
_CONNECT_SECONDS = 10
_KEY_VARIABLE = "OPENAI_API_KEY"
_NO_ROUTE = (404, 405, 501)
_BUSY = (429, 503)

T = TypeVar("T")
R = TypeVar("R")


class RefusedRequest(UserError):
    """A server answered with an error.

    Attributes:
        reason: the server's own message.
        has_route: False if the server does not have the route at all.
        is_temporary: whether the server is busy.
    """

    def __init__(self, message: str, reason: str, *, has_route: bool, is_temporary: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.has_route = has_route
        self.is_temporary = is_temporary

    @property
    def means_no_chat(self) -> bool:
        """Whether there is no chat: no route for it, or a model without a chat template."""
        return not self.has_route or "template" in self.reason


class ServerClient:
    """Sends requests to one server. Its methods may be called from several threads.

    Args:
        address: URL without the route and without `/v1`, such as `http://127.0.0.1:8000`.
        seconds: time limit of a request.
    """

    def __init__(self, address: str, seconds: float) -> None:
        import httpx2

        self.address = address
        self._seconds = seconds
        headers = {}
        key = os.environ.get(_KEY_VARIABLE)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        timeout = httpx2.Timeout(seconds, connect=_CONNECT_SECONDS)
        try:
            self._client = httpx2.Client(base_url=address, headers=headers, timeout=timeout, trust_env=False)
        except httpx2.InvalidURL as error:
            raise UserError(
                f"{address} is no address of a server ({first_line(error)}); write http://HOST:PORT with its port"
            ) from None

    def get(self, route: str) -> dict[str, Any]:
        """Return what the server answers to a GET request. See `post` for the errors."""
        return self._object(route, self._send("GET", route, None))

    def get_list(self, route: str) -> list[Any]:
        """Return a list that the server answers to a GET request."""
        answer = self._send("GET", route, None)
        if not isinstance(answer, list):
            raise self._unexpected(route, f"expected a list, got {answer!r:.100}")
        return answer

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer.

        Raises:
            RefusedRequest: the server answers with an error.
            UserError: there is no server, or one that does not answer in JSON.
            RunError: the server does not answer in time.
        """
        return self._object(route, self._send("POST", route, body))

    def knows(self, route: str) -> bool:
        """Whether the server answers a GET request for a route."""
        try:
            self._send("GET", route, None)
        except UserError:
            return False
        return True

    def parsed(self, route: str, parse: Callable[[], R]) -> R:
        """Return what `parse` returns, or raise a UserError if an answer of this route has another form."""
        try:
            return parse()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._unexpected(route, f"{type(error).__name__}: {first_line(error)}") from error

    def _send(self, method: str, route: str, body: Mapping[str, Any] | None) -> Any:
        import httpx2

        try:
            answer = self._client.request(method, route, json=body)
        except httpx2.TimeoutException:
            raise RunError(
                f"the server at {self.address} did not answer {route} within {self._seconds:g} s; see its log, or "
                "send it fewer requests of others"
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise UserError(
                f"no server answers at {self.address} ({first_line(error)}); start it, or correct the address"
            ) from None
        if not answer.is_success:
            raise self._refused(route, answer)
        try:
            return answer.json()
        except ValueError:
            raise self._unexpected(route, f"no JSON, but {_one_line(answer.text)!r:.100}") from None

    def _object(self, route: str, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise self._unexpected(route, f"expected an object, got {answer!r:.100}")
        return answer

    def _refused(self, route: str, answer: Any) -> RefusedRequest:
        status = answer.status_code
        reason = _reason(answer)
        if status in (401, 403):
            fix = f"set the environment variable {_KEY_VARIABLE} to its key"
        elif status in _NO_ROUTE:
            fix = "correct the address or the model, or update the server"
        else:
            fix = "see the log of the server"
        return RefusedRequest(
            f"the server at {self.address} refuses {route} (HTTP {status}: {reason}); {fix}",
            reason,
            has_route=status not in _NO_ROUTE,
            is_temporary=status in _BUSY,
        )

    def _unexpected(self, route: str, details: str) -> UserError:
        return UserError(
            f"the server at {self.address} gives an unexpected answer to {route} ({details}); expected that of an "
            "OpenAI-compatible server: correct the address"
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def all_of(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `function(item)` of all items, a few at a time. After an error, no further ones begin."""
    results = dict(in_threads(lambda index: function(items[index]), len(items), _CONCURRENT_REQUESTS))
    return [results[index] for index in range(len(items))]


def _reason(answer: Any) -> str:
    """Return the message of an error: OpenAI's form, Ollama's, FastAPI's, or the text."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    message = answer.text
    if isinstance(body, dict):
        error = body.get("error")
        if isinstance(error, dict):
            error = error.get("message")
        message = error or body.get("message") or body.get("detail") or message
    return _one_line(str(message))[:300]


def _one_line(text: str) -> str:
    return " ".join(text.split())
