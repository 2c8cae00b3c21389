"""A disk that fills up, at five places: one line, exit code 1, nothing incomplete, and nothing lost."""

import json
import os
import re
import resource
import signal
import subprocess
import sys

import pytest
import safetensors.torch
import tokenizers
import torch
from helpers.small_disk import fill, small_disk
from helpers.tiny_runs import run_tiny

from lora_grpo import starter
from lora_grpo.cli import run_command
from lora_grpo.config import Invocation, replace
from lora_grpo.files import atomic, disk, lock
from lora_grpo.files.disk import DiskFullError
from lora_grpo.gguf import ExportOptions, export, types
from lora_grpo.memory import make_plan
from lora_grpo.runs import saved_bytes


@pytest.fixture
def small(tmp_path):
    """The folder of a disk of 40 MB."""
    with small_disk(tmp_path / "disk", 40) as folder:
        yield folder


@pytest.fixture
def ended(capsys):
    """Return a function that runs a function as a command, and returns its exit code and its last line on stderr."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(main):
        capsys.readouterr()
        exit_code = run_command(main)
        while lock.held:
            lock.held.pop().release()
        stderr = capsys.readouterr().err
        assert "Traceback" not in stderr and "report  " not in stderr
        lines = stderr.splitlines()
        return exit_code, lines[-1] if lines else ""

    yield run
    signal.signal(signal.SIGTERM, handler)


def files(folder):
    return {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    }


FILLING_REWARD = """
import os
from pathlib import Path
from helpers.small_disk import fill

def reward(completions, trainer_state, **columns):
    if "FILL_FOLDER" in os.environ and trainer_state.global_step + 1 == int(os.environ["FILL_IN_STEP"]):
        fill(Path(os.environ["FILL_FOLDER"]), int(os.environ["FILL_LEFT"]))
    return [len(str(text)) / 100 for text in completions]
"""


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """A reward that fills the disk in the step that the environment names, to a number of bytes that are left."""
    path = tmp_path_factory.mktemp("rewards") / "filling.py"
    path.write_text(FILLING_REWARD)
    return f"{path}:reward"


def train(folder, reward, how=None):
    changes = {
        "lora": {"dropout": 0.1},
        "train": {"max_steps": 4, "checkpoint_steps": 2, "completions_steps": 1},
        "sampling": {"max_completion_tokens": 8},
    }
    run, _ = run_tiny(folder, how, rewards=(reward,), **changes)
    return run


def outcome(folder):
    """Return what a run and its resumption must have in common with an uninterrupted run: metrics and files."""
    metrics = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        metrics.append({name: step[name] for name in ("step", "loss", "grad_norm", "reward")})
    paths = [folder / "adapter" / "adapter_model.safetensors", *sorted((folder / "completions").iterdir())]
    return metrics, {path.name: path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, reward):
    run = train(tmp_path_factory.mktemp("unbroken") / "run", reward)
    lock.held.pop().release()
    return run


@pytest.mark.slow
def test_training_ends_in_one_line_and_resumes_to_the_same_bits(small, reward, unbroken, ended, monkeypatch):
    """The disk is full when step 3 logs its completions and, after that is resumed, at the checkpoint of step 4."""
    run = small / "run"
    monkeypatch.setenv("FILL_FOLDER", str(small))
    for step, left, file in ((3, 0, "completions/step-00003.jsonl"), (4, 200_000, "checkpoints/checkpoint-4")):
        monkeypatch.setenv("FILL_IN_STEP", str(step))
        monkeypatch.setenv("FILL_LEFT", str(left))
        exit_code, line = ended(lambda: train(run, reward, Invocation(resume=run.exists())))
        assert exit_code == 1
        assert line.startswith(f"error: {run}/{file} cannot be written: No space left on device; {run}")
        assert re.search(r" has \d+\.\d [kM]B free; free some space, then ", line)
        assert f"free some space, then resume with: {sys.executable}" in line and f"--output-dir {run}" in line
        assert not [name for name in files(run) if "partial" in name]
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-2"]
        assert atomic.damage(run / "checkpoints" / "checkpoint-2") is None
        (small / ".filler").unlink()

    monkeypatch.delenv("FILL_FOLDER")
    exit_code, _ = ended(lambda: train(run, reward, Invocation(resume=True)))
    assert exit_code == 0
    assert outcome(run) == outcome(unbroken.folder)


def test_the_plan_bounds_the_checkpoints_and_adapters_that_a_run_writes(unbroken):
    config = replace(unbroken.config, {"monitor": {"rows": 0}})  # `run_tiny` does not validate
    planned_bytes = make_plan(config, Invocation())[1].disk_bytes
    checkpoint = config.folder / "checkpoints" / "checkpoint-4"
    checkpoint_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())
    most_bytes = saved_bytes(config.folder) + checkpoint_bytes  # the next checkpoint is written before one is removed
    assert most_bytes < 1.01 * planned_bytes < 1.2 * most_bytes  # small files are not counted

    keeps_all = replace(config, {"train": {"keep_checkpoints": 1000}})  # of two that the run has
    assert make_plan(keeps_all, Invocation())[1].disk_bytes == planned_bytes


def test_a_gguf_file_stays_until_the_new_one_is_complete(small, ended, monkeypatch):
    options = ExportOptions(starter.model_path(), output_dir=small)
    file = small / f"{starter.model_path().name}.Q8_0.gguf"
    exit_code, _ = ended(lambda: export(options))
    assert exit_code == 0
    content_before = file.read_bytes()

    tofile = types.Encoded.tofile

    def fill_and_encode(*tensor):
        if not (small / ".filler").exists():
            fill(small, left=300_000)
        return tofile(*tensor)

    monkeypatch.setattr(types.Encoded, "tofile", fill_and_encode)
    exit_code, line = ended(lambda: export(options))
    assert exit_code == 1
    assert f"{file} cannot be written: No space left on device; {small} has 0.3" in line
    assert files(small) == {".filler", file.name} and file.read_bytes() == content_before


# The errors of libraries


def write_torch(path):
    torch.save(torch.zeros(100_000), path)


def write_safetensors(path):
    safetensors.torch.save_file({"a": torch.zeros(100_000)}, path)


def write_tokenizer(path):
    tokenizers.Tokenizer.from_file(str(starter.model_path() / "tokenizer.json")).save(str(path))


@pytest.mark.parametrize("write", [write_torch, write_safetensors, write_tokenizer])
def test_a_library_that_cannot_write_a_file_ends_in_one_line(write, tmp_path):
    """A limit on the size of a file needs no privileges. EFBIG is its ENOSPC."""
    path = tmp_path / "file"
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard_limit))
    try:
        with pytest.raises(DiskFullError, match=f"{path} cannot be written: (File too|torch.save)"), disk.writing(path):
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))


def test_standard_output_on_a_full_disk_is_one_line():
    code = "import sys; from lora_grpo.cli import run_command; sys.exit(run_command(lambda: print('x' * 100)))"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=os.environ)
    assert ended.returncode == 1
    assert ended.stderr == (
        "error: the output cannot be written: No space left on device; free some space, then run the command again\n"
    )
