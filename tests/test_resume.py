"""Runs that are killed and resumed against one that is not: the recipe itself, as a process."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# 8 training rows are 4 steps of 2 prompts, so that the run crosses from one pass over the data into the next;
# dropout draws random numbers in training; 5 is not a multiple of the checkpoint interval.
TINY = shlex.split(
    "--model.engine peft --lora.rank 4 --lora.dropout 0.1 --data.train-limit 8 --data.eval-limit 12 "
    "--sampling.num-generations 4 --sampling.max-completion-tokens 32 --train.max-steps 7 --train.prompts-per-step 2 "
    "--train.micro-batch-size 4 --train.checkpoint-steps 2 --train.completions-steps 2 --eval.num-samples 2 "
    "--eval.k 1 2 --eval.batch-size 8"
)
SAME = ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "evaluation/report.json")
SAME += ("evaluation/base.samples.jsonl", "evaluation/trained.samples.jsonl")


def command(folder, *arguments):
    return [sys.executable, str(ROOT / "recipes" / "gsm8k_lora.py"), "--output-dir", str(folder), *arguments]


def run(folder, *arguments):
    done = subprocess.run(command(folder, *arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def start(folder, *arguments):
    return subprocess.Popen(
        command(folder, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def wait_for(process, condition):
    while not condition():
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.01)


def metrics(folder):
    kept = ("step", "loss", "grad_norm", "reward", "reward_std", "entropy", "num_tokens")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in kept} for line in lines]


def assert_same(folder, expected):
    for name in SAME:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    assert metrics(folder) == metrics(expected)
    logged = sorted(path.name for path in (expected / "completions").iterdir())
    assert sorted(path.name for path in (folder / "completions").iterdir()) == logged
    for name in logged:
        assert (folder / "completions" / name).read_bytes() == (expected / "completions" / name).read_bytes()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    started = time.monotonic()
    run(folder, *TINY)
    return folder, time.monotonic() - started


def test_a_run_killed_after_a_checkpoint_ends_in_the_same_bits(unbroken, tmp_path):
    expected, _ = unbroken
    folder = tmp_path / "killed"
    process = start(folder, *TINY)
    wait_for(
        process,
        lambda: (
            len((folder / "metrics.jsonl").read_text().splitlines()) >= 5
            if (folder / "metrics.jsonl").exists()
            else False
        ),
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # As if the machine had gone down while the newest checkpoint was being written.
    newest = max((folder / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    weights = newest / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    said = run(folder, "--resume").stderr
    assert f"passed over {newest}: adapter_model.safetensors is not as it was written" in said
    assert "resuming from" in said
    assert_same(folder, expected)


def test_sigterm_saves_and_says_how_to_go_on(unbroken, tmp_path):
    expected, _ = unbroken
    folder = tmp_path / "stopped"
    process = start(folder, *TINY)
    wait_for(process, lambda: (folder / "checkpoints" / "checkpoint-2").exists())
    process.terminate()
    said = process.communicate()[0].decode()
    assert process.returncode == 128 + signal.SIGTERM
    assert f"--resume --output-dir {folder}" in said
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "interrupted"
    run(folder, "--resume")
    assert json.loads((folder / "run.json").read_text())["status"] == "complete"
    assert_same(folder, expected)


def test_resuming_a_finished_run_prints_its_table_again(unbroken):
    folder, _ = unbroken
    before = {name: (folder / name).read_bytes() for name in SAME}
    said = run(folder, "--resume")
    assert "pass@2" in said.stdout and "GRPO" not in said.stderr
    assert {name: (folder / name).read_bytes() for name in SAME} == before


def test_a_longer_run_goes_on_from_the_shorter_one(unbroken, tmp_path):
    """7 steps, then 7 to 9, are 9 steps at once: with a constant learning rate the first do not depend on the last."""
    longer, extended = tmp_path / "longer", tmp_path / "extended"
    run(longer, *TINY, "--train.max-steps", "9")
    shutil.copytree(unbroken[0], extended)
    run(extended, "--resume", "--train.max-steps", "9")
    assert_same(extended, longer)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [random.Random(seed).uniform(0.3, 1.0) for seed in range(3)])
def test_a_run_killed_at_any_moment_ends_in_the_same_bits(unbroken, tmp_path, moment):
    """Three moments, seeded, from loading the model to the last sample; a share of an unbroken run's time."""
    expected, seconds = unbroken
    folder = tmp_path / "killed"
    process = start(folder, *TINY)
    try:
        process.wait(timeout=moment * seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    run(folder, *TINY, "--resume")
    assert_same(folder, expected)


def test_a_run_is_not_resumed_to_fewer_steps_than_it_has(unbroken):
    folder, _ = unbroken
    before = {name: (folder / name).read_bytes() for name in (*SAME, "run.json")}
    arguments = ("--resume", "--train.max-steps", "5")
    done = subprocess.run(command(folder, *arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is at step 7 already; pass --train.max-steps 7 or more" in done.stderr
    assert {name: (folder / name).read_bytes() for name in (*SAME, "run.json")} == before
