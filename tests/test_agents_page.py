"""docs/agents.md: its agents play, and what it says about them is so."""

import re
import shutil
from pathlib import Path

import pytest

from lora_grpo.audit.audit_tasks import audit_task
from lora_grpo.monitoring import step_metrics
from lora_grpo.tasks import get_task

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


@pytest.fixture
def files(tmp_path):
    """Return the folder with the files of the page. The first line of each has its name."""
    for source in re.findall(r"```(?:python|js)\n(.*?)```", PAGE, re.DOTALL):
        name = source.splitlines()[0].split()[-1]
        (tmp_path / name).write_text(source)
    return tmp_path


@pytest.mark.parametrize("name", ["my_agent.py", "my_node_agent.py"])
def test_the_agents_play_with_stand_ins_and_none_cheats(files, name):
    if name == "my_node_agent.py" and not shutil.which("node"):
        pytest.skip("needs node")
    task = get_task(str(files / name))
    rows = [{**row, "task": str(files / name)} for row in task.load("train")]
    findings = audit_task(str(files / name), rows[10:13])
    assert (findings.problems, findings.notes) == ({}, [])


def test_the_metrics_are_those_of_the_code():
    source = Path(step_metrics.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"`(agents/\w+)` \|", PAGE)) == set(re.findall(r'"(agents/\w+)"', source))


@pytest.mark.parametrize(
    ("constant", "attribute"),
    [
        ("SECONDS_PER_CALL", "seconds_per_call"),
        ("SECONDS_PER_EPISODE", "seconds_per_episode"),
        ("PROMPT_TOKENS", "prompt_tokens"),
        ("PROCESSES", "processes"),
        ("MAX_FAILED", "max_failed"),
    ],
)
def test_the_defaults_of_the_constants_are_those_of_the_code(files, constant, attribute):
    [default] = re.findall(rf"\| `{constant}` \| ([\d.]+) \|", PAGE)
    agent = get_task(str(files / "my_agent.py")).agent
    assert float(default) == getattr(agent, attribute)
