"""Parses command-line flags into a dataclass with tyro, and turns every error into one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

import docstring_parser
import tyro

from lora_grpo.errors import UserError

Flags = TypeVar("Flags")


def read_flags(flags: type[Flags], arguments: Sequence[str], *, description: str = "", **options: Any) -> Flags:
    """Parse command-line arguments into an instance of a dataclass, whose docstrings are the help text.

    `options` are further arguments of `tyro.cli`, such as `prog` and `default`. `--help` exits.

    Raises:
        UserError: an unknown, missing or invalid argument.
    """
    stderr = io.StringIO()
    if {"-h", "--help"} & set(arguments):
        print(description)  # tyro would join its lines
        join_help_lines(flags)
    try:
        with contextlib.redirect_stderr(stderr):  # help goes to stdout
            return tyro.cli(flags, args=list(arguments), description="", **options)
    except SystemExit as ended:
        if not ended.code:
            raise
        raise UserError(_one_line(stderr.getvalue())) from None


def join_help_lines(flags: type) -> None:
    """Make every help text of a dataclass one paragraph. Tyro 1.0 keeps the line breaks of indented docstrings."""
    hints = get_type_hints(flags, include_extras=True)
    for field in docstring_parser.parse_from_object(flags).params:
        text = " ".join((field.description or "").split())
        flags.__annotations__[field.arg_name] = Annotated[hints[field.arg_name], tyro.conf.arg(help=text)]
    for kind in get_type_hints(flags).values():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            join_help_lines(kind)


def _one_line(box: str) -> str:
    """Return the message in tyro's box as one line, with the flag that it suggests."""
    lines = [line.strip("│|╭╮╰╯─+ ") for line in box.splitlines()[1:]]
    text = " ".join(line for line in lines if line.strip("-"))
    message = re.split("Perhaps you meant|Argument helptext|For full helptext", text)[0].strip(" .")
    if near := re.search(r"Perhaps you meant[^-]*(--[\w.-]+)", text):
        return f"{message}; did you mean {near[1]}?"
    return f"{message}; see --help"
