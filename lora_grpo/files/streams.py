"""Standard output and error whose reader is gone: `| head`, or a terminal that was closed."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import stat
import sys
from typing import TextIO


def hangup_signals() -> list[signal.Signals]:
    """Return the signals that a closing terminal sends to this process, unless it ignores them, as with `nohup`."""
    return [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]


def drop_terminal() -> None:
    """Redirect all output except that to files to /dev/null: the terminal closes, and printing to it would fail."""
    for stream in (sys.stdout, sys.stderr):
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            _discard(stream)


def drop_closed_pipes() -> bool:
    """Redirect output to pipes whose reader is gone to /dev/null, and return whether there were any."""
    closed = False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(io.UnsupportedOperation):  # not a file, in a test
            readers = select.poll()
            readers.register(stream.fileno(), 0)
            if readers.poll(0):  # a pipe without a reader has an error
                closed = True
                _discard(stream)
    return closed


def _discard(stream: TextIO) -> None:
    """Redirect a stream, and what libraries write to its file descriptor, to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    with contextlib.suppress(OSError):
        stream.flush()
