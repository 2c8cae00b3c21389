"""The end of a run: its report, its record and what is printed."""

import json

import pytest
from helpers.graded_samples import samples

from lora_grpo.config import Invocation, replace, starter_preset
from lora_grpo.config.schema import EvalConfig, RunConfig, SamplingConfig, TrainConfig
from lora_grpo.errors import RunError
from lora_grpo.pipeline import finish_run, train_run
from lora_grpo.runs import Run, now
from lora_grpo.settings import Recipe


@pytest.fixture
def run(tmp_path):
    config = RunConfig(
        output_dir=str(tmp_path),
        sampling=SamplingConfig(max_completion_tokens=64),
        train=TrainConfig(max_steps=2),
        eval=EvalConfig(num_samples=2, k=(1, 2)),
    )
    record = {
        "lora_grpo_run": 1,
        "config": config.to_dict(),
        "versions": {},
        "started": now(),
        "data": {"eval": {"sha256": "bb"}},
        "policy": {"base_model": "starter"},
    }
    run = Run(config, record)
    run.evaluation.mkdir()
    run.metrics.write_text('{"step": 1, "reward": 0.25}\n{"step": 2, "reward": 1.5}\n')
    return run


@pytest.fixture
def concluded(run, capsys):
    """A run whose accuracy rose, and what its end printed."""
    finish_run(run, samples("----", ["+-", "--", "--", "--"]), samples("+---", ["++", "+-", "--", "--"]))
    return run, capsys.readouterr().out


def test_the_record_is_closed_with_the_table(concluded):
    run, _ = concluded
    record = json.loads((run.folder / "run.json").read_text())
    assert record["status"] == "complete"
    assert [row["metric"] for row in record["results"]["table"]] == ["pass@1", "pass@2", "greedy"]
    assert record["results"]["reward"] == {"first": 0.25, "last": 1.5, "steps": 2}


def test_a_loss_that_is_not_finite_is_left_out_of_the_record(run):
    run.config = replace(run.config, {"method": "sft"})
    run.record["config"] = run.config.to_dict()
    run.metrics.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n{"step": 3, "loss": NaN}\n')
    finish_run(run, samples("----", ["+-"] * 4), samples("+---", ["++"] * 4))
    record = json.loads((run.folder / "run.json").read_text())
    assert record["results"]["loss"] == {"first": 2.5, "last": 1.5, "steps": 2}


@pytest.fixture
def report(concluded):
    run, _ = concluded
    return json.loads((run.evaluation / "report.json").read_text())


def test_the_report_has_what_a_number_needs_to_be_compared(report):
    protocol = report["protocol"]
    assert (protocol["rows"], protocol["data_sha256"]) == (4, "bb")
    assert protocol["sampling"]["num_samples"] == 2
    assert protocol["sampling"]["max_completion_tokens"] == 64


def test_the_report_names_both_models(report):
    base = report["baseline"]["source"]
    trained = report["evaluated"]["source"]
    assert base["model"] == trained["model"] == "starter"
    assert "adapter_sha256" not in base and trained["adapter_sha256"]


def test_the_report_counts_the_samples(report):
    base = report["baseline"]
    trained = report["evaluated"]
    assert base["samples"] == trained["samples"] == 4 + 8
    assert base["sample_stats"]["greedy"]["wrong_answer"] == 4
    sampled_of_base = base["sample_stats"]["sampled"]
    assert (sampled_of_base["passed"], sampled_of_base["wrong_answer"]) == (1, 7)

    greedy = trained["sample_stats"]["greedy"]
    sampled = trained["sample_stats"]["sampled"]
    assert (greedy["strict rule"], greedy["robust rule"]) == (0, 1)
    assert (sampled["strict rule"], sampled["robust rule"]) == (0, 3)

    # Eight samples are wrong; they have 20 tokens and are truncated, the others have 10.
    assert greedy["truncated"] + sampled["truncated"] == 8
    assert 4 * greedy["mean tokens"] + 8 * sampled["mean tokens"] == pytest.approx(4 * 10 + 8 * 20)


def test_the_report_has_the_score_and_the_problems_that_changed(report):
    assert report["pass@1"] == report["evaluated"]["scores"]["pass@1"]
    assert [entry["task_id"] for entry in report["fixed"]] == ["t1"]
    assert report["regressed"] == []


def test_what_is_printed_says_where_things_are_and_what_to_do_next(concluded):
    run, printed = concluded
    for text in ("pass@1", "37.5", "+25.0", "reward: 0.25 in step 1, 1.50 in step 2", str(run.adapter)):
        assert text in printed
    assert "--resume --train.max-steps 4" in printed
    assert (run.evaluation / "report.md").is_file()


EARLY = {"stopped_early": {"step": 2, "passes": 3}}


@pytest.mark.parametrize(
    ("changes", "record", "flags"),
    [
        ({}, EARLY, "--monitor.early-stopping 0"),
        ({"hours": 1.0}, EARLY, "--monitor.early-stopping 0"),
        ({"hours": 1.0}, {**EARLY, "seconds_worked": 3500.0}, "--monitor.early-stopping 0 --hours 2"),
        ({"monitor": {"early_stopping": 0}}, EARLY, "--train.max-steps 4"),
        ({"hours": 1.0}, {"seconds_worked": 900.0}, "--train.max-steps 4"),
        ({"hours": 1.0}, {"seconds_worked": 3500.0}, "--train.max-steps 4 --hours 2"),
        ({"hours": 1.0}, {"out_of_time": {"step": 2, "hours": 1.0}}, "--hours 2"),
    ],
)
def test_a_longer_run_is_told_to_lift_the_limits_that_it_reaches(run, capsys, changes, record, flags):
    config = replace(run.config, {"monitor": {"early_stopping": 3}})
    longer = Run(replace(config, changes), run.record | record)
    finish_run(longer, samples("--", ["+-", "--"]), samples("+-", ["++", "--"]))
    assert f"--resume {flags}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record", "is_extended"), [({}, False), (EARLY, True), ({"out_of_time": {"step": 2, "hours": 1.0}}, True)]
)
def test_a_run_whose_schedule_spans_it_is_not_told_to_add_steps(run, capsys, record, is_extended):
    changes = {"train": {"lr_scheduler": "cosine"}, "monitor": {"early_stopping": 3}, "hours": 1.0}
    spanned = Run(replace(run.config, changes), run.record | record)
    finish_run(spanned, samples("--", ["+-", "--"]), samples("+-", ["++", "--"]))
    printed = capsys.readouterr().out
    assert ("--resume" in printed) is is_extended
    assert "--train.max-steps" not in printed


NEVER_RIGHT = samples("--", ["--", "--"])


def test_a_run_that_is_never_right_is_told_to_train_on_reference_answers_and_not_to_run_longer(run, capsys):
    finish_run(run, NEVER_RIGHT, NEVER_RIGHT)
    printed = capsys.readouterr().out
    assert "--resume" not in printed
    assert "train on reference answers first: lora-grpo train sft --task starter with the same" in printed
    assert "outputs/sft_lora" not in printed  # the run of SFT may be elsewhere


def test_a_run_that_is_never_right_and_has_no_references_is_told_to_train_on_easier_rows(run, capsys):
    task = run.folder / "mine.py"
    task.write_text("def load(split): return [{'question': 'a'}]\ndef check(completion, row): return True\n")
    run.config = replace(run.config, {"data": {"task": str(task)}})
    finish_run(run, NEVER_RIGHT, NEVER_RIGHT)
    printed = capsys.readouterr().out
    assert "0% right  train on easier rows" in printed and "train sft" not in printed


def test_a_report_that_fails_is_said_and_the_run_is_complete(run, capsys):
    (run.folder / "completions").mkdir()
    (run.folder / "completions" / "step-00001.jsonl").write_text("no JSON\n")
    finish_run(run, samples("+-", ["+-", "--"]), samples("++", ["++", "--"]))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("report ")]
    assert "not written: " in line and "step-00001.jsonl:1" in line
    assert json.loads((run.folder / "run.json").read_text())["status"] == "complete"


def test_a_loss_in_another_task_is_the_last_line(run, capsys):
    run.config = replace(run.config, {"eval": {"also": ("starter-code", "math500")}})
    run.record["data"]["also"] = dict.fromkeys(run.config.eval.also, "cc")
    folder = run.evaluation / "joint" / "also"
    folder.mkdir(parents=True)
    results = {
        "starter-code.base": "+" * 40,
        "starter-code.trained": "+" * 10 + "-" * 30,
        "math500.base": "+-" * 4,
        "math500.trained": "+-" * 4,
    }
    for name, passed in results.items():
        lines = [json.dumps(sample) + "\n" for sample in samples(passed)]
        (folder / f"{name}.samples.jsonl").write_text("".join(lines))

    finish_run(run, samples("----", ["+-"] * 4), samples("+---", ["++"] * 4))
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert "worse in starter-code;" in last_line and "math500 (a loss of up to" in last_line
    assert "better" not in last_line
    code, mathematics = json.loads((run.folder / "run.json").read_text())["results"]["also"]["rows"]
    assert (code["task"], code["difference"]) == ("starter-code", -0.75)
    assert code["adjusted_p"] == 2 * code["p_value"] < 0.05
    assert mathematics["adjusted_p"] == 1.0


def test_a_resumed_run_does_not_call_changed_what_was_chosen_for_it(tmp_path, monkeypatch):
    chosen = {"model": {"engine": "peft", "bits": 4}, "sampling": {"backend": "transformers"}, "seed": 7}
    config = replace(replace(RunConfig(preset="starter", output_dir=str(tmp_path)), starter_preset()), chosen)
    begun = {"lora_grpo_run": 1, "config": config.to_dict(), "versions": {}, "data": {}, "policy": {}}
    memory = {"derived": ["model.bits"]}
    (tmp_path / "run.json").write_text(json.dumps(begun | {"changed_settings": {"seed": 0}, "memory": memory}))
    opened = []

    def open_run(config, invocation, recipe, data, entries):
        opened.append(entries)
        raise RunError("opened")

    monkeypatch.setattr("lora_grpo.pipeline.open_run", open_run)
    recipe = Recipe("gsm8k_lora", {"starter": starter_preset()})
    with pytest.raises(RunError, match="opened"):
        train_run(config, Invocation(resume=True), recipe)
    assert opened[0]["changed_settings"] == {"seed": 0}
