"""`lora-grpo tasks`, and the page that is made from the same table."""

import importlib.util
import shlex
import tomllib
from pathlib import Path

import pytest

from lora_grpo.cli import verbs
from lora_grpo.commands import RECIPES
from lora_grpo.tasks import TASK_NAMES
from lora_grpo.tasks.reasoning_gym import REFUSED
from lora_grpo.tasks.textarena_games import GAMES

ROOT = Path(__file__).resolve().parents[2]
TASKS = tomllib.loads((ROOT / "lora_grpo" / "cli" / "tasks.toml").read_text(encoding="utf-8"))


def test_every_task_and_every_recipe_is_in_the_list():
    families = {"reasoning-gym", "textarena", "my_task.py"}
    recipes = {f"recipes/{RECIPES[name]}" for name in ("guess", "length", "laptop", "sql")}
    assert TASKS.keys() == {*TASK_NAMES} | families | recipes
    for task in TASKS.values():
        optional = {"members", "first", "train"}
        assert task.keys() - optional == {"about", "example", "check", "model", "needs", "start"}
        verb, first, *_ = shlex.split(task["start"])[1:]
        assert (verb, first) == ("evaluate", "RUN") or (verb == "train" and first in {*RECIPES, "my_task.py"})


def test_the_list_and_more_of_one_are_printed(capsys):
    assert verbs.run_front_door(["tasks"]) == 0
    printed = capsys.readouterr().out
    assert [name for name, task in TASKS.items() if name not in printed or task["start"] not in printed] == []
    assert verbs.run_front_door(["tasks", "textarena"]) == 0
    assert "Mastermind-v0" in capsys.readouterr().out
    assert verbs.run_front_door(["tasks", "gsm8k"]) == 0
    assert "Mastermind-v0" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("countdown", "lora-grpo train task --task reasoning-gym:countdown\n"),
        ("reasoning-gym:chain_sum", "lora-grpo train task --task reasoning-gym:chain_sum\n"),
        ("textarena:Mastermind-v0", "lora-grpo train task --task textarena:Mastermind-v0 --sampling.max-turn-tokens "),
        ("sql", "lora-grpo train sql\n"),
    ],
)
def test_a_member_and_a_recipe_are_found_by_their_names(name, start, capsys):
    assert verbs.run_front_door(["tasks", name]) == 0
    printed = capsys.readouterr().out
    assert f"  start    {start}" in printed and "members" not in printed


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["tasks", "countdwon"], "did you mean 'countdown'?"),
        (["tasks", "qqqq"], "`lora-grpo tasks`"),
        (["train", "countdown"], "`lora-grpo tasks`"),
    ],
)
def test_a_wrong_name_says_how_to_go_on(arguments, fix, capsys):
    assert verbs.run_front_door(arguments) == 2
    error = capsys.readouterr().err
    assert fix in error and error.count("\n") == 1


def test_the_members_of_textarena_are_the_games_that_can_be_played():
    assert TASKS["textarena"]["members"].split() == [*GAMES]


@pytest.mark.engines
def test_the_members_of_reasoning_gym_are_its_data_sets():
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: make engines")
    assert {*TASKS["reasoning-gym"]["members"].split()} == {*reasoning_gym.factory.DATASETS} - {*REFUSED}


@pytest.mark.parametrize("name", ["gsm", "nowhere", "", "starter:x", "textarena:Nowhere-v0"])
def test_an_unknown_name_is_one_line(name, capsys):
    assert verbs.run_front_door(["tasks", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("write_tasks_page", ROOT / "tools" / "write_tasks_page.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page()
