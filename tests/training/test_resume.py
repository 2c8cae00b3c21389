"""Compare killed and resumed runs of a recipe with an uninterrupted run. Each run is a process."""

import json
import random
import shlex
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.warm_process import finish, wait_for

from lora_grpo.tasks import sources
from lora_grpo.tasks.registry import get_task

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py"
# 8 training rows are 4 steps of 2 prompts, so the run uses more than one pass over the data. Dropout uses random
# numbers in training. 5 is not a multiple of the checkpoint interval.
TINY = shlex.split(
    "--model.engine peft --lora.rank 4 --lora.dropout 0.1 "
    "--sampling.num-generations 4 --sampling.max-completion-tokens 16 --train.max-steps 7 --train.prompts-per-step 2 "
    "--train.micro-batch-size 4 --train.checkpoint-steps 2 --train.completions-steps 2 --eval.num-samples 2 "
    "--eval.k 1 2"
)
SAME = ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "evaluation/report.json")
SAME += ("evaluation/base.samples.jsonl", "evaluation/trained.samples.jsonl")


def lines(folder, name="metrics.jsonl"):
    return (folder / name).read_text().splitlines() if (folder / name).exists() else []


def metrics(folder):
    names = ("step", "loss", "grad_norm", "reward", "reward_std", "entropy", "num_tokens")
    return [{name: json.loads(line)[name] for name in names} for line in lines(folder)]


def assert_same(folder, expected):
    for name in SAME:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    assert metrics(folder) == metrics(expected)
    logged = sorted(path.name for path in (expected / "completions").iterdir())
    assert sorted(path.name for path in (folder / "completions").iterdir()) == logged
    for name in logged:
        assert (folder / "completions" / name).read_bytes() == (expected / "completions" / name).read_bytes()


class Runs:
    """The runs of these tests, two at a time, because each run is limited by one core for most of its time."""

    def __init__(self, folder, fresh, warm, wanted):
        self.folder = folder
        self.fresh = fresh
        self.warm = warm
        self.files = []
        for split, size in (("train", 8), ("eval", 4)):
            # Use files, because generating all rows of the starter task takes longer than training on these few.
            rows = sources.sample(get_task("starter").load(split), size, 0)
            text = "".join(json.dumps({name: row[name] for name in ("question", "answer")}) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text(text)
            self.files += [f"--data.{split}", folder / f"{split}.jsonl"]
        self.pool = ThreadPoolExecutor(2)
        makers = (self.unbroken, self.killed, self.extended)
        self.futures = {maker.__name__: self.pool.submit(maker) for maker in makers if maker.__name__ in wanted}

    def start(self, commands, name, *more):
        return commands.start(RECIPE, "--output-dir", self.folder / name, *TINY, *self.files, *more)

    def go_on(self, commands, name, *more):
        return finish(commands.start(RECIPE, "--output-dir", self.folder / name, "--resume", *more))

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
        return folder, newest, self.go_on(self.fresh, "killed").stderr

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
        self.go_on(self.warm, "extended")
        return folder, ended, record


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, fresh, warm):
    wanted = {name for item in request.session.items for name in item.fixturenames}
    runs = Runs(tmp_path_factory.mktemp("runs"), fresh, warm, wanted)
    with runs.pool:
        yield runs


@pytest.fixture(scope="module")
def unbroken(runs):
    return runs.futures["unbroken"].result()


@pytest.fixture(scope="module")
def killed(runs):
    return runs.futures["killed"].result()


@pytest.fixture(scope="module")
def extended(runs):
    return runs.futures["extended"].result()


def test_a_run_killed_after_a_checkpoint_ends_in_the_same_bits(unbroken, killed):
    folder, newest, printed = killed
    assert f"skipped damaged {newest}: adapter_model.safetensors has changed since it was written" in printed
    assert "resuming from" in printed
    assert_same(folder, unbroken[0])


def test_sigterm_saves_and_says_how_to_go_on(extended):
    folder, ended, record = extended
    assert ended.returncode == 128 + signal.SIGTERM
    assert f"--resume --output-dir {folder}" in ended.stderr
    assert record["status"] == "interrupted"
    assert json.loads((folder / "run.json").read_text())["status"] == "complete"


def test_resuming_a_finished_run_prints_its_table_again(unbroken, runs):
    folder, _ = unbroken
    before = {name: (folder / name).read_bytes() for name in SAME}
    ended = runs.go_on(runs.warm, "unbroken")
    assert "pass@2" in ended.stdout and "GRPO" not in ended.stderr
    assert {name: (folder / name).read_bytes() for name in SAME} == before


def test_a_longer_run_goes_on_from_the_shorter_one(unbroken, extended):
    """3 steps plus 4 resumed and interrupted steps equal 7 at once, because the learning rate is constant."""
    assert_same(extended[0], unbroken[0])


@pytest.mark.slow
@pytest.mark.parametrize("moment", [random.Random(seed).uniform(0.1, 1.0) for seed in range(3)])
def test_a_run_killed_at_any_moment_ends_in_the_same_bits(unbroken, runs, moment):
    """Kill at three random moments, from loading the model to the last sample, as a share of the full duration."""
    expected, seconds = unbroken
    name = f"killed at {moment:.2f}"
    process = runs.start(runs.warm, name)
    if process.wait(moment * seconds) is None:
        process.kill()
    resume = ["--resume"] if (runs.folder / name).exists() else []
    finish(runs.start(runs.warm, name, *resume))
    assert_same(runs.folder / name, expected)
