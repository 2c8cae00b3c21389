"""Ways in which a file gets damaged, and a command run in this process on the damaged file."""

import contextlib
import copy
import io
import json
import random
import shutil

from lora_grpo.cli import run_command


def _half(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _random(path):
    path.write_bytes(random.Random(0).randbytes(400))


def _invalid_utf8(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\xff\xfe\xc3(" + data[len(data) // 2 :])


def _directory(path):
    path.unlink()
    path.mkdir()


def _writing(data):
    return lambda path: path.write_bytes(data)


WHOLE = {
    "half": _half,
    "empty": _writing(b""),
    "random bytes": _random,
    "NUL bytes": _writing(bytes(400)),
    "invalid UTF-8": _invalid_utf8,
    "a directory": _directory,
    "a list": _writing(b"[1, 2]\n"),
    "a number": _writing(b"7\n"),
    "a huge number": _writing(b"1" * 5000 + b"\n"),
    "a deep list": _writing(b'{"a": ' + 100_000 * b"[" + 100_000 * b"]" + b"}\n"),
    "null": _writing(b"null\n"),
    "a text": _writing(b'"text"\n'),
    "an empty object": _writing(b"{}\n"),
    "a lone surrogate": _writing(b'"\\ud800"\n'),
    "an object with a lone surrogate": _writing(b'{"\\ud800": "\\ud800"}\n'),
}
"""Damage of a whole file, by name: a function of its path."""

VALUES = (
    *("NaN", "Infinity", "1e999", "-1", "1.5", "1" * 400, '"text"', '"\\ud800"', "[]", "{}", "null", "true"),
    '[{"a": [1]}]',
)
"""JSON values, to take the place of another."""


def places(value, path=()):
    """Yield the path of every value in a JSON value; of a list, only those of its first element."""
    yield path
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from places(entry, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def with_value(value, path, text):
    """Return a JSON value as text in which `text` takes the place of one of its values."""
    placeholder = "the value that is replaced"
    changed = copy.deepcopy(value)
    *keys, last_key = path
    parent = changed
    for key in keys:
        parent = parent[key]
    parent[last_key] = placeholder
    return json.dumps(changed).replace(json.dumps(placeholder), text)


def outcome(main):
    """Run a command in this process. Return its exit code and what it wrote to stderr; None for a traceback."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = run_command(main)
        except SystemExit as ended:
            code = ended.code or 0
    return code, errors.getvalue()


def content(folder):
    """Return what a folder holds, by path, without the locks that commands leave."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


@contextlib.contextmanager
def damaged(path, damage):
    """Damage a file in a `with` block, and restore it."""
    copy = path.with_name(f"{path.name}.copy-of-test")
    shutil.copy2(path, copy)
    try:
        damage(path)
        yield
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        copy.rename(path)
