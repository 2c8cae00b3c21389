"""The two ways a command ends badly: the user can fix it (exit 2), or the run failed (exit 1)."""


class UserError(Exception):
    """A mistake in flags, files or data. The message is one line: what, got, expected, and the fix."""

    exit_code = 2


class RunError(Exception):
    """The run itself failed after it started. The message is one line: what, got, expected, and the fix."""

    exit_code = 1
