"""skills/lora-grpo/SKILL.md and AGENTS.md: their form, and that files they name exist."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
SKILL = ROOT / "skills" / "lora-grpo" / "SKILL.md"


def test_the_front_matter_is_that_of_a_skill():
    """Names, limits and their meaning: https://agentskills.io/specification."""
    _, front_matter, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    fields = yaml.safe_load(front_matter)
    assert fields.keys() <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert fields["name"] == SKILL.parent.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 0 < len(fields["description"]) <= 1024
    assert 0 < len(fields["compatibility"]) <= 500
    assert len(body.splitlines()) < 500


def test_the_skill_speaks_of_every_step():
    headings = re.findall(r"^## (\d)\. ", SKILL.read_text(encoding="utf-8"), flags=re.M)
    assert headings == [str(number) for number in range(9)]


def test_the_files_that_agents_are_sent_to_exist():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:lora_grpo|docs|tests|skills)/[\w./-]*)`", text)
    assert "lora_grpo/commands.py" in paths
    for path in paths:
        assert (ROOT / path).exists() or "NAME" in path, path
