"""Find the paths in a text that tell something about this machine or its user."""

import re
from collections.abc import Sequence
from pathlib import Path

_START = r"(?:(?<![\w.<~/-])|(?<=\\[nrt]))"
"""Where a path may start: not inside a URL, a relative path or a tag such as `</root>`, but after the escape `\\n`."""
_PLACEHOLDER_NAME = r"(?:user|username|name|you|your[_-]?name|shared|public|default)(?![\w-])"
"""The name in examples, or of a folder that all users share."""
_NAME = rf"(?!{_PLACEHOLDER_NAME})[^\W\d][\w.-]*"
_REST = r"[^\s\"'`<>|]{0,200}"
_USER_FOLDER = rf"{_START}(?:(?:/mnt)?/[a-z])?/(?:(?:var/)?home|Users)/{_NAME}{_REST}"
_WINDOWS_USER_FOLDER = rf"{_START}[A-Za-z]:[\\/]+(?i:users)[\\/]+(?i:{_NAME}){_REST}"
_FILE_URL = r"\b(?i:file):/+(?!path/to/)[\w%~.]" + _REST
_OF_A_USER = re.compile("|".join([_USER_FOLDER, _WINDOWS_USER_FOLDER, _FILE_URL]))
"""Paths that tell the name of a user, on any machine."""
_ABSOLUTE = re.compile(rf"{_START}/[\w.@+-]+(?:/[\w.@+%=~-]+)+")
"""What may be an absolute path of two or more parts."""

_SYSTEM_FOLDERS = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "usr", "var"}
    | {"Applications", "Library", "System"}
)
"""Folders at the root whose content is much the same on other machines."""


def find(text: str, folder: Path | None = None) -> str | None:
    """Return the first private path in a text, or None.

    These paths are private:

    - the home folder, the current folder, `folder`, their parents below the root level, and everything in all of these
    - the folders of users on Linux, macOS and Windows
    - `file://` URLs
    - any path that exists on this machine, except in the folders of the system

    Other text may look like a path and is none: `/nothink`, `and/or`, `</think>`.
    """
    path = find_in_private_folders(text, folder)
    if path is not None:
        return path
    user_path = _OF_A_USER.search(text)
    if user_path:
        return user_path[0]
    return _find_existing(text)


def find_in_private_folders(text: str, folder: Path | None = None) -> str | None:
    """Return the first path in a text that is a private folder or in one, or None; see `_private_folders`."""
    folders = _private_folders(folder)
    if not folders:
        return None
    any_folder = "|".join(re.escape(path) for path in folders)
    name_ends = r"(?![\w-]|\.\w)"  # `/work/data` is not in `/work/data-2` or `/work/data.old`
    match = re.search(rf"{_START}(?:{any_folder}){name_ends}{_REST}", text)
    return match[0] if match else None


def _private_folders(folder: Path | None) -> Sequence[str]:
    """Return the home folder, and the current folder and `folder` with their parents, the longest first."""
    folders = [Path.cwd()]
    if folder is not None:
        folders += [folder.absolute(), folder.resolve()]

    private = set()
    for path in folders:
        for parent in (path, *path.parents):
            if len(parent.parts) > 2:  # not `/` or a folder in it, such as `/tmp`
                private.add(str(parent))
    for home in (Path.home(), Path.home().resolve()):
        if home.name:  # not `/`
            private.add(str(home))
    return sorted(private, key=len, reverse=True)


def _find_existing(text: str) -> str | None:
    """Return the first path in a text that exists on this machine, outside the folders of the system, or None."""
    for match in _ABSOLUTE.finditer(text):
        path = match[0].rstrip(".")
        root_folder = path.split("/")[1]
        if root_folder not in _SYSTEM_FOLDERS and _exists(path):
            return path
    return None


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # the text is too long for a path, or a folder may not be read
        return False
