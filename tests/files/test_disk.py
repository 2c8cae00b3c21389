"""A disk that fills up, at five places: one line, exit code 1, nothing incomplete, and nothing lost."""

import errno
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
from lora_grpo.config import Invocation, RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, disk, json_files, lock
from lora_grpo.files.disk import DiskFullError
from lora_grpo.gguf import ExportOptions, export, types
from lora_grpo.planning import make_plan
from lora_grpo.runs import open_run

FULL = OSError(errno.ENOSPC, "No space left on device")


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
        assert re.search(r" has \d+\.\d [kM]B free and needs about ", said)
        assert f"free some space, then resume with: {sys.executable}" in said and f"--output-dir {run}" in said
        assert not [name for name in files(run) if "partial" in name]
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-2"]
        assert atomic.damage(run / "checkpoints" / "checkpoint-2") is None
        (small / ".filler").unlink()
    monkeypatch.delenv("FILL")
    assert ended(lambda: train(run, reward, Invocation(resume=True)))[0] == 0
    assert outcome(run) == outcome(unbroken.folder)


def test_the_plan_bounds_what_a_run_writes(unbroken):
    config = replace(unbroken.config, {"monitor": {"rows": 0}})  # `run_tiny` does not validate
    planned = make_plan(config, Invocation())[1].disk
    written = sum((unbroken.folder / name).stat().st_size for name in files(unbroken.folder))
    staged = written + planned.existing // 2  # the next checkpoint, before the older one is deleted
    assert staged < planned.num_bytes < 1.5 * staged
    assert 0 < planned.existing < written


def test_a_gguf_file_stays_until_the_new_one_is_complete(small, ended, monkeypatch):
    options, encoded = ExportOptions(starter.model_path(), output_dir=small / "m.gguf"), types.encoded
    assert ended(lambda: export(options))[0] == 0
    before = (small / "m.gguf").read_bytes()

    def fill_and_encode(*tensor):
        if not (small / ".filler").exists():
            fill(small, left=300_000)
        return encoded(*tensor)

    monkeypatch.setattr(types, "encoded", fill_and_encode)
    code, said = ended(lambda: export(options))
    assert code == 1 and f"{small}/m.gguf cannot be written: No space left on device; {small} has 0.3" in said
    assert files(small) == {".filler", "m.gguf", "gguf_report.json"} and (small / "m.gguf").read_bytes() == before


# The errors of libraries


def cause(error, context, *, suppressed=False):
    error.__context__, error.__suppress_context__ = context, suppressed
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FULL, "No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (cause(ValueError("closed"), FULL), "No space left on device"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), "torch.save failed"),
        (OSError(errno.EACCES, "Permission denied"), None),
        (RuntimeError("unexpected key"), None),
        (UserError("no rows"), None),
        (cause(UserError("raised from None"), FULL, suppressed=True), None),
        (UserError("row 3: unexpected pos in 'a'"), None),
    ],
)
def test_the_error_of_a_full_disk_is_recognized(error, reason, tmp_path):
    found = disk.disk_full(error, tmp_path / "a" / "b", 10**15)
    assert (found is not None) == bool(reason)
    if found:
        assert str(found).startswith(f"{tmp_path}/a/b cannot be written: {reason}")
        assert str(found).endswith("free and needs about 1000000.00 GB")


def test_a_run_that_stops_reports_the_space_that_resuming_checks(tmp_path, ended, monkeypatch):
    config = RunConfig(output_dir=str(tmp_path / "run"), preset="starter")

    def plan(*, resume):
        return make_plan(config, Invocation(resume=resume))[1]

    def stop():
        run = open_run(config, Invocation(), "test", {}, plan(resume=False).record())
        run.begin({})
        run.best.mkdir()
        (run.best / "file").write_bytes(bytes(10**6))
        raise FULL

    said = ended(stop)[1]
    rest = re.search(r"; the rest of the run needs about (.*); free some space, then resume with: ", said)[1]
    monkeypatch.setattr(disk, "free_space", lambda path: (path, 0))
    start = rf"run has 0\.0 kB free and needs {re.escape(rest)}; free some space"
    with pytest.raises(UserError, match=start + "$"):
        plan(resume=True).check_disk()
    with pytest.raises(UserError, match=start + ", or pass an --output-dir on another disk$"):
        plan(resume=False).check_disk()


@pytest.mark.parametrize("kind", ["torch.save", "safetensors", "tokenizers", "text", "lines"])
def test_a_library_that_cannot_write_a_file_ends_in_one_line(kind, tmp_path):
    """A limit on the size of a file needs no privileges. EFBIG is its ENOSPC."""
    import torch
    from safetensors.torch import save_file

    path, data = tmp_path / "file", torch.zeros(100_000)

    def write():
        if kind == "torch.save":
            torch.save(data, path)
        elif kind == "safetensors":
            save_file({"a": data}, path)
        elif kind == "tokenizers":
            from tokenizers import Tokenizer

            Tokenizer.from_file(str(starter.model_path() / "tokenizer.json")).save(str(path))
        elif kind == "text":
            atomic.write_text(path, "x" * 100_000)
        else:
            json_files.append_lines(path, ["x" * 100_000])

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
