"""Standard output and error whose reader is gone, such as `| head` or a closed terminal."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import stat
import sys
from typing import Any


def hangup_signals() -> list[signal.Signals]:
    """Return the signals that a closing terminal sends to this process, unless it ignores them, as with `nohup`."""
    return [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]


def drop_unwritable() -> bool:
    """Redirect output streams that fail to /dev/null, and return whether there were any."""
    failed = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
            readers = select.poll()
            readers.register(stream.fileno(), 0)
            is_open = not readers.poll(0)  # a pipe without a reader has an error
        except io.UnsupportedOperation:  # not a file, in a test
            continue
        except OSError:
            is_open = False
        if not is_open:
            failed = True
            _redirect(stream)
    return failed


def drop_terminal() -> None:
    """Redirect all output except that to files to /dev/null, when the terminal is about to close or has closed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(io.UnsupportedOperation):
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                with contextlib.suppress(OSError):
                    stream.flush()
                _redirect(stream)


def _redirect(stream: Any) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    stream.flush()
