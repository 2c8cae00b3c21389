"""The flags of a script: one dataclass, with every mistake told in one line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import TypeVar

import tyro

from lora_grpo.errors import UserError

Flags = TypeVar("Flags")


def read_flags(flags: type[Flags], arguments: Sequence[str], *, prog: str, description: str) -> Flags:
    """Return the dataclass that the arguments describe.

    Args:
        flags: the dataclass; its docstrings are the help.
        arguments: the arguments after the program's name.
        prog: the program's name in `--help`.
        description: text above the flags in `--help`.

    Raises:
        UserError: an argument is unknown, missing or no such value.
        SystemExit: `--help` was asked for.
    """
    said = io.StringIO()
    try:
        # tyro draws a box around its mistakes; what it writes for --help goes to stdout.
        with contextlib.redirect_stderr(said):
            return tyro.cli(flags, args=list(arguments), prog=prog, description=description)
    except SystemExit as ended:
        if not ended.code:
            raise
        lines = (line.strip("│╭╮╰╯─ ") for line in said.getvalue().splitlines()[1:])
        text = " ".join(line for line in lines if line)
        text = text.split("For full helptext")[0].split("Argument helptext")[0].strip()
        raise UserError(text or "the arguments cannot be read; --help lists them") from None
