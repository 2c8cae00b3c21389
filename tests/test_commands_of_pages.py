"""Every command in the pages exists, with every flag that they give it."""

import contextlib
import functools
import io
import re
from pathlib import Path

import pytest

from lora_grpo import commands
from lora_grpo.cli import verbs

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "skills" / "lora-grpo" / "SKILL.md"]
OLD_PAGES = ("results-archive.md", "log.md", "CHANGELOG.md")  # commands as they were when something was measured
SHORT_NAMES = {"--task": "--data.task", "--rewards": "--reward"}


def commands_of(page):
    """Return the commands of ours in the blocks of a page that are shell: in one line, without comments."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    shell = "\n".join(text for language, text in blocks if language in ("", "bash", "sh", "console"))
    found = []
    for line in shell.replace("\\\n", " ").splitlines():
        for command in re.split(r" && | \| |; ", re.sub(r"(^|\s)# .*", "", line)):
            command = re.sub(r"^([$!] ?|nohup |time |[A-Z_]+=\S+ )*", "", command.partition(" > ")[0].strip())
            if re.match(r"lora-grpo [a-z]|(uv run|python) (recipes|scripts|tools)/", command):
                found.append(re.sub(r"^uv run ", "python ", command))
    return found


FOUND = sorted({(command, page.name) for page in PAGES if page.name not in OLD_PAGES for command in commands_of(page)})


@functools.cache
def help_of(*words):
    """Return what `lora-grpo` prints with these words."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        verbs.run_front_door(list(words))
    return printed.getvalue()


def known_flags(command):
    """Return a text that contains every flag of a command."""
    program, name, *words = command.split()
    if program == "python":
        path = ROOT / name
        assert path.is_file(), name
        if path.parent.name == "tools":
            return path.read_text(encoding="utf-8")
        if path.parent.name == "recipes":
            return help_of("train", path.stem.removesuffix("_lora"), "--help-all")
        name = path.stem.replace("_", "-")
    assert name in commands.VERBS, name
    if name == "train":
        recipe = words[0] if words and words[0] in commands.RECIPES else "length"
        return help_of("train", recipe, "--help-all")
    return help_of(name, "--help")


@pytest.mark.parametrize(("command", "page"), FOUND, ids=lambda value: value)
def test_a_command_and_its_flags_exist(command, page):
    known = known_flags(command)
    flags = re.findall(r"(?<!\S)--[a-z][\w.-]*", command)
    missing = [flag for flag in flags if not re.search(rf"{re.escape(flag)}(?![\w.-])", known)]
    assert [flag for flag in missing if SHORT_NAMES.get(flag, flag) not in known] == []


def test_commands_are_found_in_the_pages_that_have_them():
    assert {"README.md", "gpu.md", "laptop.md", "SKILL.md", "run-anywhere.md"} <= {page for _, page in FOUND}
    assert len(FOUND) > 100
