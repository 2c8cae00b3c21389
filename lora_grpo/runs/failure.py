"""How a run ends that does not finish, for the command line and the Python API."""

from lora_grpo import distributed
from lora_grpo.errors import Interrupted, RunError, UserError
from lora_grpo.files import disk
from lora_grpo.runs.run import begun_run, close_run


def known_error(error: BaseException) -> BaseException:
    """Return an error of a full disk or of a path as a RunError or a UserError; any other error as it is."""
    disk_error = disk.disk_full(error)
    if disk_error:
        return disk_error
    if isinstance(error, OSError) and error.filename:
        message = f"{error.filename}: {error.strerror}; pass another path, or change the permissions"
        return RunError(message) if begun_run() else UserError(message)
    return error


def close_failed_run(error: BaseException) -> str | None:
    """Record in run.json how the open run ended, and tell the other processes. Return the error of one that failed.

    If another process has failed, this one may only have lost the connection to it. Its own error is then not recorded,
    except for a UserError or a RunError.

    Args:
        error: as `known_error` returns it.
    """
    if isinstance(error, (UserError, RunError)):
        close_run("failed", str(error))
        distributed.report_error(str(error))
        return None
    first_failure = distributed.reported_error()
    if first_failure:
        close_run("failed", first_failure)
    elif isinstance(error, (Interrupted, KeyboardInterrupt)):
        close_run("interrupted")
    else:
        close_run("failed", repr(error))
        distributed.report_error(repr(error))
    return first_failure
