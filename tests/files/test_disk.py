"""A disk that fills up, at five places: one line, exit code 1, nothing incomplete, and nothing lost."""

import json
import os
import re
import resource
import signal
import subprocess
import sys

import pytest
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
    with small_disk(tmp_path / "disk", 40) as folder:
        yield folder


@pytest.fixture
def ended(capsys):
    """Run a function as a command; return its exit code and the last line on standard error."""
    before = signal.getsignal(signal.SIGTERM)

    def run(main):
        capsys.readouterr()
        code = run_command(main)
        while lock.held:
            lock.held.pop().release()
        said = capsys.readouterr().err
        assert "Traceback" not in said and "report  " not in said
        return code, (said.splitlines() or [""])[-1]

    yield run
    signal.signal(signal.SIGTERM, before)


def files(folder):
    return {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """A reward that fills the disk in the step that the environment names."""
    path = tmp_path_factory.mktemp("rewards") / "filling.py"
    path.write_text(
        "import os\nfrom pathlib import Path\nfrom helpers.small_disk import fill\n"
        "def reward(completions, trainer_state, **columns):\n"
        "    folder, step, left = os.environ.get('FILL', ' -1 0').split(' ')\n"
        "    if trainer_state.global_step + 1 == int(step):\n"
        "        fill(Path(folder), int(left))\n"
        "    return [len(str(text)) / 100 for text in completions]\n"
    )
    return f"{path}:reward"


def train(folder, reward, how=None):
    steps = {"max_steps": 4, "checkpoint_steps": 2, "completions_steps": 1}
    changes = {"lora": {"dropout": 0.1}, "train": steps, "sampling": {"max_completion_tokens": 8}}
    return run_tiny(folder, how, rewards=(reward,), **changes)[0]


def outcome(folder):
    """What a run and its resumption must have in common with an uninterrupted run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: line[name] for name in ("step", "loss", "grad_norm", "reward")} for line in lines]
    logged = sorted((folder / "completions").iterdir())
    paths = [folder / "adapter" / "adapter_model.safetensors", *logged]
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
    for step, left, file in ((3, 0, "completions/step-00003.jsonl"), (4, 200_000, "checkpoints/checkpoint-4")):
        monkeypatch.setenv("FILL", f"{small} {step} {left}")
        code, said = ended(lambda: train(run, reward, Invocation(resume=run.exists())))
        assert code == 1
        assert said.startswith(f"error: {run}/{file} cannot be written: No space left on device; {run}")
        assert re.search(r" has \d+\.\d [kM]B free; free some space, then ", said)
        assert f"free some space, then resume with: {sys.executable}" in said and f"--output-dir {run}" in said
        assert not [name for name in files(run) if "partial" in name]
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-2"]
        assert atomic.damage(run / "checkpoints" / "checkpoint-2") is None
        (small / ".filler").unlink()
    monkeypatch.delenv("FILL")
    assert ended(lambda: train(run, reward, Invocation(resume=True)))[0] == 0
    assert outcome(run) == outcome(unbroken.folder)


def test_the_plan_bounds_the_checkpoints_and_adapters_that_a_run_writes(unbroken):
    config = replace(unbroken.config, {"monitor": {"rows": 0}})  # `run_tiny` does not validate
    planned, existing = make_plan(config, Invocation())[1].disk_bytes, saved_bytes(config.folder)
    checkpoint = config.folder / "checkpoints" / "checkpoint-4"
    staged = existing + sum(path.stat().st_size for path in checkpoint.iterdir())  # the next one is written first
    assert staged < 1.01 * planned < 1.2 * staged  # small files are not counted
    keeps_all = replace(config, {"train": {"keep_checkpoints": 1000}})
    assert make_plan(keeps_all, Invocation())[1].disk_bytes == planned  # the run has two checkpoints


def test_a_gguf_file_stays_until_the_new_one_is_complete(small, ended, monkeypatch):
    options, tofile = ExportOptions(starter.model_path(), output_dir=small), types.Encoded.tofile
    file = small / f"{starter.model_path().name}.Q8_0.gguf"
    assert ended(lambda: export(options))[0] == 0
    before = file.read_bytes()

    def fill_and_encode(*tensor):
        if not (small / ".filler").exists():
            fill(small, left=300_000)
        return tofile(*tensor)

    monkeypatch.setattr(types.Encoded, "tofile", fill_and_encode)
    code, said = ended(lambda: export(options))
    assert code == 1 and f"{file} cannot be written: No space left on device; {small} has 0.3" in said
    assert files(small) == {".filler", file.name} and file.read_bytes() == before


# The errors of libraries


@pytest.mark.parametrize("kind", ["torch.save", "safetensors", "tokenizers"])
def test_a_library_that_cannot_write_a_file_ends_in_one_line(kind, tmp_path):
    """A limit on the size of a file needs no privileges. EFBIG is its ENOSPC."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer

    path, data = tmp_path / "file", torch.zeros(100_000)

    def write():
        if kind == "torch.save":
            torch.save(data, path)
        elif kind == "safetensors":
            save_file({"a": data}, path)
        else:
            Tokenizer.from_file(str(starter.model_path() / "tokenizer.json")).save(str(path))

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(DiskFullError, match=f"{path} cannot be written: (File too|torch.save)"), disk.writing(path):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_standard_output_on_a_full_disk_is_one_line():
    code = "import sys; from lora_grpo.cli import run_command; sys.exit(run_command(lambda: print('x' * 100)))"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=os.environ)
    assert done.returncode == 1
    said = "error: the output cannot be written: No space left on device; free some space, then run the command again\n"
    assert done.stderr == said
