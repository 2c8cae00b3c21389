"""skills/lora-grpo/SKILL.md and AGENTS.md: their form, and that every command and flag in them exists."""

import re
from pathlib import Path

import pytest
import yaml

from lora_grpo import commands
from lora_grpo.cli import verbs

ROOT = Path(__file__).resolve().parents[1]
SKILL = ROOT / "skills" / "lora-grpo" / "SKILL.md"


def lines_of_commands():
    """Return each command of `lora-grpo` in the skill, without its comment."""
    blocks = re.findall(r"^```\n(.*?)^```", SKILL.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = []
    for line in "".join(blocks).splitlines():
        command = line.partition("  #")[0].partition(" > ")[0].partition(" &&")[0].removeprefix("nohup ").strip()
        if command.startswith("lora-grpo "):
            found.append(command)
    return found


def test_the_front_matter_is_that_of_a_skill():
    """Names, limits and their meaning: https://agentskills.io/specification."""
    _, front_matter, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    fields = yaml.safe_load(front_matter)
    assert fields.keys() <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert fields["name"] == SKILL.parent.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 0 < len(fields["description"]) <= 1024
    assert 0 < len(fields["compatibility"]) <= 500
    assert len(body.splitlines()) < 500


@pytest.mark.parametrize("command", sorted(set(lines_of_commands())))
def test_a_command_of_the_skill_is_one_of_ours(command, capsys):
    _, verb, *words = command.split()
    if verb == "--version":
        return
    assert verb in commands.VERBS
    help_words = [verb, "--help"]
    if verb == "train":
        recipe = words[0] if words[0] in commands.RECIPES else "sft" if words[0] == "sft" else "length"
        help_words = ["train", recipe, "--help-all"]
    with pytest.raises(SystemExit):
        raise SystemExit(verbs.run_front_door(help_words))
    shown = capsys.readouterr().out
    aliases = {"--task": "--data.task"}
    for flag in re.findall(r"--[\w.-]+", " ".join(words)):
        assert flag in shown or aliases.get(flag, flag) in shown, flag


def test_the_skill_speaks_of_every_step():
    headings = re.findall(r"^## (\d)\. ", SKILL.read_text(encoding="utf-8"), flags=re.M)
    assert headings == [str(number) for number in range(9)]


def test_the_files_that_agents_are_sent_to_exist():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:lora_grpo|docs|tests|skills)/[\w./-]*)`", text)
    assert "lora_grpo/commands.py" in paths
    for path in paths:
        assert (ROOT / path).exists() or "NAME" in path, path
