"""Find the paths in a text that tell something about this machine or its user."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_START = r"(?:(?<![\w.<~/-])|(?<=\\[nrt]))"
"""Where a path may start: not inside a URL, a relative path or a tag such as `</root>`, but after the escape `\\n`."""
_NOBODY = r"(?:user|username|name|you|your[_-]?name|shared|public|default)(?![\w-])"
"""The name in examples, or of a folder that all users share."""
_NAME = rf"(?!{_NOBODY})[^\W\d][\w.-]*"
_REST = r"[^\s\"'`<>|]{0,200}"
_USER_FOLDER = rf"{_START}(?:(?:/mnt)?/[a-z])?/(?:(?:var/)?home|Users)/{_NAME}{_REST}"
_WINDOWS_USER_FOLDER = rf"{_START}[A-Za-z]:[\\/]+(?i:users)[\\/]+(?i:{_NAME}){_REST}"
_FILE_URL = r"\b(?i:file):/+(?!path/to/)[\w%~.]" + _REST
_PRIVATE = re.compile("|".join([_USER_FOLDER, _WINDOWS_USER_FOLDER, _FILE_URL]))
_ABSOLUTE = re.compile(rf"{_START}/[\w.@+-]+(?:/[\w.@+%=~-]+)+")

_SYSTEM_FOLDERS = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "usr", "var"}
    | {"Applications", "Library", "System"}
)
"""Folders at the root whose content is much the same on other machines."""


def find(text: str, folder: Path | None = None) -> str | None:
    """Return the first private path in a text, or None.

    Private are the home folder, the current folder, `folder` and their parents below the root level, all with their
    content; the folders of users on Linux, macOS and Windows; `file://` URLs; and any path that exists on this machine,
    except in the folders of the system. Other text may look like a path and is none: `/nothink`, `and/or`, `</think>`.
    """
    return find_own(text, folder) or next(_private(text), None)


def find_own(text: str, folder: Path | None = None) -> str | None:
    """Return the first path in a text that is below the home folder, the current folder or `folder`, or None."""
    own = "|".join(re.escape(path) for path in _own_folders(folder))
    match = re.search(rf"{_START}(?:{own})(?![\w-]|\.\w){_REST}", text) if own else None
    return match[0] if match else None


def _own_folders(folder: Path | None) -> Sequence[str]:
    """Return the private folders, the longest first."""
    own = set()
    for path in (Path.cwd(), *([folder.absolute(), folder.resolve()] if folder else [])):
        own |= {str(parent) for parent in (path, *path.parents) if len(parent.parts) > 2}
    homes = {Path.home(), Path.home().resolve()}
    own |= {str(home) for home in homes if home.name}  # not `/`
    return sorted(own, key=len, reverse=True)


def _private(text: str) -> Iterator[str]:
    for match in _PRIVATE.finditer(text):
        yield match[0]
    for match in _ABSOLUTE.finditer(text):
        path = match[0].rstrip(".")
        if path.split("/")[1] not in _SYSTEM_FOLDERS and _exists(path):
            yield path


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # the text is too long for a path, or a folder may not be read
        return False
