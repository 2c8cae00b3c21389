"""Runs a command, turns errors into one line and an exit code, and closes an unfinished run."""

import atexit
import contextlib
import gc
import io
import os
import select
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any

from lora_grpo import console, distributed, process_state
from lora_grpo.commands import to_start_again
from lora_grpo.config import RunConfig
from lora_grpo.errors import Interrupted, RunError, UserError
from lora_grpo.files import disk
from lora_grpo.runs import FailedElsewhere, Run, begun_run, end_run
from lora_grpo.settings import named_code, resolved_path


def run_command(main: Callable[[], None]) -> int:
    """Run a command, and print an error as one line. Unexpected exceptions keep their traceback.

    Returns:
        0 on success, 2 for a user error, 1 for a failed run, 128 + signal for an interrupted run.
    """
    process_state.do_not_track()
    process_state.limit_spinning()
    process_state.hide_deprecations()
    process_state.hide_library_bars()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a model's text may contain what the terminal cannot encode
            stream.reconfigure(errors="backslashreplace")
    atexit.register(_limit_collection_at_exit)
    _handle_sigterm(_terminate)
    try:
        with console.listening(console.Terminal()), distributed.member():
            _run_and_flush(main)
    except BaseException as error:
        # If one process fails, the launcher sends SIGTERM to the others, which are already exiting.
        _handle_sigterm(signal.SIG_IGN)
        code = _end(error)
        if code is None:
            raise
        return code
    finally:
        _handle_sigterm(signal.SIG_DFL)
    return 0


def _run_and_flush(main: Callable[[], None]) -> None:
    """Run a command and write what it has printed, so that a closed pipe is an error that `_end` handles."""
    try:
        main()
    except SystemExit:  # of --help
        _flush()
        raise
    _flush()


def _flush() -> None:
    if not sys.stdout.closed:  # a task file may close it
        sys.stdout.flush()


def _limit_collection_at_exit() -> None:
    """Exclude all objects from garbage collection at exit, which would scan them for 0.9 s with torch.

    Triton 3.9, which torch 2.15 brings, prints 70 lines about its objects that are not collected.
    """
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


def _end(error: BaseException) -> int | None:
    """Record in run.json how the command ended, print it, and return the exit code; None for other exceptions."""
    run = begun_run()
    if isinstance(error, BrokenPipeError) and _drop_closed_pipes():  # `... | head`
        error = Interrupted("", signal.SIGPIPE)
    error = end_run(error)  # a full disk is a RunError from here on, and a failure elsewhere a FailedElsewhere
    has_space_for_report = not isinstance(error, disk.DiskFullError)
    if run and distributed.is_main() and has_space_for_report:
        _report(run)
    if isinstance(error, FailedElsewhere):
        return error.exit_code

    how_to_resume = ""
    if run:
        how_to_resume = f"resume with: {resume_command(run.config)}"
    if isinstance(error, disk.DiskFullError):
        fix = f"free some space, then {how_to_resume or 'run the command again'}"
        print(f"error: {error}; {fix}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, (UserError, RunError)):
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        signal_number = error.signal_number if isinstance(error, Interrupted) else signal.SIGINT
        if distributed.is_main() and signal_number != signal.SIGPIPE:
            parts = [str(error) or "interrupted", how_to_resume]
            print("; ".join(part for part in parts if part), file=sys.stderr)
        return 128 + signal_number
    return None  # an unexpected error keeps its traceback


def resume_command(config: RunConfig) -> str:
    """Return the command that resumes a run of this process. Code in the recipe's own file needs no flags."""
    launcher = []
    if config.processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.processes)]
    own_file = resolved_path(sys.argv[0])
    flags = dict.fromkeys(code.flags for code in named_code(config) if code.key != own_file)
    words = [word for flag_and_values in flags for word in flag_and_values]
    return shlex.join([*to_start_again(launcher), *words, "--resume", "--output-dir", str(config.folder)])


def _report(run: Run) -> None:
    """Write the report of an unfinished run and print its path."""
    if run.record["status"] != "complete" and run.folder.is_dir():
        from lora_grpo.report import report_line  # loads evaluation and NumPy, which other commands start without

        print(report_line(run.folder), file=sys.stderr)


def _drop_closed_pipes() -> bool:
    """Redirect the output of broken pipes to /dev/null, and return whether there were any."""
    outputs = select.poll()
    for number in (1, 2):
        outputs.register(number, 0)  # a pipe without a reader has an error
    closed = [number for number, _ in outputs.poll(0)]
    for number in closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return bool(closed)


def _handle_sigterm(handler: Any) -> None:
    with contextlib.suppress(ValueError):  # only the main thread can set signal handlers
        signal.signal(signal.SIGTERM, handler)


def _terminate(signal_number: int, frame: object) -> None:
    raise Interrupted("terminated", signal_number)
