"""Objects of this process that a run uses in place of a name: a task, a reward, rows.

    with known(Objects(...)):
        find("python:Spelling")          # the object that was given to `lora_grpo.train`

Settings and run.json hold names only, so an object has one: `python:` and its own name. Such a run can be resumed and
evaluated only by Python code that gives the same objects.
"""

import contextlib
import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.errors import UserError

_PREFIX = "python:"


@dataclass
class Objects:
    """The objects of one run, by name."""

    values: dict[str, Any] = field(default_factory=dict)
    """What rooms use: a task, a reward function, rows."""
    sources: dict[str, Any] = field(default_factory=dict)
    """What the user gave, whose source code is recorded."""

    def add(self, name: str, value: Any, source: Any = None) -> str:
        """Add an object and return the name that settings use for it."""
        full_name = f"{_PREFIX}{name}"
        if full_name in self.values:
            raise UserError(f"two Python objects have the name {name!r}; rename one of them")
        self.values[full_name] = value
        self.sources[full_name] = value if source is None else source
        return full_name


_known: list[Objects] = []
"""The objects of the running call of the API; the innermost is the last one."""


@contextlib.contextmanager
def known(objects: Objects) -> Iterator[None]:
    """Let rooms find these objects in the block."""
    _known.append(objects)
    try:
        yield
    finally:
        _known.pop()


def is_name(name: str) -> bool:
    """Return whether a name in the settings is one of an object."""
    return name.startswith(_PREFIX)


def title(name: str) -> str:
    """Return the object's own name."""
    return name.removeprefix(_PREFIX)


def find(name: str) -> Any:
    """Return an object by its name.

    Raises:
        UserError: this process was not given the object.
    """
    for objects in reversed(_known):
        if name in objects.values:
            return objects.values[name]
    raise UserError(
        f"{name!r} is an object of the Python code that started the run; use lora_grpo from Python with the same object"
    )


def describe(name: str) -> dict[str, str | None]:
    """Return the module of an object and the SHA-256 of its source code, None if it has no source."""
    source = next(objects.sources[name] for objects in reversed(_known) if name in objects.sources)
    defined = source
    if not inspect.isroutine(source) and not inspect.isclass(source):  # an instance
        defined = type(source)
    try:
        digest = hashlib.sha256(inspect.getsource(defined).encode()).hexdigest()
    except (OSError, TypeError):  # it was typed into an interpreter, or is written in C
        digest = None
    return {"module": getattr(defined, "__module__", None), "sha256": digest}
