"""tools/gsm8k_study.py: which rows its runs have, what it refuses, and its tables at a tiny size."""

import dataclasses
import json
from pathlib import Path

import gsm8k_study
import pytest

from lora_grpo.config import LAPTOP_FOLDER
from lora_grpo.errors import UserError
from lora_grpo.files import json_files, lock

TINY = (
    "--train.prompts-per-step 1 --train.micro-batch-size 1 --train.max-steps 1 --train.warmup-steps 0 "
    "--sampling.max-completion-tokens 16"
)


@pytest.fixture
def data(tmp_path):
    """Return a folder with training and test files of a few rows."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for split, count in (("train", 12), ("test", 3)):
        rows = [{"question": f"{split}: {n} + 1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"} for n in range(count)]
        (folder / f"{split}.jsonl").write_text(json_files.dump_lines(rows), encoding="utf-8")
    return folder


@pytest.fixture
def study(tmp_path, data, monkeypatch):
    """Return a study of one seed."""
    monkeypatch.setattr(gsm8k_study, "VALIDATION_ROWS", 4)
    monkeypatch.chdir(gsm8k_study.ROOT)
    return gsm8k_study.Study(tmp_path / "study", data, tmp_path / "HumanEval.jsonl", [0])


@pytest.fixture
def any_model(tmp_path, monkeypatch):
    """Let the study begin without the weights of the laptop model."""
    monkeypatch.setattr(gsm8k_study, "LAPTOP_FOLDER", str(tmp_path / "model"))
    Path(tmp_path, "model").mkdir()
    Path(tmp_path, "model", "config.json").write_text("{}", encoding="utf-8")


def questions(study, split):
    return [row["question"] for row in json_files.read_finished_lines(study.rows(split))]


def test_no_run_trains_on_validation_or_test_rows(study, any_model):
    study.begin()
    assert questions(study, "train") == [f"train: {n} + 1?" for n in range(8)]
    assert questions(study, "validation") == [f"train: {n} + 1?" for n in range(8, 12)]
    assert questions(study, "test") == [f"test: {n} + 1?" for n in range(3)]
    command = study._command("sft", 0)
    assert command[command.index("--data.train") + 1] == str(study.rows("train"))
    assert command[command.index("--data.eval") + 1] == str(study.rows("validation"))


def test_other_rows_and_settings_are_refused(study, any_model, data):
    study.begin()
    study.begin()
    kept = study.folder / "study.json"
    text = kept.read_text(encoding="utf-8")
    other = json.loads(text)
    other["presets"][gsm8k_study.SFT]["train"]["max_steps"] += 1
    kept.write_text(json.dumps(other, indent=2), encoding="utf-8")
    with pytest.raises(UserError, match=r"study\.json differs"):
        study.begin()
    kept.write_text(text, encoding="utf-8")
    with (data / "test.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"question": "1 + 1?", "answer": "#### 2"}\n')
    with pytest.raises(UserError, match=r"test\.jsonl differs"):
        study.begin()


def test_the_model_must_be_downloaded(study, tmp_path, monkeypatch):
    monkeypatch.setattr(gsm8k_study, "LAPTOP_FOLDER", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="make laptop-model"):
        study.begin()
    assert not study.folder.exists()


@pytest.fixture
def tiny(study, monkeypatch):
    """Return the study with runs of one step."""
    assert (gsm8k_study.ROOT / LAPTOP_FOLDER / "config.json").is_file(), "run `make laptop-model`"
    stages = {}
    for name in ("sft", "grpo", "random", "more_sft"):
        stage = gsm8k_study.STAGES[name]
        group = " --sampling.num-generations 2" if "gsm8k_lora" in stage.command else ""
        stages[name] = dataclasses.replace(stage, command=f"{stage.command} {TINY}{group}")
    monkeypatch.setattr(gsm8k_study, "STAGES", stages)
    monkeypatch.setattr(gsm8k_study, "GRPO", stages["grpo"].command)
    monkeypatch.setattr(gsm8k_study, "LENGTHS", {"gsm8k": 8, "humaneval": 8})
    monkeypatch.setattr(gsm8k_study, "FORGETTING", ("humaneval",))
    problem = {"task_id": "HumanEval/0", "entry_point": "one", "canonical_solution": "    return 1\n"}
    problem |= {
        "prompt": 'def one():\n    """Return 1."""\n',
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    }
    study.humaneval.write_text(json_files.dump_lines([problem]), encoding="utf-8")
    study.begin()
    return study


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.real_model
def test_tables_of_tiny_runs(tiny):
    headings, *rows = gsm8k_study.gains(tiny)
    names = ["greedy", "pass@1", "pass@4"]
    assert [row[:2] for row in rows] == [[seed, name] for seed in ("0", "all") for name in names]
    assert all(len(row) == len(headings) for row in rows)
    _, *rows = gsm8k_study.gains(dataclasses.replace(tiny, samples=0))
    assert [row[:2] for row in rows] == [["0", "greedy"], ["all", "greedy"]]

    headings, *rows = gsm8k_study.controls(tiny)
    assert {row[0] for row in rows} == {gsm8k_study.STAGES[name].title for name in ("random", "more_sft")}
    assert all(len(row) == len(headings) for row in rows)
    # A step of 2 completions of at most 16 tokens has about as many tokens as one or two references.
    record = json.loads((tiny.folder / "more_sft-0" / "run.json").read_text(encoding="utf-8"))
    assert record["config"]["seed"] == gsm8k_study.OTHER_ROWS
    assert 1 <= record["config"]["train"]["max_steps"] <= 4

    headings, *rows = gsm8k_study.forgetting(tiny)
    assert [row[:3] for row in rows] == [["humaneval", "0", "pass@1"]] and len(rows[0]) == len(headings)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.real_model
def test_the_same_work_by_trl_alone(tiny):
    _, *rows = gsm8k_study.plain(tiny)
    assert [row[:2] for row in rows] == [["TRL", "0"], ["the kit", "0"], ["the kit / TRL", "0"]]
    assert float(rows[2][2]) > 0
    finished = {path: path.stat().st_mtime_ns for path in tiny.folder.rglob("*.json")}
    gsm8k_study.plain(tiny)  # everything is kept
    assert finished == {path: path.stat().st_mtime_ns for path in tiny.folder.rglob("*.json")}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.real_model
def test_a_trainer_whose_study_was_killed_is_not_disturbed(tiny):
    folder = tiny.folder / "trl_sft-0"
    with lock.holding(folder):
        (folder / "steps.jsonl").write_text("{}\n", encoding="utf-8")
        with pytest.raises(UserError, match="another process"):
            tiny.model("trl_sft", 0)
    assert (folder / "steps.jsonl").exists()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.real_model
def test_trl_alone_goes_on_from_its_last_complete_checkpoint(tiny, monkeypatch):
    monkeypatch.setattr(gsm8k_study, "PLAIN_FLAGS", ("--train.checkpoint-steps", "1"))
    folder = tiny.model("trl_sft", 0).parent
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    first_step = (folder / "steps.jsonl").read_text(encoding="utf-8")

    # As after a kill in the third step: it was logged, and its checkpoint is incomplete.
    (folder / "finished.json").unlink()
    (folder / "checkpoint-3").mkdir()
    (folder / "steps.jsonl").write_text(first_step + first_step + '{"step"', encoding="utf-8")
    stage = gsm8k_study.STAGES["sft"]
    longer = dataclasses.replace(stage, command=stage.command.replace("--train.max-steps 1", "--train.max-steps 2"))
    monkeypatch.setitem(gsm8k_study.STAGES, "sft", longer)

    assert tiny.model("trl_sft", 0).name == "checkpoint-2"
    assert not (folder / "checkpoint-3").exists()
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines[0] == first_step and len(lines) == 2
