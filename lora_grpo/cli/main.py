"""From errors and signals to one line and an exit code."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from typing import Any

from lora_grpo import distributed
from lora_grpo.errors import Interrupted, RunError, UserError
from lora_grpo.report import report_line
from lora_grpo.runs import Run, begun_run, close_run


def run_command(main: Callable[[], None]) -> int:
    """Run a recipe or script and turn its two kinds of error into one line and an exit code.

    Returns:
        0, 2 for a mistake of the user's, 1 for a failed run, 128 + signal for an interrupted one.
    """
    _on_sigterm(_terminate)
    try:
        with distributed.silence_other_processes():
            main()
    except BaseException as error:
        # A launcher sends it to the ranks that are left when one has failed: they are at their ends already.
        _on_sigterm(signal.SIG_IGN)
        code = _end(error)
        if code is None:
            raise
        return code
    finally:
        _on_sigterm(signal.SIG_DFL)
    distributed.leave()
    return 0


def _end(error: BaseException) -> int | None:
    """Say how the command ends, in run.json too, and return its exit code; None where the error is the kit's own."""
    run = begun_run()
    if isinstance(error, (UserError, RunError)):
        close_run("failed", str(error))
        distributed.tell(str(error))
        distributed.let_main_speak()
        _report(run)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    elsewhere = (
        distributed.told()
    )  # where another rank failed and said so, what is left of it here is a broken connection
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        again = close_run("failed" if elsewhere else "interrupted", elsewhere)
        _report(run)
        if distributed.is_main() and not elsewhere:
            print((str(error) or "interrupted") + (f"; go on with: {again}" if again else ""), file=sys.stderr)
        return 128 + (error.signal_number if isinstance(error, Interrupted) else signal.SIGINT)
    close_run("failed", elsewhere or repr(error))
    if not elsewhere:
        distributed.tell(repr(error))
    _report(run)
    return RunError.exit_code if elsewhere else None


def _report(run: Run | None) -> None:
    """Write the report of a run that ended early, and say where it is."""
    if run and distributed.is_main() and run.record["status"] != "complete":
        print(report_line(run.folder), file=sys.stderr)


def _on_sigterm(handler: Any) -> None:
    with contextlib.suppress(ValueError):  # signals can be set in the main thread alone
        signal.signal(signal.SIGTERM, handler)


def _terminate(signal_number: int, frame: object) -> None:
    raise Interrupted("terminated", signal_number)
