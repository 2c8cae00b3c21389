"""`lora-grpo watch`: the report of a run at an address for browsers, live while the run trains."""

from __future__ import annotations

import hashlib
import ipaddress
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from lora_grpo import console
from lora_grpo.config import check_fields
from lora_grpo.endpoint import listen, names_of_server, serving_in_thread
from lora_grpo.errors import UserError
from lora_grpo.files import lock
from lora_grpo.flags import Flag
from lora_grpo.report import live_report
from lora_grpo.runs import read_run

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_SHOWN_FILES = ("run.json", "metrics.jsonl", "completions/*", "validation/*", "evaluation/*", "gguf/*", "best-gguf/*")
"""The files of a run that its page shows."""
_REST_PER_WORK = 10
"""A page that took a second to draw is shown for at least ten, because the run needs the processor."""


@dataclass(frozen=True)
class WatchOptions:
    """Flags of `lora-grpo watch`."""

    run: Annotated[Path, Flag("RUN")]
    """Folder of a run: running, finished or stopped."""
    host: str = "127.0.0.1"
    """Address to listen on. There is no password, so anyone who can reach another address can read the report. On this
    one, browsers must ask for 127.0.0.1 or localhost; a proxy with another name needs `--host 0.0.0.0`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8008
    """Port to listen on; 0 selects a free one."""


def run_watch(options: WatchOptions) -> None:
    """Serve the report of a run until Ctrl-C or SIGTERM."""
    check_fields(options)
    with listen(options.host, options.port) as listener:
        address = ipaddress.ip_address(listener.getsockname()[0])
        if not address.is_loopback:
            console.note(f"warning: there is no password; anyone who can reach {address} can read the report")
        _wait_for_begin(options.run)
        read_run(options.run)  # a mistake ends the command here, with one line
        app = _make_app(_LivePage(options.run), names_of_server(listener))
        with serving_in_thread(app, listener) as url:
            console.result(f"watching {options.run} at {url}; Ctrl-C ends")
            threading.Event().wait()


def _wait_for_begin(folder: Path) -> None:
    """Wait while a process prepares the run: its data, its plan and its model. Until then, it has no run.json."""

    def is_preparing() -> bool:
        return lock.is_held(folder) and not (folder / "run.json").is_file()

    if is_preparing():
        console.note(f"waiting for {folder}, where a run is being prepared")
    while is_preparing():
        time.sleep(0.2)


@dataclass(frozen=True)
class _Drawn:
    """A page, and the files that it shows."""

    files: Hashable
    html: bytes
    etag: str
    renewable_at: float
    """When the page may be drawn again, by the monotonic clock."""


class _LivePage:
    """The page of a run, drawn when a browser asks for it and the run has new files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._drawn: _Drawn | None = None

    def newest(self) -> _Drawn:
        """Return the page. Several browsers share it.

        Raises:
            UserError: the folder is no longer a run, or one of its files cannot be read.
        """
        with self._lock:
            began_at = time.monotonic()
            if self._drawn and began_at < self._drawn.renewable_at:
                return self._drawn
            files = tuple(self._files())
            if self._drawn and files == self._drawn.files:
                return self._drawn

            html = live_report(self._folder).encode()
            etag = f'"{hashlib.sha256(html).hexdigest()}"'
            ended_at = time.monotonic()
            self._drawn = _Drawn(files, html, etag, ended_at + _REST_PER_WORK * (ended_at - began_at))
            return self._drawn

    def _files(self) -> Iterator[Hashable]:
        """Yield what changes when the page would: the sizes and times of files, and whether a process trains."""
        yield lock.is_held(self._folder)
        for pattern in _SHOWN_FILES:
            for path in sorted(self._folder.glob(pattern)):
                try:
                    status = path.stat()
                except FileNotFoundError:  # a temporary file
                    continue
                yield path, status.st_size, status.st_mtime_ns


def _make_app(page: _LivePage, names: Sequence[str]) -> Starlette:
    """Return the application: the page at `/`, with an ETag by which a browser asks for a newer one.

    Args:
        names: the hosts that a request may name; `*` is any.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    def answer(request: Request) -> Response:  # in a thread, as it takes seconds
        try:
            drawn = page.newest()
        except UserError as error:
            return PlainTextResponse(str(error), status_code=503)
        headers = {"ETag": drawn.etag, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        if request.headers.get("If-None-Match") == drawn.etag:
            return Response(status_code=304, headers=headers)
        return HTMLResponse(drawn.html, headers=headers)

    return Starlette(
        routes=[Route("/", answer)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)],
    )
