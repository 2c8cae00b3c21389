"""`lora-grpo`: its commands, recipes by name or file, and messages that name the command that was run."""

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from helpers.fresh_imports import HEAVY, ROOT

from lora_grpo import __version__, commands
from lora_grpo.cli import verbs

TASK = """
def load(split): return [{"question": f"{split}: what is {n}+1?"} for n in range(64)]
def check(completion, row): return True
"""


def front_door(*arguments, cwd, code="from lora_grpo.__main__ import main; main()"):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "word"),
    [
        ((), 2, "export-gguf"),
        (("--help",), 0, "export-gguf"),
        (("--version",), 0, f"lora-grpo {__version__}"),
        (("trian",), 2, "'train'?"),
        (("audit", "my_task.py"), 2, "audit is a flag of `lora-grpo train`: pass --audit"),
        (("dry-run",), 2, "dry-run is a flag of `lora-grpo train`: pass --dry-run"),
        (("train",), 2, "lora-grpo train gsm8k"),
        (("train", "--help"), 0, "lora-grpo train gsm8k"),
        (("train", "gsm9k"), 2, "'gsm8k'?"),
        (("train", "missing.py"), 2, "missing.py: no such file"),
        (("train", f"{ROOT}/lora_grpo/errors.py", "--task=other.py"), 2, "leave the other --task out"),
        (("merge", "--help"), 0, "lora-grpo merge outputs/gsm8k_lora "),
        (("check-gpu", "--help"), 0, "usage: lora-grpo check-gpu"),
        (("push", "run", "me/x", "--token", "hf_x"), 2, "hf auth login"),
    ],
)
def test_a_command_line_ends_with_its_exit_code(arguments, exit_code, word, capsys):
    try:
        ended_with = verbs.run_front_door(arguments)
    except SystemExit as ended:
        ended_with = ended.code
    assert (ended_with or 0) == exit_code
    stdout, stderr = capsys.readouterr()
    if exit_code == 0:
        assert word in stdout
    else:
        assert word in stderr and stdout == ""


@pytest.mark.parametrize("arguments", ["--help", "--version", "tasks", "merge --help"])
def test_a_pipe_that_is_closed_before_anything_is_printed_ends_a_command_quietly(arguments):
    shell = '{ sleep 0.1; "$0" -m lora_grpo $1; echo "ended with $?" >&2; } | true'
    command = ["bash", "-c", shell, sys.executable, arguments]
    # Without a buffer, as in many containers, argparse itself ignores that the pipe is closed, and the exit code is 0.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert ended.stderr == f"ended with {128 + signal.SIGPIPE}\n"


@pytest.mark.parametrize(
    "command",
    [
        "watch RUN --port 0",
        "report RUN",
        "merge RUN",
        "merge RUN --what best",
        "export-gguf RUN",
        "export-gguf RUN --what best",
        "push RUN me/x --dry-run",
        "push RUN me/x --what best --dry-run",
    ],
)
def test_a_mistyped_run_is_refused_with_the_nearest_one(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "gsm8k_lora").mkdir(parents=True)
    (tmp_path / "outputs" / "gsm8k_lora" / "run.json").write_text("{}")
    assert verbs.run_front_door(command.replace("RUN", "outputs/gsm8k").split()) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.endswith(" does not exist; did you mean 'gsm8k_lora'?")


@pytest.mark.parametrize("command", [["--help"], ["watch", "--help"], ["train", "gsm8k", "--help"]])
@pytest.mark.parametrize(
    ("environment", "has_colors"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_help_has_colors_only_where_they_are_wanted(command, environment, has_colors, monkeypatch, capsys):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        sys.exit(verbs.run_front_door(command))
    assert not ended.value.code
    # The codes of colors. NO_COLOR leaves bold text.
    assert bool(re.search(r"\x1b\[[\d;]*3[0-9]", capsys.readouterr().out)) is has_colors


def test_the_list_of_commands_fits_a_narrow_screen_and_any_encoding(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "24")
    assert verbs.run_front_door(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.isascii() and max(map(len, shown.splitlines()[1:])) <= 24
    assert "".join(shown.split()).count("compatible") == 1


PRINT_HEAVY_PACKAGES = f"""
import sys
from lora_grpo.cli import run_front_door
try:
    run_front_door(sys.argv[1:])
except SystemExit:
    pass
print([name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize("command", ["--help", "train gsm8k --help", "merge --help", "train code --plan"])
def test_help_and_plan_load_nothing_heavy(command, tmp_path):
    ended = front_door(*command.split(), cwd=tmp_path, code=PRINT_HEAVY_PACKAGES)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr


SMALL_RUN = (
    *("--train.max-steps", 1, "--train.prompts-per-step", 2, "--train.micro-batch-size", 4, "--monitor.rows", 0),
    *("--sampling.max-completion-tokens", 8, "--sampling.num-generations", 2),
    *("--data.eval-limit", 2, "--eval.num-samples", 1, "--eval.k", 1),
)


def test_a_task_file_is_trained_and_the_next_steps_name_this_command(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    command = ("train", "mine.py", *SMALL_RUN)
    ended = front_door(*command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "lora-grpo merge outputs/mine" in ended.stdout and "scripts/" not in ended.stdout
    record = json.loads((tmp_path / "outputs" / "mine" / "run.json").read_text())
    assert record["command"][:3] == ["lora-grpo", "train", "mine.py"] and record["recipe"] == "your_task"

    second = front_door(*command, cwd=tmp_path)
    assert second.returncode == 2 and "--resume" in second.stderr


OWN_RECIPE = """
import beside
from lora_grpo.config import starter_preset
from lora_grpo.pipeline import run_recipe

run_recipe(beside.NAME, "A recipe of one's own.", {"starter": starter_preset()})
"""


def test_a_recipe_of_ones_own_runs_with_the_files_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'own'\n")
    (tmp_path / "recipe.py").write_text(OWN_RECIPE)
    ended = front_door("train", tmp_path / "recipe.py", "--plan", cwd=ROOT)
    assert ended.returncode == 0 and ended.stdout, ended.stderr


def test_commands_of_a_recipe_in_a_checkout_are_files(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/kit/recipes/gsm8k_lora.py", "--seed", "1"])
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    assert commands.command("export-gguf", "a b") == "python scripts/export_gguf.py 'a b'"
    assert commands.command("train sft", "--seed", 1) == "python recipes/sft_lora.py --seed 1"
    assert commands.to_start_again() == [sys.executable, "/home/me/kit/recipes/gsm8k_lora.py"]
    assert commands.own_command() == sys.argv


def test_commands_of_a_file_that_uv_runs_are_those_of_uv(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/kit/recipes/gsm8k_lora.py", "--seed", "1"])
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert commands.command("merge", "a b") == "uv run scripts/merge.py 'a b'"
    assert commands.command("train sft") == "uv run recipes/sft_lora.py"
    assert commands.to_start_again() == ["uv", "run", "/home/me/kit/recipes/gsm8k_lora.py"]
    on_several_processes = commands.to_start_again(["-m", "run"])
    assert on_several_processes == [sys.executable, "-m", "run", "/home/me/kit/recipes/gsm8k_lora.py"]


def test_commands_of_lora_grpo_are_its_own(monkeypatch):
    with commands.started(commands.Start("lora-grpo", ("train", "gsm8k", "--seed", "1"))):
        assert commands.command("export-gguf", "a b") == "lora-grpo export-gguf 'a b'"
        assert commands.to_start_again() == ["lora-grpo", "train", "gsm8k"]
        on_several_processes = commands.to_start_again(["-m", "run"])
        assert on_several_processes == [sys.executable, "-m", "run", "-m", "lora_grpo", "train", "gsm8k"]
        assert commands.own_command() == ["lora-grpo", "train", "gsm8k", "--seed", "1"]
        assert commands.described("python recipes/sft_lora.py --seed") == "lora-grpo train sft --seed"


def test_commands_of_the_python_api_are_those_of_lora_grpo(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/kit/recipes/gsm8k_lora.py"])
    with commands.started(commands.Start("python", ("lora_grpo.train",))):
        assert commands.command("merge", "run") == "lora-grpo merge run"
        assert commands.own_command() == ["lora_grpo.train"]


def test_the_command_that_installs_a_package_is_that_of_the_environment(monkeypatch):
    for has_pip, program in ((True, "pip install"), (False, f"uv pip install --python {sys.executable}")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=has_pip: found or None)
        assert commands.install_command("wandb") == f"{program} wandb"
        assert commands.install_command("lora-grpo[tasks]") == f"{program} 'lora-grpo[tasks]'"


@pytest.mark.parametrize("name", [name for name, verb in commands.VERBS.items() if verb.room])
def test_every_command_has_its_options_and_its_function(name):
    verb = commands.VERBS[name]
    room = importlib.import_module(f"lora_grpo.{verb.room}")
    assert dataclasses.is_dataclass(getattr(room, verb.options)) and callable(getattr(room, verb.function))
    script = ROOT / "scripts" / f"{name.replace('-', '_')}.py"
    assert script.is_file() is verb.has_script
