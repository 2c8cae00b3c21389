import dataclasses
import json
import platform
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from lora_grpo import distributed
from lora_grpo.config.schema import DataConfig, Invocation, RunConfig, SamplingConfig, TrainConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import lock
from lora_grpo.runs import FailedElsewhere, begun_run, claim_run, end_run, leave_run, open_run, read_record, versions

NEW, RESUME, OVERWRITE = Invocation(), Invocation(resume=True), Invocation(overwrite=True)
ROWS = {
    "task": "starter",
    "train": {"source": None, "rows": 8, "sha256": "aa"},
    "eval": {"source": None, "rows": 4, "sha256": "bb"},
}
BASE = {
    "base_model": "starter",
    "revision": None,
    "fingerprint": "cc",
    "engine": "peft",
    "bits": 4,
    "device": "cpu",
}
OWN = {"adapter", "checkpoints", "completions", "evaluation", "report", "metrics.jsonl", "run.json"}


@pytest.fixture(autouse=True)
def processes_end():
    yield
    end_of_process()


def end_of_process():
    """Release the locks, as the kernel does when a process ends."""
    while lock.held:
        lock.held.pop().release()


def open_in(folder, how=NEW, rows=ROWS, **changes):
    end_of_process()
    config = RunConfig(output_dir=str(folder), **changes)
    claim_run(config, how)
    return open_run(config, how, "gsm8k_lora", rows)


def finished(folder, **changes):
    """Return a run as it is after training."""
    run = open_in(folder, **changes)
    run.begin(BASE)
    for name in ("adapter", "checkpoints", "completions", "evaluation", "report"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    run.metrics.write_text('{"step": 1}\n')
    run.finish({"reward": 1.5})
    return run


def held(folder):
    return {path.name for path in folder.iterdir()} - {".lock"}


def refusal(folder, how=NEW, rows=ROWS, **changes):
    before = snapshot(folder)
    with pytest.raises(UserError) as error:
        open_in(folder, how, rows, **changes)
    end_run(error.value)  # as every command does
    message = str(error.value)
    assert "\n" not in message
    assert snapshot(folder) == before, "a refusal changed the folder"
    return message


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


# A new run


def test_the_record_says_what_where_and_with_what(tmp_path):
    run = open_in(tmp_path, seed=3)
    run.begin(BASE)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["recipe"] == "gsm8k_lora"
    assert record["config"]["seed"] == 3
    assert record["config"]["train"]["max_steps"] == RunConfig().train.max_steps
    assert record["data"] == ROWS
    assert record["policy"] == BASE
    assert record["command"] == sys.argv
    assert record["started"].endswith("+00:00")
    assert record["versions"]["torch"] == metadata.version("torch")
    assert record["versions"]["trl"] == metadata.version("trl")
    assert record["versions"]["python"] == platform.python_version()
    assert "unsloth" in record["versions"] or "unsloth" not in versions()


# A folder in use


@pytest.mark.parametrize("how", [NEW, RESUME, OVERWRITE])
@pytest.mark.parametrize("name", ["thesis.tex", "adapter", "checkpoints", "evaluation"])
def test_a_folder_of_someone_elses_is_refused_and_untouched(tmp_path, how, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "work").write_text("years of it")
    assert f"{tmp_path} contains other files ({name})" in refusal(tmp_path, how)


def test_an_empty_folder_and_leftovers_of_a_kill_before_run_json_are_fine(tmp_path):
    (tmp_path / ".run.json.partial").write_text("{")
    (tmp_path / "checkpoints").mkdir()
    open_in(tmp_path).begin(BASE)
    assert read_record(tmp_path)["status"] == "running"


def test_overwriting_deletes_the_runs_own_entries_and_only_when_it_begins(tmp_path):
    finished(tmp_path)
    (tmp_path / "notes.md").write_text("mine")
    before = snapshot(tmp_path)
    run = open_in(tmp_path, OVERWRITE)
    assert snapshot(tmp_path) == before
    run.begin(BASE)
    assert held(tmp_path) == {"run.json", "notes.md"}
    assert "results" not in read_record(tmp_path)


def test_overwriting_does_not_follow_links_out_of_the_folder(tmp_path):
    finished(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run" / "adapter").rename(elsewhere)
    (tmp_path / "run" / "adapter").symlink_to(elsewhere)
    open_in(tmp_path / "run", OVERWRITE).begin(BASE)
    assert (elsewhere / "file").read_text() == "adapter"
    assert held(tmp_path / "run") == {"run.json"}


# Resuming


def test_going_on_keeps_everything_and_says_so(tmp_path):
    finished(tmp_path, seed=3)
    started = read_record(tmp_path)["started"]
    open_in(tmp_path, RESUME, seed=3).begin(BASE)
    record = read_record(tmp_path)
    assert held(tmp_path) == OWN
    assert record["started"] == started
    assert len(record["resumed"]) == 1
    assert record["status"] == "running"
    open_in(tmp_path, RESUME, seed=3).begin(BASE)
    assert len(read_record(tmp_path)["resumed"]) == 2


def test_going_on_with_nothing_is_a_new_run(tmp_path, capsys):
    open_in(tmp_path / "run", RESUME).begin(BASE)
    assert f"nothing to resume in {tmp_path / 'run'}" in capsys.readouterr().err
    assert "resumed" not in read_record(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": ("integer_answer",)}, "has rewards=['correct_answer'], not ['integer_answer']"),
        ({"train": TrainConfig(learning_rate=1e-3)}, "has train.learning_rate=2e-05, not 0.001"),
        ({"data": DataConfig(task="/elsewhere/b.py")}, "has data.task='starter', not '/elsewhere/b.py'"),
    ],
)
def test_going_on_with_another_setting_is_refused_by_its_name(tmp_path, changes, message):
    finished(tmp_path)
    refused = refusal(tmp_path, RESUME, **changes)
    assert message in refused
    assert "leave it out" in refused


@pytest.mark.parametrize(
    "changes",
    [{"max_steps": 400}, {"report_to": ("tensorboard",)}],
)
def test_going_on_may_change_what_alters_no_step_that_is_done(tmp_path, changes):
    finished(tmp_path)
    asked = dataclasses.replace(TrainConfig(), **changes)
    open_in(tmp_path, RESUME, train=asked).begin(BASE)
    (name, value), *_ = changes.items()
    assert read_record(tmp_path)["config"]["train"][name] == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("field", ["loss_type=bnpo", "loss_type=dapo"])
def test_going_on_with_another_micro_batch_is_refused_if_the_loss_depends_on_it(tmp_path, field):
    finished(tmp_path, train=TrainConfig(micro_batch_size=8), grpo=(field,))
    changes = {"train": TrainConfig(micro_batch_size=4), "grpo": (field,)}
    if field == "loss_type=bnpo":
        assert "has train.micro_batch_size=8, not 4" in refusal(tmp_path, RESUME, **changes)
    else:
        open_in(tmp_path, RESUME, **changes).begin(BASE)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_setting_that_is_newer_than_the_run_had_its_default(tmp_path, temperature):
    finished(tmp_path)
    record = read_record(tmp_path)
    assert record["config"]["sampling"].pop("temperature") == 1.0
    (tmp_path / "run.json").write_text(json.dumps(record))
    changes = {"sampling": SamplingConfig(temperature=temperature)}
    if temperature == 1.0:
        open_in(tmp_path, RESUME, **changes).begin(BASE)
        assert read_record(tmp_path)["config"]["sampling"]["temperature"] == 1.0
    else:
        assert "has sampling.temperature=1.0, not 0.5" in refusal(tmp_path, RESUME, **changes)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_going_on_with_other_rows_is_refused(tmp_path, split):
    finished(tmp_path)
    changed = {**ROWS, split: {**ROWS[split], "sha256": "dd"}}
    assert f"the {split} rows have changed" in refusal(tmp_path, RESUME, changed)


@pytest.mark.parametrize(
    ("name", "value"),
    [("base_model", "other"), ("fingerprint", "dd"), ("bits", 16)],
)
def test_going_on_with_another_base_is_refused_and_the_record_kept(tmp_path, name, value):
    finished(tmp_path)
    before = snapshot(tmp_path)
    run = open_in(tmp_path, RESUME)
    with pytest.raises(UserError, match=f"began with {name} .*, now it is {value!r}"):
        run.begin({**BASE, name: value})
    assert snapshot(tmp_path) == before


# Reading


@pytest.mark.parametrize("text", ["", "[]", '{"lora_grpo_run": 1}', "\udcff"])
def test_a_broken_record_is_one_line(tmp_path, text):
    (tmp_path / "run.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError) as error:
        read_record(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'run.json'} ")
    assert "\n" not in str(error.value)
    assert str(tmp_path / "run.json") in refusal(tmp_path, RESUME)


# Two processes at once


WORKER = """
import sys
import time
from lora_grpo.config import Invocation, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.runs import claim_run
try:
    claim_run(RunConfig(output_dir=sys.argv[1]), Invocation(resume=True))
except UserError as error:
    sys.exit(str(error))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_ends(tmp_path):
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"another process is using {tmp_path}"):
            open_in(tmp_path)
        first.kill()
    open_in(tmp_path).begin(BASE)
    second = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert "another process is using" in second.stderr
    assert second.returncode == 1


def test_a_run_that_was_left_can_be_resumed_in_the_same_process(tmp_path):
    config = RunConfig(output_dir=str(tmp_path / "run"))
    claim_run(config, NEW)
    first = open_run(config, NEW, "gsm8k_lora", ROWS)
    first.begin(BASE)
    with pytest.raises(UserError, match="another process is using"):
        claim_run(config, RESUME)
    leave_run()
    assert begun_run() is None and not lock.is_held(first.folder)
    claim_run(config, RESUME)
    second = open_run(config, RESUME, "gsm8k_lora", ROWS)
    second.begin(BASE)
    assert begun_run() is second and len(second.record["resumed"]) == 1


def test_a_refused_run_does_not_keep_its_folder_locked(tmp_path):
    finished(tmp_path)
    refusal(tmp_path, RESUME, rewards=("integer_answer",))
    assert not lock.is_held(tmp_path)


def test_a_run_that_never_began_leaves_nothing(tmp_path):
    open_in(tmp_path / "new").checkpoints.mkdir()  # TRL creates it when the trainer is built
    end_run(UserError("refused"))
    assert not (tmp_path / "new").exists()
    finished(tmp_path / "old")
    before = snapshot(tmp_path / "old")
    open_in(tmp_path / "old", OVERWRITE)
    end_run(UserError("refused"))
    assert snapshot(tmp_path / "old") == before


def test_an_error_that_follows_from_another_process_is_that_of_the_other_process(tmp_path, monkeypatch):
    open_in(tmp_path).begin(BASE)
    monkeypatch.setattr(distributed, "reported_error", lambda: "rank 1 is out of memory")
    error = end_run(RuntimeError("connection closed"))
    assert isinstance(error, FailedElsewhere) and str(error) == "rank 1 is out of memory"
    record = read_record(tmp_path)
    assert (record["status"], record["error"]) == ("failed", "rank 1 is out of memory")


def test_a_gpu_without_memory_outside_of_a_step_is_one_line(tmp_path):
    """Such as in the evaluation of the base, while a browser is opened."""
    error = end_run(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB."))
    assert isinstance(error, RunError)
    assert str(error).endswith("then run the command again (CUDA out of memory. Tried to allocate 2 GiB.)")
    open_in(tmp_path).begin(BASE)
    error = end_run(torch.OutOfMemoryError("CUDA out of memory."))
    assert "then resume the run with --resume (CUDA" in str(error)
    record = read_record(tmp_path)
    assert (record["status"], record["error"]) == ("failed", str(error))


def test_a_task_file_may_be_in_another_folder(tmp_path):
    finished(tmp_path, data=DataConfig(task="/old/task.py"))
    open_in(tmp_path, RESUME, data=DataConfig(task="/new/task.py"))
    assert "has data.task" in refusal(tmp_path, RESUME, data=DataConfig(task="/new/other.py"))


def test_only_a_constant_schedule_can_be_extended(tmp_path):
    finished(tmp_path / "run", train=TrainConfig(lr_scheduler="cosine", max_steps=10))
    longer = TrainConfig(lr_scheduler="cosine", max_steps=20)
    assert "cosine schedule spans the whole run" in refusal(tmp_path / "run", RESUME, train=longer)
