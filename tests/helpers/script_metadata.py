"""The metadata in the first lines of a script, with which `uv run` installs what it needs (PEP 723)."""

import re
import tomllib


def script_metadata(path):
    """Return the metadata of a script, read as PEP 723 says."""
    pattern = r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    content = re.search(pattern, path.read_text(encoding="utf-8"))["content"]
    lines = [line.removeprefix("# ").removeprefix("#") for line in content.splitlines()]
    return tomllib.loads("\n".join(lines))
