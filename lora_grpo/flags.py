"""Command-line flags from a dataclass: argparse reads them, pydantic converts them, and docstrings are their help.

    @dataclass(frozen=True)
    class Options:
        run: Annotated[Path, Flag("RUN")]           # an argument without a flag
        k: tuple[int, ...] = (1,)                   # --k 1 10
        output: Annotated[Path | None, Flag("--output-dir", "--output")] = None

    options = read_flags(Options, sys.argv[1:], __doc__)

A field that is a dataclass is a section: `--train.max-steps` sets the field `max_steps` of the field `train`.
"""

import argparse
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import TypeAdapter, ValidationError

from lora_grpo import commands
from lora_grpo.errors import UserError, suggestion

Flags = TypeVar("Flags")

_HELP = frozenset(("-h", "--help"))


class Flag:
    """In `Annotated`: the flags of a field if they differ from its name, or the name of a positional argument."""

    def __init__(self, *names: str) -> None:
        self.names = names


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see --help")


def read_flags(kind: type[Flags], arguments: Sequence[str], description: str | None) -> Flags:
    """Parse command-line arguments into an instance of a dataclass. `--help` prints the description first, and exits.

    Raises:
        UserError: an unknown, missing or invalid argument.
    """
    return convert(kind, read_given(kind, arguments, description))


def read_given(
    kind: type,
    arguments: Sequence[str],
    description: str | None = None,
    *,
    defaults: Any = None,
    shown: Callable[[str], bool] = bool,
) -> dict[str, Any]:
    """Return only the values that the arguments give, by field, as text: `{"train": {"max_steps": "60"}}`.

    Args:
        defaults: the instance of the dataclass whose values `--help` shows as defaults.
        shown: whether `--help` shows a field. By default, it shows all.

    Raises:
        UserError: an unknown or missing argument.
    """
    parser = _Parser(
        commands.program(),
        usage="%(prog)s [ARGUMENT ...] [--FLAG VALUE ...]",  # argparse would list every flag
        description=commands.described(inspect.cleandoc(description or "")),
        formatter_class=_help_formatter() if _HELP & set(arguments) else argparse.HelpFormatter,
        allow_abbrev=False,
    )
    _add_flags(parser, kind, defaults, shown)
    values_by_name, unknown = parser.parse_known_intermixed_args([_normalized(word) for word in arguments])
    if unknown:
        flags = [name for name in parser._option_string_actions if name.startswith("--")]
        raise UserError(f"unknown argument {unknown[0]}; {suggestion(unknown[0], flags, otherwise='see --help')}")

    given: dict[str, Any] = {}
    for name, value in vars(values_by_name).items():
        *sections, key = name.split(".")
        if value == "" and key != "system":  # of an unset variable of the shell; a system prompt may be empty
            raise UserError(f"{shown_name(kind, name)} is empty; pass a value, or leave it out")
        values = given
        for section in sections:
            values = values.setdefault(section, {})
        values[key] = value
    return given


def _help_formatter() -> type[argparse.HelpFormatter]:
    """Return the formatter of `--help`: in columns, and in colors on a terminal that has them."""
    from rich_argparse import RawDescriptionRichHelpFormatter  # argparse makes one for each flag; runs need none

    class Formatter(RawDescriptionRichHelpFormatter):
        text_markup = False  # a description or a help text may contain [brackets]
        help_markup = False
        group_name_formatter = str  # as they are: "options", not "Options"

    return Formatter


def _normalized(word: str) -> str:
    """Return an argument with dashes in the name of its flag, and with the home folder in place of `~`."""
    name, equals, value = "", "", word
    if word.startswith("--"):
        name, equals, value = word.partition("=")
    if value.startswith("~/"):  # the shell keeps `--flag=~/path`
        value = str(Path(value).expanduser())
    return name.replace("_", "-") + equals + value


def convert(kind: type[Flags], values: Any) -> Flags:
    """Return an instance of a dataclass with each value converted to its field's type and checked against its range."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as errors:
        error = errors.errors()[0]
    expected = error["msg"].replace("Input should be", "expected").replace("Tuple should have", "expected")
    expected = expected.replace("a valid tuple", "a list").partition(", unable to parse")[0]
    expected = re.sub("^expected (?=greater|less)", "expected a value ", expected)
    name = ".".join(str(part) for part in error["loc"] if isinstance(part, str))
    raise UserError(f"{shown_name(kind, name)} is {error['input']!r}; {expected}")


def flag(name: str) -> str:
    """Return the command-line flag of a dotted field name."""
    return "--" + name.replace("_", "-")


def shown_name(kind: type, name: str) -> str:
    """Return how the command line calls a dotted field of a dataclass: by a flag, or the name of an argument."""
    return next(iter(_names_of(kind, name)), flag(name))


def _names_of(kind: type, name: str) -> tuple[str, ...]:
    """Return the names in the `Flag` of a dotted field of a dataclass; () without one."""
    first, _, rest = name.partition(".")
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if field.name.rstrip("_") != first:
            continue
        for part in _parts(hints[field.name]):
            if isinstance(part, Flag):
                return part.names
            if rest and isinstance(part, type) and dataclasses.is_dataclass(part):
                return _names_of(part, rest)
    return ()


def _add_flags(
    parser: argparse.ArgumentParser, kind: type, defaults: Any, shown: Callable[[str], bool], prefix: str = ""
) -> None:
    """Add the flags of a dataclass and of its sections to a parser.

    Args:
        defaults: see `read_given`.
        prefix: the name of the section with a dot, such as `train.`; empty for the dataclass itself.
    """
    help_of_field = _docstrings(kind)
    hints = get_type_hints(kind, include_extras=True)
    group: argparse._ArgumentGroup | argparse.ArgumentParser = parser
    if prefix:
        group = parser.add_argument_group(prefix.rstrip("."))
    for field in dataclasses.fields(kind):
        default = field.default if defaults is None else getattr(defaults, field.name)
        name = prefix + field.name.rstrip("_")
        parts = list(_parts(hints[field.name]))

        # A section has flags of its own.
        sections = [part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)]
        if sections:
            defaults_of_section = None if defaults is None else default
            _add_flags(parser, sections[0], defaults_of_section, shown, f"{name}.")
            continue
        names: tuple[str, ...] = (flag(name),)
        for part in parts:
            if isinstance(part, Flag):
                names = part.names
        if not names:  # `Flag()`: a setting without a flag
            continue

        help_text = " ".join(help_of_field.get(field.name, "").split()).replace("%", "%%")
        has_default = default is not False and default not in (None, (), "", dataclasses.MISSING)
        if has_default:
            shown_default = default
            if isinstance(default, tuple):
                shown_default = " ".join(map(str, default))
            help_text += f" (default: {shown_default})"
        options: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": help_text if shown(name) else argparse.SUPPRESS,
        }

        if bool in parts:
            group.add_argument(*names, dest=name, action="store_true", **options)
            section_name, dot, last = names[0][2:].rpartition(".")
            options["help"] = argparse.SUPPRESS
            group.add_argument(f"--{section_name}{dot}no-{last}", dest=name, action="store_false", **options)
            continue

        # argparse converts the words of a choice and `None`; pydantic everything else.
        choices: dict[str, Any] = {}
        for part in parts:
            if get_origin(part) is Literal:
                choices |= {str(value): value for value in get_args(part)}
        value_of_word = dict(choices)
        if NoneType in parts:
            value_of_word["None"] = None
        options["type"] = functools.partial(_value_or_text, value_of_word)
        if not names[0].startswith("-"):
            is_required = field.default is dataclasses.MISSING
            group.add_argument(name, metavar=names[0], nargs=None if is_required else "?", **options)
            continue
        options["metavar"] = "|".join(choices) or "VALUE"
        if any(get_origin(part) is tuple for part in parts):
            options |= {"nargs": "+", "action": "extend"}
        group.add_argument(*names, dest=name, **options)


def _value_or_text(value_of_word: Mapping[str, Any], text: str) -> Any:
    return value_of_word.get(text, text)


def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, also of those that it inherits."""
    docstrings = {}
    for base in kind.__mro__:
        if dataclasses.is_dataclass(base):
            for param in docstring_parser.parse_from_object(base).params:
                docstrings[param.arg_name] = param.description or ""
    return docstrings


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the parts of a type hint: `int`, `None` and a Flag for `Annotated[int | None, Flag("--k")]`."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)
