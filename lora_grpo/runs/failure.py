"""How a run ends that does not finish: the error is recorded in run.json, and told once by all processes."""

import sys

from lora_grpo import distributed
from lora_grpo.errors import Interrupted, RunError, UserError
from lora_grpo.files import disk
from lora_grpo.runs.run import begun_run, close_run


class FailedElsewhere(RunError):
    """This process ends because another one has failed, which tells why. The message is that of the other process."""


def end_run(error: BaseException) -> BaseException:
    """Record in run.json that an error or a signal has ended the open run, and return the error to tell.

    An error of a full disk, of the GPU's memory or of a path is returned as a RunError or a UserError. Without an open
    run, nothing is recorded. If several processes train, the others learn the error of the one that failed first.
    """
    error = _known_error(error)
    if isinstance(error, (UserError, RunError)):
        close_run("failed", str(error))
        distributed.report_error(str(error))
        return error

    # A signal or an unexpected error may follow from another process: its launcher ends this one, or its connection is
    # lost.
    first_failure = distributed.reported_error()
    if first_failure:
        close_run("failed", first_failure)
        return FailedElsewhere(first_failure)
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        close_run("interrupted")
        return error
    close_run("failed", repr(error))
    distributed.report_error(repr(error))
    return error


def _known_error(error: BaseException) -> BaseException:
    """Return an error of a full disk, of the GPU's memory or of a path as a RunError or a UserError.

    Any other error is returned as it is. A training step that runs out of memory has a message of its own.
    """
    disk_error = disk.disk_full(error)
    if disk_error:
        return disk_error
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        next_step = "resume the run with --resume" if begun_run() else "run the command again"
        reason = " ".join(str(error).split())[:300]
        return RunError(f"the GPU ran out of memory; close other programs that use it, then {next_step} ({reason})")
    if isinstance(error, OSError) and error.filename:
        message = f"{error.filename}: {error.strerror}; pass another path, or change the permissions"
        return RunError(message) if begun_run() else UserError(message)
    return error
