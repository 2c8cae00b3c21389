"""How a run ends that does not finish: errors of the disk become errors of this package."""

from lora_grpo.errors import RunError, UserError
from lora_grpo.files import disk
from lora_grpo.runs.run import begun_run


def known_error(error: BaseException) -> BaseException:
    """Return an error of a full disk or of a path as a RunError or a UserError; any other error as it is."""
    disk_error = disk.disk_full(error)
    if disk_error:
        return disk_error
    if isinstance(error, OSError) and error.filename:
        message = f"{error.filename}: {error.strerror}; pass another path, or change the permissions"
        return RunError(message) if begun_run() else UserError(message)
    return error
