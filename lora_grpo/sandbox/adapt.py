"""Adapt modules of the standard library that expect more of the system than a sandboxed process has.

These are ordinary changes to Python objects of one process, and a candidate may undo them. What the process may do is
decided by `lockdown` alone, and nothing here needs a system call that it did not allow before.

Each function gets a module that was just executed, and a function that returns the machine's time zones.
"""

import contextlib
import functools
import io
import sys
from collections.abc import Callable
from typing import Any

TimeZones = Callable[[], dict[str, bytes]]


def _selectors(module: Any, _: TimeZones) -> None:
    """Wait with poll(2). The module was imported when this process could still open an epoll descriptor."""
    module.DefaultSelector = module.PollSelector


def _asyncio_selector_events(module: Any, _: TimeZones) -> None:
    """Let event loops run without a pair of sockets.

    A loop has the pair so that other threads, and signals, can wake it. There are no other threads.
    """

    def make_self_pipe(loop: Any) -> None:
        loop._ssock = loop._csock = None

    module.BaseSelectorEventLoop._make_self_pipe = make_self_pipe
    module.BaseSelectorEventLoop._close_self_pipe = lambda loop: None


def _sqlite3_dbapi2(module: Any, _: TimeZones) -> None:
    """Let databases in memory sort large tables in memory. By default, SQLite does so in a file without a name."""
    connect = module.connect

    def connect_without_files(*args: Any, **kwargs: Any) -> Any:
        connection = connect(*args, **kwargs)
        with contextlib.suppress(module.OperationalError):  # with `autocommit=False`, a transaction has begun
            module.Connection.execute(connection, "PRAGMA temp_store = MEMORY")
        return connection

    module.connect = functools.wraps(connect)(connect_without_files)


def _tempfile(module: Any, _: TimeZones) -> None:
    """Keep temporary files without a name in memory. Those with a name need a file system."""

    class TemporaryFile(module.SpooledTemporaryFile):
        """A file that is in memory up to a size that no program reaches. Its pages count toward the memory limit."""

        def fileno(self) -> int:
            raise io.UnsupportedOperation("fileno")

    # After the size, the arguments are those of `tempfile.TemporaryFile`. A large `SpooledTemporaryFile` moves its
    # content to a `TemporaryFile`, so it now stays in memory, too.
    module.TemporaryFile = functools.partial(TemporaryFile, sys.maxsize)


def _zoneinfo_common(module: Any, time_zones: TimeZones) -> None:
    """Find time zones in memory where the module would look for a Python package with them."""

    def load_tzdata(name: str) -> io.BytesIO:
        zones = time_zones()
        if name not in zones:
            raise module.ZoneInfoNotFoundError(f"No time zone found with key {name}")
        return io.BytesIO(zones[name])

    module.load_tzdata = load_tzdata


def _zoneinfo_tzpath(module: Any, time_zones: TimeZones) -> None:
    """List the time zones in memory."""
    module.available_timezones = lambda: set(time_zones())


MODULES: dict[str, Callable[[Any, TimeZones], None]] = {
    "asyncio.selector_events": _asyncio_selector_events,
    "selectors": _selectors,
    "sqlite3.dbapi2": _sqlite3_dbapi2,
    "tempfile": _tempfile,
    "zoneinfo._common": _zoneinfo_common,
    "zoneinfo._tzpath": _zoneinfo_tzpath,
}
"""Functions by the module that each adapts."""


def adapt(module: Any, time_zones: TimeZones) -> None:
    """Adapt a module that was just executed, if it needs that."""
    if module.__name__ in MODULES:
        MODULES[module.__name__](module, time_zones)
