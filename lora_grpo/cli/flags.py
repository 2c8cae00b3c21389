"""Parses command-line flags into a dataclass with tyro, and turns every error into one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import docstring_parser
import tyro

from lora_grpo.errors import UserError, suggestion

Flags = TypeVar("Flags")


def read_flags(flags: type[Flags], arguments: Sequence[str], *, description: str = "", **options: Any) -> Flags:
    """Parse command-line arguments into an instance of a dataclass, whose docstrings are the help text.

    `options` are further arguments of `tyro.cli`, such as `prog` and `default`. `--help` exits.

    Raises:
        UserError: an unknown, missing or invalid argument.
    """
    _refuse_repeated(arguments, flags)
    stderr = io.StringIO()
    arguments = [_expand_home(argument) for argument in arguments]
    if {"-h", "--help"} & set(arguments):
        print(description)  # tyro would join its lines
        if shutil.get_terminal_size().columns < 40:  # tyro (1.0) does not end if a flag is wider than its column
            os.environ["COLUMNS"] = "40"
        join_help_lines(flags)
    try:
        with contextlib.redirect_stderr(stderr):  # help goes to stdout
            return tyro.cli(flags, args=arguments, description="", **options)
    except SystemExit as ended:
        if not ended.code:
            raise
        raise UserError(_one_line(stderr.getvalue())) from None


def _expand_home(argument: str) -> str:
    """Expand `~` in a path, which the shell leaves in `--flag=~/path` and in quotes."""
    name, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return f"{name}{equals}{Path(value).expanduser()}" if value.startswith("~/") else argument


def _refuse_repeated(arguments: Sequence[str], flags: type) -> None:
    """Reject repeated flags that take lists or a file, because the second would silently replace the first."""
    names = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    for name in ("--config", *_list_flags(flags)):
        if names.count(name) > 1:
            fix = "merge the files into one" if name == "--config" else "give all its values after one"
            raise UserError(f"{name} is given {names.count(name)} times; {fix}")


def _list_flags(flags: type, prefix: str = "--") -> list[str]:
    """Return the flags of a dataclass that take several values."""
    found = []
    for name, hint in get_type_hints(flags, include_extras=True).items():
        renamed = [each.name for each in getattr(hint, "__metadata__", ()) if getattr(each, "name", None) is not None]
        name = renamed[0] if renamed else name.rstrip("_").replace("_", "-")
        kind = getattr(hint, "__origin__", hint)
        if dataclasses.is_dataclass(kind):
            found += _list_flags(cast(type, kind), f"{prefix}{name}." if name else prefix)
        elif "tuple[" in str(hint):
            found.append(f"{prefix}{name}")
    return found


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
    """Return the message in tyro's box as one line, with the flag that is close to what was given."""
    lines = [line.strip("│|╭╮╰╯─+ ") for line in box.splitlines()[1:]]
    text = " ".join(line for line in lines if line.strip("-"))
    message = re.split("Perhaps you meant|Argument helptext|For full helptext", text)[0].strip(" .")
    if near := re.search(r"Perhaps you meant[^-]*(--[\w.-]+)", text):
        return f"{message}; did you mean {near[1]}?"
    if number := re.search(r"Error parsing (--\S+): (?:invalid literal for|could not convert).*: ('.*')$", message):
        return f"{number[1]} is {number[2]}; expected a {'whole ' * ('int()' in message)}number"
    if choice := re.search(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", message):
        given, flag, known = choice[1], choice[2], re.findall("'([^']*)'", choice[3])
        return f"{flag} is {given!r}; {suggestion(given, known)}"
    return f"{message}; see --help"
