"""The Python API: objects in place of names, results with paths and numbers, and a process without traces."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import TrainerCallback

import lora_grpo as lg
from lora_grpo import console, process_state, starter
from lora_grpo.__main__ import main
from lora_grpo.cli import run_front_door
from lora_grpo.files import lock
from lora_grpo.runs import read_record

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "lora": {"rank": 4, "alpha": 8},
    "sampling": {"num_generations": 4, "max_completion_tokens": 16},
    "train": {"max_steps": 2, "prompts_per_step": 2, "micro_batch_size": 8, "checkpoint_steps": 1},
    "data": {"eval_limit": 4},
    "eval": {"num_samples": 1, "k": (1,)},
    "monitor": {"rows": 0},
}


@pytest.fixture(autouse=True)
def on_a_cpu_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def tiny(folder="outputs/run", **changes):
    return lg.Config("starter", output_dir=folder, **TINY).with_changes(**changes)


# Names and settings


IMPORTS = """
import sys
import lora_grpo as lg

assert not [name for name in sys.modules if name.startswith("lora_grpo.")]
functions = [getattr(lg, name) for name in lg.__all__ if name != "FastGRPOTrainer"]
assert all(map(callable, functions)), functions
assert "torch" not in sys.modules

import lora_grpo.report
from lora_grpo.audit import find_nothing
"""


def test_importing_the_package_loads_nothing_and_every_public_name_exists():
    ended = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.stderr.splitlines()[-1].startswith("ImportError: cannot import name 'find_nothing'")

    assert callable(lg.report) and callable(lg.preview) and callable(lg.audit)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"max_step": 2}}, "unknown key train.max_step; did you mean 'train.max_steps'?"),
        ({"trian": {"max_steps": 2}}, "unknown key trian; did you mean 'train'?"),
        ({"train": {"max_steps": 0}}, "--train.max-steps is 0; expected a value greater than 0"),
        ({"train": 2}, "train is 2; expected a mapping of settings"),
        ({"seed": -1}, "--seed is -1; expected a value greater than or equal to 0"),
    ],
)
def test_a_wrong_setting_is_refused_as_a_flag_is(settings, message):
    with pytest.raises(lg.UserError) as error:
        lg.Config(**settings)
    assert str(error.value) == message


def test_settings_have_the_presets_values_unless_they_are_given():
    config = lg.Config("starter", train={"max_steps": 7}).with_changes(train={"learning_rate": 1e-4})
    assert config.settings["train"] == {"max_steps": 7, "learning_rate": 1e-4}
    planned = lg.plan("starter", config=config).config
    assert (planned.train.max_steps, planned.train.learning_rate, planned.train.prompts_per_step) == (7, 1e-4, 8)
    assert planned.output_dir == "outputs/gsm8k_lora" and "--train.max-steps" not in repr(config)


def no_columns(completions):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lg.train("gsm9k", config=tiny()), "unknown task 'gsm9k'; did you mean 'gsm8k'?"),
        (lambda: lg.train(recipe="gms8k", config=tiny()), "unknown recipe 'gms8k'; did you mean 'gsm8k'?"),
        (lambda: lg.train(object(), config=tiny()), "object defines no function 'load'; expected an object with load"),
        (lambda: lg.train("starter", config=tiny(), rewards=[3]), "reward 3 is not a function"),
        (lambda: lg.train("starter", config=tiny(), rewards=[no_columns]), "expected a function (completions, **colum"),
        (lambda: lg.merge("missing"), "missing"),
        (lambda: lg.merge("missing", dtpye="bf16"), "unknown option 'dtpye'; did you mean 'dtype'?"),
        (lambda: lg.evaluate("starter", limit=0), "--limit is 0"),
        (lambda: lg.train("starter", config=tiny(), resume=True), "there is no run in outputs/run"),
        (
            lambda: lg.train("starter", recipe="sft", config=tiny()),
            "the recipe sft has method 'sft'; pass method='sft', or another recipe",
        ),
        (lambda: lg.train("starter", recipe="gsm8k", method="sft", config=tiny()), "recipe gsm8k has method 'grpo'"),
        (lambda: lg.plan("starter", recipe="gsm8k", method="sft", config=tiny()), "recipe gsm8k has method 'grpo'"),
        (lambda: lg.train("starter", config=tiny(method="sft")), "pass method='sft' to the function"),
    ],
)
def test_a_mistake_is_one_line_of_a_user_error_and_nothing_is_printed_or_written(call, message, capfd, tmp_path):
    with pytest.raises(lg.UserError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "") and not list(tmp_path.rglob("*"))


def test_a_folder_is_in_use_before_the_rows_are_loaded_and_left_as_it_was(monkeypatch, tmp_path):
    held = []

    def no_rows(config):
        held.append(lock.is_held(config.folder))
        raise lg.UserError("no rows")

    monkeypatch.setattr("lora_grpo.pipeline.load_data", no_rows)
    for _ in range(2):
        with pytest.raises(lg.UserError, match="no rows"):
            lg.train("starter", config=tiny())
        assert not list(tmp_path.rglob("*"))
    assert held == [True, True]


# A run with objects


WORDS = ("stone", "river", "cloud", "apple", "lemon", "table", "chair", "house", "plant", "bread", "water", "light")


class Spelling:
    """Spell a word backwards."""

    def load(self, split, source=None):
        from lora_grpo.tasks import read_rows

        return read_rows(source, split)

    def check(self, completion, row):
        return completion.strip() == row["word"][::-1]


TRAIN = [{"question": f"Spell {word} backwards, {n}.", "word": word} for word in WORDS[:8] for n in range(4)]
EVAL = [{"question": f"Spell {word} backwards.", "word": word} for word in WORDS[8:]]


def short(completions, **columns):
    return [1 / (1 + len(completion[-1]["content"])) for completion in completions]


class StopInStep1(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def spelling(folder, **more):
    from datasets import Dataset

    config = tiny(folder, train={"max_steps": 2})
    rows = {"train_dataset": TRAIN, "eval_dataset": Dataset.from_list(EVAL)}
    return lg.train(Spelling, config=config, rewards=[(short, 0.5), "correct_answer"], **rows, **more)


class Runs(NamedTuple):
    """An uninterrupted run, and one that was interrupted in its first step and resumed."""

    uninterrupted: lg.TrainedRun
    messages: list
    """Of the uninterrupted one."""
    resumed: lg.TrainedRun
    record_before: dict
    """Of the resumed one, when it was interrupted."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    messages = []
    uninterrupted = spelling(folder / "whole", progress=messages.append)
    with pytest.raises(KeyboardInterrupt):
        spelling(folder / "stopped", callbacks=[StopInStep1()])
    record_before = read_record(folder / "stopped")
    return Runs(uninterrupted, messages, spelling(folder / "stopped", resume=True), record_before)


def test_a_run_returns_its_paths_and_numbers(runs):
    run = runs.uninterrupted
    assert run.adapter.is_dir() and run.page.is_file() and run.best is None
    assert [row.metric for row in run.table] == ["pass@1", "greedy"]
    assert run.evaluation.protocol.task == "Spelling" and run.evaluation.evaluated.tasks == 4
    assert [line["step"] for line in run.metrics] == [1, 2]
    steps = [message for message in runs.messages if message.task == "GRPO"]
    assert [(step.done, step.total) for step in steps] == [(1, 2), (2, 2)]
    assert all("rewards/short/mean" in step.metrics for step in steps)
    assert {message.kind for message in runs.messages} == {"note", "progress", "result"}


def test_run_json_tells_that_objects_were_used_and_the_hash_of_their_sources(runs):
    record = runs.uninterrupted.record
    assert record["config"]["data"]["task"] == "python:Spelling"
    assert record["config"]["data"]["train"] == "python:train_dataset" and record["data"]["train"]["rows"] == 32
    assert record["config"]["rewards"] == ["python:short=0.5", "correct_answer"]
    assert record["command"] == ["lora_grpo.train"]
    objects = record["python_objects"]
    assert objects.keys() == {"python:Spelling", "python:short"}
    for entry in objects.values():
        assert entry["module"] == Spelling.__module__ and len(entry["sha256"]) == 64


def test_an_interrupted_run_is_resumed_with_the_same_objects(runs):
    assert runs.record_before["status"] == "interrupted"
    assert runs.resumed.record["status"] == "complete"
    assert len(runs.resumed.record["resumed"]) == 1
    for line, expected in zip(runs.resumed.metrics, runs.uninterrupted.metrics, strict=True):
        for name in ("loss", "reward", "grad_norm", "rewards/short/mean"):
            assert line[name] == expected[name], (line["step"], name)


def exit_code(*arguments):
    try:
        return run_front_door(arguments)
    except SystemExit as ended:
        return ended.code


def test_the_command_line_refuses_a_run_with_objects_in_one_line(runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lora-grpo"])
    folder = str(runs.uninterrupted.folder)
    for arguments in (["train", "task", "--resume", "--output-dir", folder], ["evaluate", folder]):
        assert exit_code(*arguments) == 2
        last_line = capsys.readouterr().err.splitlines()[-1]
        assert last_line.startswith("error: ") and "use lora_grpo from Python with the same object" in last_line


def test_an_object_that_has_changed_does_not_resume(runs):
    def short(completions, **columns):
        return [0.0 for _ in completions]

    with pytest.raises(lg.UserError, match="python:short has changed since the run in"):
        lg.train(
            Spelling,
            config=tiny(runs.uninterrupted.folder),
            rewards=[(short, 0.5), "correct_answer"],
            train_dataset=TRAIN,
            eval_dataset=EVAL,
            resume=True,
        )


def test_a_run_is_evaluated_merged_exported_and_shared_in_place_of_its_path(runs, capfd):
    run = runs.uninterrupted
    evaluation = lg.evaluate(run, compare="base", limit=2)
    assert evaluation.report.protocol.rows == 2 and evaluation.scores.keys() == {"pass@1"}
    assert (evaluation.folders[0] / "report.json").is_file() and len(evaluation.table) == 1
    merged = lg.merge(run, dtype="fp32")
    assert merged.report.dtype == "fp32" and Path(merged) == run.folder.resolve() / "merged"
    (gguf,) = lg.export_gguf(run, type="f16")
    assert gguf.name == "whole.F16.gguf" and gguf.is_file()
    pushed = lg.push(run, "me/spelling", dry_run=True)
    assert pushed.url is None and "adapter_model.safetensors" in pushed.files and "Spelling" in pushed.card
    assert lg.report(run) == run.page
    assert capfd.readouterr() == ("", "")


def test_a_tilde_in_an_option_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (gguf,) = lg.export_gguf(starter.model_path(), type="f16", output_dir="~/gguf")
    assert gguf.parent == tmp_path / "home" / "gguf" and gguf.is_file()


def test_preview_and_audit_return_what_they_found(capfd):
    rows = {"train_dataset": TRAIN, "eval_dataset": EVAL}
    preview = lg.preview(Spelling, config=tiny(), rewards=[short], **rows)
    assert len(preview.groups) == 8 and preview.diagnosis.verdict.endswith("learn")
    findings = lg.audit(Spelling, config=tiny(), **rows)
    assert findings["Spelling"].problems == {} and capfd.readouterr() == ("", "")


def test_a_failed_run_raises_a_run_error_and_says_so_in_run_json():
    def none_is_finite(completions, **columns):
        return [float("nan") for _ in completions]

    with pytest.raises(lg.RunError, match="expected a finite number"):
        lg.train("starter", config=tiny(), rewards=[none_is_finite])
    record = read_record(Path("outputs/run"))
    assert record["status"] == "failed" and "expected a finite number" in record["error"]


# A process


TWICE = """
import json, sys
from helpers.process_traces import traces
import lora_grpo as lg

class Adding:
    def load(self, split):
        return [{"question": f"{split}: {n} + 1?", "answer": str(n + 1)} for n in range(40)]
    async def check(self, completion, row):
        return row["answer"] in completion

before = traces()
for number in range(2):
    for task in (Adding, "starter-code"):
        settings = json.loads(sys.argv[1])
        settings["output_dir"] = f"outputs/{number}-{task if isinstance(task, str) else 'object'}"
        run = lg.train(task, config=lg.Config("starter", **settings), recipe="gsm8k", rewards=["correct_answer"])
        lg.evaluate(run, limit=2, compare="base")
        lg.export_gguf(lg.merge(run))
after = traces()
changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
print(json.dumps(changed))
"""


@pytest.mark.slow
def test_two_runs_in_one_process_leave_nothing_behind(tmp_path):
    settings = {**TINY, "train": {**TINY["train"], "max_steps": 1}}
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": str(tmp_path / "tmp")}
    ended = subprocess.run(
        [sys.executable, "-c", TWICE, json.dumps(settings)],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {} and ended.stderr == ""
    assert {path.name for path in tmp_path.iterdir()} == {"outputs", "tmp"}


def test_what_a_call_changes_is_put_back(monkeypatch, tmp_path):
    from helpers.process_traces import traces

    from lora_grpo import asynchronous, sandbox
    from lora_grpo.models import engines

    async def value():
        return 1

    # A folder of temporary files of its own: other processes write into the shared one at any time.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    sandbox.stop()
    before = traces()
    with process_state.restored():
        engines.prepare_torch(0)
        os.environ["LEFT_BEHIND"] = "1"
        del os.environ["CUDA_VISIBLE_DEVICES"]
        sandbox.start()
        assert asynchronous.finished(value()) == 1
        assert traces() != before
    assert traces() == before


def test_messages_without_a_listener_are_those_of_the_logger(caplog, capsys):
    with console.listening(None), caplog.at_level("INFO", "lora_grpo"):
        console.note("dropped 3 rows")
        console.result("a table")
    assert [record.message for record in caplog.records] == ["dropped 3 rows", "a table"]
    assert capsys.readouterr() == ("", "")


def lines_of_plan(text):
    """Return the lines of a plan that no folder and no time is in."""
    words = ("model", "engine", "weights", "micro-batch", "work")
    return [line for line in text.splitlines() if line.startswith(words)]


def test_plan_tells_what_the_command_line_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lora-grpo", "train", "gsm8k", "--preset", "starter", "--plan"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    of_command = lines_of_plan(capsys.readouterr().out)
    lg.plan(recipe="gsm8k", config=lg.Config("starter"), progress=True)
    of_function = lines_of_plan(capsys.readouterr().out)
    assert of_command == of_function and len(of_command) == 5
