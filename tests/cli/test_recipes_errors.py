"""What a person sees who makes a mistake: one line, exit code 2, and nothing left behind."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lora_grpo import sandbox
from lora_grpo.cli.arguments import parse
from lora_grpo.files import lock

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def sum_row(first, second):
    """Return a line with a question and its answer."""
    return json.dumps({"question": f"What is {first} + {second}?", "answer": f"#### {first + second}"}) + "\n"


@pytest.fixture
def folder(tmp_path):
    """A folder with two files of rows: eight for training, one for evaluation."""
    (tmp_path / "train.jsonl").write_text("".join(sum_row(number, 3) for number in range(2, 10)))
    (tmp_path / "eval.jsonl").write_text(sum_row(2, 4))
    return tmp_path


@pytest.fixture
def recipe(folder, monkeypatch, capsys):
    """Return a function that runs a recipe in this process, in that folder, on a machine without a GPU."""
    held_locks = []
    monkeypatch.setattr(lock, "held", held_locks)

    def run(*arguments):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        for variable, value in WITHOUT_GPU.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [str(RECIPES / "gsm8k_lora.py"), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(sys.argv[0], run_name="__main__")
        return subprocess.CompletedProcess(sys.argv, ended.value.code, *capsys.readouterr())

    yield run
    sandbox.stop()
    for held_lock in held_locks:
        held_lock.release()


WORDS_OF_A_PLAN = {
    "preset",
    "dropped",
    "sandbox",
    "micro-batch",
    "sampling",
    "memory",
    "length",
    "work",
    "time",
    "disk",
}
"""First words of the lines that may stand before an error."""


def refused(result):
    """Check that a mistake is one line after those of the plan, and return the line."""
    assert "Traceback" not in result.stderr
    assert result.returncode == 2, result.stderr
    assert "--dry-run" in result.args or result.stdout == ""  # a dry run prints its settings first
    *plan, last_line = result.stderr.splitlines()
    assert last_line.startswith("error: ")
    assert all(line.split()[0].rstrip(":") in WORDS_OF_A_PLAN for line in plan), plan
    return last_line.removeprefix("error: ")


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FILES = ["--data.train", "train.jsonl", "--data.eval", "eval.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "missing.yaml"], "--config missing.yaml cannot be read: No such file or directory"),
        (["--rewards", "corect_answer"], "unknown reward 'corect_answer'; did you mean 'correct_answer'?"),
        (["--model.name", "."], "has no config.json"),
        (["--data.train", "missing.jsonl", "--data.eval", "eval.jsonl"], "missing.jsonl cannot be read: No such file"),
        ([*FILES, "--data.columns", "qestion=problem"], "a column of the task; did you mean 'question'?"),
        ([*FILES, "--data.columns", "answer=solution"], "train.jsonl:1: 'solution' is missing; the columns are"),
        (["--model.chat-template-kwargs", "enable_thinking=no"], "enable_thinking=no: expected true or false"),
        (["--model.chat-template-kwargs", "level=1", "--dry-run"], "level: the model's chat template does not read"),
        (["--data.train", "eval.jsonl", "--data.eval", "eval.jsonl"], "all 1 training questions are also in the eval"),
        ([*FILES, "--train.prompts-per-step", "16"], "8 training rows are left, fewer than --train.prompts-per-step"),
        (["--output-dir", "train.jsonl/out"], "train.jsonl/out: Not a directory"),
        (["--output-dir", "."], "contains other files (eval.jsonl, train.jsonl)"),
        (["--preview", "--dry-run"], "--dry-run and --preview cannot be combined"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(recipe, tmp_path, arguments, message):
    before = set(tmp_path.rglob("*"))
    assert message in refused(recipe(*arguments))
    assert set(tmp_path.rglob("*")) == before


@pytest.fixture
def run_folder(tmp_path):
    """A run as it was left, of these settings."""
    folder = tmp_path / "outputs" / "gsm8k_lora"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "run.json").write_text(json.dumps({"lora_grpo_run": 1, "config": {"preset": "starter"}}))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "outputs/gsm8k_lora contains a run; pass --resume"),
        (["--resume"], "outputs/gsm8k_lora/run.json is not a valid run.json"),
        (["--resume", "--seed", "x"], "--seed is 'x'; expected a valid integer"),
        (["--overwrite", "--train.micro-batch-size", "7"], "do not divide"),
    ],
)
def test_a_run_that_is_there_stays_as_it_is(recipe, run_folder, arguments, message):
    before = files(run_folder)
    assert message in refused(recipe(*arguments))
    assert {path: content for path, content in files(run_folder).items() if path.name != ".lock"} == before


def test_a_dry_run_writes_nothing_and_prints_settings_that_read_back(recipe, tmp_path, monkeypatch):
    arguments = [*FILES, "--seed", "7", "--train.learning-rate", "1e-5", "--grpo", "epsilon_high=0.28", "--lora.rslora"]
    before = files(tmp_path)
    result = recipe(*arguments, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert files(tmp_path) == before
    assert not (tmp_path / "outputs").exists()

    printed_settings, heading, first_row = result.stdout.partition("--- prompt of train/0\n")
    assert heading
    for text in ("What is 2 + 3?", "--- reference answer", "correct_answer", "nothing was trained"):
        assert text in first_row
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("printed.yaml").write_text(printed_settings)
    presets = {"starter": {}}  # the file says everything, so the preset need not
    settings, _ = parse(["--config", "printed.yaml"], recipe="gsm8k_lora", description="", presets=presets)
    assert (settings.seed, settings.train.learning_rate, settings.lora.rslora) == (7, 1e-5, True)
    assert json.loads(json.dumps(settings.to_dict())) == yaml.safe_load(printed_settings)
