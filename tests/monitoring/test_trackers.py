"""Runs that report to trackers: real ones in local folders, and one that fails."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
from helpers.graded_samples import samples
from helpers.tiny_runs import begin_tiny
from transformers import TrainerCallback, integrations

from lora_grpo.config.schema import Invocation
from lora_grpo.evaluation import report_run
from lora_grpo.report import report_line
from lora_grpo.runs import leave_run, read_metrics, read_run
from lora_grpo.training import train

ROOT = Path(__file__).parents[2]


def finish(run, trackers):
    """Write the report of a run and send it, as the pipeline does."""
    run.evaluation.mkdir()
    report_run(run, samples("----"), samples("+--+"))
    report_line(run.folder)
    trackers.finish()


def written_completions(run):
    """Return the texts that the run has written, for each of its steps with a file."""
    texts = {}
    for line in read_run(run.folder).completions:
        texts.setdefault(line["step"], []).append(line["completion"])
    assert list(texts) == [1, 2]
    return texts


def train_and_report(folder, tracker):
    training = begin_tiny(folder, train={"report_to": (tracker,), "completions_steps": 2})
    training.run.begin(training.policy.record)
    train(training)
    finish(training.run, training.trackers)
    return training.run


@pytest.mark.engines
def test_tensorboard_gets_the_metrics_and_the_table(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: make engines")
    run = train_and_report(tmp_path / "out", "tensorboard")
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    rewards = {event.step: event.value for event in events.Scalars("train/reward")}
    assert rewards == {step["step"]: pytest.approx(step["reward"]) for step in read_metrics(run.folder)}
    assert len(events.Scalars("train/time/training")) == 3  # what the monitor adds
    rollouts = {
        event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("rollouts/text_summary")
    }
    assert {step: len(text.splitlines()) - 2 for step, text in rollouts.items()} == {1: 8, 2: 8}
    heading = rollouts[2].splitlines()[0]
    assert heading.startswith("| step | id | question | completion |") and "xml" in heading
    (table,) = events.Tensors("evaluation/text_summary")
    assert "| greedy | 0.0 [" in table.tensor_proto.string_val[0].decode()


@pytest.mark.engines
def test_tensorboard_shows_each_step_once_after_a_kill_between_checkpoints(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: make engines")
    folder = tmp_path / "out"
    settings = {"train": {"report_to": ("tensorboard",), "checkpoint_steps": 2, "max_steps": 5}}
    killed = begin_tiny(folder, **settings)
    killed.run.begin(killed.policy.record)
    killed.trainer.add_callback(KilledAtStep3())
    with pytest.raises(KeyboardInterrupt):
        train(killed)
    leave_run()
    resumed = begin_tiny(folder, Invocation(resume=True), **settings)
    resumed.run.begin(resumed.policy.record)
    train(resumed)
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3, 4, 5]


@pytest.mark.engines
def test_trackio_gets_the_metrics_the_table_and_the_page_in_one_run(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed: make engines")
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    folder = tmp_path / "trackio"
    for name, module in [*sys.modules.items()]:  # TRL has imported it, so that it no longer reads the environment
        for constant, value in (("TRACKIO_DIR", folder), ("MEDIA_DIR", folder / "media")):
            if name.startswith("trackio") and hasattr(module, constant):
                monkeypatch.setattr(module, constant, value)
    run = train_and_report(tmp_path / "out", "trackio")
    (name,) = storage.get_runs("huggingface")
    assert name.startswith("out ")
    lines = storage.get_logs("huggingface", name)
    rewards = [line["train/reward"] for line in lines if "train/reward" in line]
    assert rewards == [pytest.approx(step["reward"]) for step in read_metrics(run.folder)]
    rollouts = [line["rollouts"]["_value"] for line in lines if "rollouts" in line]
    texts = {rows[0]["step"]: [row["completion"] for row in rows] for rows in rollouts}
    assert texts == written_completions(run)
    assert all({"reward", "xml_tag_count", "near_length"} <= row.keys() for rows in rollouts for row in rows)
    (table,) = [line["evaluation"] for line in lines if "evaluation" in line]
    assert [row["metric"] for row in table["_value"]] == ["greedy"]
    (page,) = [line["report"] for line in lines if "report" in line]
    (copy,) = folder.rglob("*.html")
    assert page["_type"] == "trackio.html"
    assert "greedy" in copy.read_text()


@pytest.mark.engines
def test_wandb_gets_all_without_an_account_or_the_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = train_and_report(tmp_path / "out", "wandb")
    texts = {}
    for path in tmp_path.rglob("rollouts_*.table.json"):
        table = json.loads(path.read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        texts[rows[0]["step"]] = [row["completion"] for row in rows]
    assert texts == written_completions(run)
    (evaluation,) = [json.loads(path.read_text()) for path in tmp_path.rglob("evaluation_*.table.json")]
    assert [row[0] for row in evaluation["data"]] == ["greedy"]
    assert [path.read_text().count("greedy") > 0 for path in tmp_path.rglob("*.html") if "media" in path.parts] == [
        True
    ]


class KilledAtStep3(TrainerCallback):
    """Ends training after the trackers got the step."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


class Failing(TrainerCallback):
    calls = 0

    def on_log(self, args, state, control, **kwargs):
        Failing.calls += 1
        if state.global_step == 2:
            raise OSError("the server is gone")


def test_a_tracker_that_fails_is_named_and_the_run_goes_on_without_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(integrations, "get_reporting_integration_callbacks", lambda names: [Failing for _ in names])
    Failing.calls = 0
    sent = []
    module = types.SimpleNamespace(Table=dict, log=sent.append)
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = train_and_report(tmp_path / "out", "wandb")
    assert run.is_trained
    assert len(read_metrics(run.folder)) == 3
    assert Failing.calls == 2
    (message,) = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    assert "the server is gone" in message
    assert [values["train/global_step"] for values in sent] == [1]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(tmp_path, warm):
    out = tmp_path / "out"
    done = warm.start(ROOT / "recipes" / "gsm8k_lora.py", "--train.report-to", "wandb", "--output-dir", str(out)).end()
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert "pip install" in error and "wandb`" in error
    assert not out.exists()
