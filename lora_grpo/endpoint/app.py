"""The web application of the endpoint: addresses, bodies, streams and errors.

    POST /SECRET/v1/chat/completions     POST /SECRET/v1/completions     GET /SECRET/v1/models

The secret names who asks: an episode, or a process of an agent, for its current episode. `lora-grpo serve` has no
secret.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lora_grpo.endpoint import protocol
from lora_grpo.endpoint.protocol import ChatRequest, Completion, RequestError, TextRequest
from lora_grpo.errors import one_line

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response, StreamingResponse

MAX_BODY_BYTES = 8 * 2**20
"""Maximum size of a request's body."""
_MAX_READ_BYTES = 16 * MAX_BODY_BYTES
"""A longer body is read up to here and thrown away: a client that is still sending would not see the answer."""
BODY_SECONDS = 60.0
"""Time limit for receiving a body."""

T = TypeVar("T")


class Answerer(Protocol):
    """Who answers the requests to an address."""

    async def chat(self, request: ChatRequest) -> Completion:
        """Answer a chat completion."""

    async def complete(self, request: TextRequest) -> Completion:
        """Answer a completion of a text."""


def make_app(
    answerer_at: Callable[[str], Answerer | None], model_names: Sequence[str], host_names: Sequence[str] = ("*",)
) -> Starlette:
    """Return the application.

    Args:
        answerer_at: returns who answers at an address with this secret, None if nobody does. The secret is "" for an
            address without one.
        model_names: what `/v1/models` lists.
        host_names: the hosts that a request may name; `*` is any.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    def answerer_of(request: HttpRequest) -> Answerer:
        answerer = answerer_at(request.path_params.get("secret", ""))
        if answerer is None:
            raise RequestError("no episode is running at this address; use the base_url of this episode", status=404)
        return answerer

    async def chat(request: HttpRequest) -> Response:
        answerer = answerer_of(request)
        parsed = protocol.parse(await _body(request), ChatRequest)
        completion = await _unless_disconnected(request, answerer.chat(parsed))
        if parsed.stream:
            return _stream(completion.chat_events(includes_usage=parsed.includes_usage))
        return JSONResponse(completion.chat())

    async def complete(request: HttpRequest) -> Response:
        answerer = answerer_of(request)
        parsed = protocol.parse(await _body(request), TextRequest)
        completion = await _unless_disconnected(request, answerer.complete(parsed))
        if parsed.stream:
            return _stream(completion.text_events(includes_usage=parsed.includes_usage))
        return JSONResponse(completion.text())

    async def models(request: HttpRequest) -> Response:
        answerer_of(request)
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": "lora_grpo"} for name in model_names]
        return JSONResponse({"object": "list", "data": entries})

    async def not_found(request: HttpRequest) -> Response:
        raise RequestError(
            f"{request.method} {request.url.path!r:.80} is not known; expected POST .../v1/chat/completions, "
            "POST .../v1/completions or GET .../v1/models",
            status=404,
        )

    routes = []
    for prefix in ("", "/{secret}"):
        routes.append(Route(f"{prefix}/v1/chat/completions", chat, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/completions", complete, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/models", models, methods=["GET"]))
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    routes.append(Route("/{path:path}", not_found, methods=methods))
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=host_names, www_redirect=False)],
        exception_handlers={RequestError: _refuse},
    )


async def _body(request: HttpRequest) -> bytes:
    """Return the body of a request, which may be neither too long nor too slow."""
    from starlette.requests import ClientDisconnect

    parts = []
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= MAX_BODY_BYTES:
                    parts.append(part)
                elif num_bytes > _MAX_READ_BYTES:
                    break
    except ClientDisconnect:
        raise RequestError("the client has hung up", status=499) from None
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_SECONDS:g} s", status=408) from None
    if num_bytes > MAX_BODY_BYTES:
        raise RequestError(f"the body has more than {MAX_BODY_BYTES:,} bytes; send less", status=413)
    return b"".join(parts)


async def _unless_disconnected(request: HttpRequest, answer: Awaitable[T]) -> T:
    """Return the answer, or cancel it if the client hangs up, so that no tokens are sampled for nobody."""
    answering = asyncio.ensure_future(answer)
    hanging_up = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((answering, hanging_up), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise RequestError("the client has hung up", status=499)
        return answering.result()
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"the model could not answer: {one_line(error)}", status=500) from error
    finally:
        hanging_up.cancel()
        answering.cancel()


async def _disconnected(request: HttpRequest) -> None:
    """Wait until the client has hung up. The body has been received."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _stream(events: Any) -> StreamingResponse:
    from starlette.responses import StreamingResponse

    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    from starlette.responses import JSONResponse

    assert isinstance(error, RequestError)
    return JSONResponse(error.body(), status_code=error.status)
