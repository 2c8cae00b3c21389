"""Compare killed and resumed runs of a recipe with an uninterrupted run. Each run is a process."""

import json
import random
import shlex
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.tiny_runs import write_starter_files
from helpers.warm_process import finish, wait_for

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py"
# 8 training rows are 4 steps of 2 prompts, so the run uses more than one pass over the data. Dropout uses random
# numbers in training. 5 is not a multiple of the checkpoint interval.
TINY = shlex.split(
    "--model.engine peft --lora.rank 4 --lora.dropout 0.1 "
    "--sampling.num-generations 4 --sampling.max-completion-tokens 16 --train.max-steps 7 --train.prompts-per-step 2 "
    "--train.micro-batch-size 4 --train.checkpoint-steps 2 --train.completions-steps 2 --eval.num-samples 2 "
    "--eval.k 1 2"
)
FILES = (
    "adapter/adapter_model.safetensors",
    "adapter/adapter_config.json",
    "evaluation/report.json",
    "evaluation/base.samples.jsonl",
    "evaluation/trained.samples.jsonl",
)
METRICS = ("step", "loss", "grad_norm", "reward", "reward_std", "entropy", "num_tokens")


def lines(folder, name="metrics.jsonl"):
    return (folder / name).read_text().splitlines() if (folder / name).exists() else []


def metrics(folder):
    steps = [json.loads(line) for line in lines(folder)]
    return [{name: step[name] for name in METRICS} for step in steps]


def files(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def completions(folder):
    return {path.name: path.read_bytes() for path in (folder / "completions").iterdir()}


def assert_same(folder, expected):
    assert files(folder) == files(expected)
    assert metrics(folder) == metrics(expected)
    assert completions(folder) == completions(expected)


class Runs:
    """The runs of these tests, two at a time, because each run is limited by one core for most of its time."""

    def __init__(self, folder, fresh, warm, requested):
        self.folder = folder
        self.fresh = fresh
        self.warm = warm
        self.data_flags = write_starter_files(folder)
        self.pool = ThreadPoolExecutor(2)
        self.results = {}
        for run in (self.unbroken, self.killed, self.extended):
            if run.__name__ in requested:
                self.results[run.__name__] = self.pool.submit(run)

    def start(self, commands, name, *flags):
        return commands.start(RECIPE, "--output-dir", self.folder / name, *TINY, *self.data_flags, *flags)

    def resume(self, commands, name):
        return finish(commands.start(RECIPE, "--output-dir", self.folder / name, "--resume"))

    def unbroken(self):
        started = time.monotonic()
        finish(self.start(self.warm, "unbroken"))
        return self.folder / "unbroken", time.monotonic() - started

    def killed(self):
        """Kill a run, and resume it in a new interpreter, as a user would."""
        folder = self.folder / "killed"
        process = self.start(self.warm, "killed")
        wait_for(process, lambda: len(lines(folder)) >= 5)
        process.kill()
        # As if the machine had crashed while it wrote the newest checkpoint.
        newest = max((folder / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        weights = newest / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        return folder, newest, self.resume(self.fresh, "killed").stderr

    def extended(self):
        """Finish a run of 3 steps, extend it to 7, end that by SIGTERM, and resume."""
        folder = self.folder / "extended"
        finish(self.start(self.warm, "extended", "--train.max-steps", "3"))
        assert len(metrics(folder)) == 3
        process = self.warm.start(RECIPE, "--output-dir", folder, "--resume", "--train.max-steps", "7")
        wait_for(process, (folder / "checkpoints" / "checkpoint-4").exists)
        process.terminate()
        ended = process.end()
        record = json.loads((folder / "run.json").read_text())
        self.resume(self.warm, "extended")
        return folder, ended, record


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, fresh, warm):
    requested = {name for item in request.session.items for name in item.fixturenames}
    runs = Runs(tmp_path_factory.mktemp("runs"), fresh, warm, requested)
    with runs.pool:
        yield runs


@pytest.fixture(scope="module")
def unbroken(runs):
    return runs.results["unbroken"].result()


@pytest.fixture(scope="module")
def killed(runs):
    return runs.results["killed"].result()


@pytest.fixture(scope="module")
def extended(runs):
    return runs.results["extended"].result()


def test_a_run_killed_after_a_checkpoint_ends_in_the_same_bits(unbroken, killed):
    expected, _ = unbroken
    folder, damaged_checkpoint, messages = killed
    assert f"skipped damaged {damaged_checkpoint}: adapter_model.safetensors has changed" in messages
    assert "resuming from" in messages
    assert_same(folder, expected)

    # What the plan chose when the run began is still no choice of the user.
    resumed, begun = (json.loads((path / "run.json").read_text()) for path in (folder, expected))
    assert resumed["memory"]["derived"] == begun["memory"]["derived"]
    assert resumed["changed_settings"] == begun["changed_settings"]
    assert "model.bits" in begun["memory"]["derived"]


def test_sigterm_saves_and_says_how_to_go_on(extended):
    folder, ended, record = extended
    assert ended.returncode == 128 + signal.SIGTERM
    assert f"--resume --output-dir {folder}" in ended.stderr
    assert record["status"] == "interrupted"
    assert json.loads((folder / "run.json").read_text())["status"] == "complete"


def test_resuming_a_finished_run_prints_its_table_again(unbroken, runs):
    folder, _ = unbroken
    files_before = files(folder)
    done = runs.resume(runs.warm, "unbroken")
    assert "pass@2" in done.stdout
    assert "GRPO" not in done.stderr
    assert files(folder) == files_before


def test_a_longer_run_goes_on_from_the_shorter_one(unbroken, extended):
    """3 steps plus 4 resumed and interrupted steps equal 7 at once, because the learning rate is constant."""
    expected, _ = unbroken
    folder, _, _ = extended
    assert_same(folder, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_a_run_killed_at_any_moment_ends_in_the_same_bits(unbroken, runs, seed):
    """Kill at a random moment, from loading the model to the last sample, as a fraction of the full duration."""
    moment = random.Random(seed).uniform(0.1, 1.0)
    expected, seconds = unbroken
    name = f"killed at {moment:.2f}"
    process = runs.start(runs.warm, name)
    if process.wait(moment * seconds) is None:
        process.kill()
    resume = ["--resume"] if (runs.folder / name).exists() else []
    finish(runs.start(runs.warm, name, *resume))
    assert_same(runs.folder / name, expected)
