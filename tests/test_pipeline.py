"""The end of a run: its report, its record and what is printed."""

import json

import pytest
from helpers.graded_samples import samples

from lora_grpo.config import replace
from lora_grpo.config.schema import EvalConfig, RunConfig, SamplingConfig, TrainConfig
from lora_grpo.pipeline import finish_run
from lora_grpo.runs import Run, now


@pytest.fixture
def run(tmp_path):
    config = RunConfig(
        output_dir=str(tmp_path),
        sampling=SamplingConfig(max_completion_tokens=64),
        train=TrainConfig(max_steps=2),
        eval=EvalConfig(num_samples=2, k=(1, 2)),
    )
    record = {"lora_grpo_run": 1, "config": config.to_dict(), "versions": {}, "started": now()}
    record |= {"data": {"eval": {"sha256": "bb"}}, "policy": {"base_model": "starter"}}
    made = Run(config, record)
    made.evaluation.mkdir()
    made.metrics.write_text('{"step": 1, "reward": 0.25}\n{"step": 2, "reward": 1.5}\n')
    return made


@pytest.fixture
def concluded(run, capsys):
    finish_run(run, samples("----", ["+-", "--", "--", "--"]), samples("+---", ["++", "+-", "--", "--"]))
    return run, capsys.readouterr().out


def test_the_record_is_closed_with_the_table(concluded):
    run, _ = concluded
    record = json.loads((run.folder / "run.json").read_text())
    assert record["status"] == "complete"
    assert [row["metric"] for row in record["results"]["table"]] == ["pass@1", "pass@2", "greedy"]
    assert record["results"]["reward"] == {"first": 0.25, "last": 1.5, "steps": 2}


def test_the_report_has_what_a_number_needs_to_be_compared(concluded):
    run, _ = concluded
    report = json.loads((run.evaluation / "report.json").read_text())
    protocol = report["protocol"]
    sampling, base, trained = protocol["sampling"], report["baseline"], report["evaluated"]
    assert (protocol["rows"], sampling["num_samples"], protocol["data_sha256"]) == (4, 2, "bb")
    assert sampling["max_completion_tokens"] == 64
    assert base["source"]["model"] == trained["source"]["model"] == "starter"
    assert "adapter_sha256" not in base["source"] and trained["source"]["adapter_sha256"]
    assert report["pass@1"] == trained["scores"]["pass@1"]
    assert base["samples"] == trained["samples"] == 4 + 8
    assert base["sample_stats"]["greedy"]["wrong_answer"] == 4
    counts = {"passed": 1, "wrong_answer": 7}
    assert counts.items() <= base["sample_stats"]["sampled"].items()
    greedy, sampled = trained["sample_stats"]["greedy"], trained["sample_stats"]["sampled"]
    rules = [(each["strict rule"], each["robust rule"]) for each in (greedy, sampled)]
    assert rules == [(0, 1), (0, 3)]
    truncated = greedy["truncated"] + sampled["truncated"]
    lengths = [each["mean tokens"] for each in (greedy, sampled)]
    assert truncated == 8 and 4 * lengths[0] + 8 * lengths[1] == pytest.approx(4 * 10 + 8 * 20)
    assert [entry["task_id"] for entry in report["fixed"]] == ["t1"] and report["regressed"] == []


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


def test_a_run_that_is_never_right_is_not_told_to_run_longer(run, capsys):
    never = samples("--", ["--", "--"])
    finish_run(run, never, never)
    printed = capsys.readouterr().out
    assert "--resume" not in printed
    assert "train on reference answers first: lora-grpo train sft --task starter with the same" in printed
    task = run.folder / "mine.py"
    task.write_text("def load(split): return [{'question': 'a'}]\ndef check(completion, row): return True\n")
    run.config = replace(run.config, {"data": {"task": str(task)}})
    finish_run(run, never, never)
    printed = capsys.readouterr().out
    assert "0% right  train on easier rows" in printed and "train sft" not in printed


def test_a_report_that_fails_is_said_and_the_run_is_complete(run, capsys):
    (run.folder / "completions").mkdir()
    (run.folder / "completions" / "step-00001.jsonl").write_text("no JSON\n")
    finish_run(run, samples("+-", ["+-", "--"]), samples("++", ["++", "--"]))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("report ")]
    assert len(said) == 1 and "not written: " in said[0] and "step-00001.jsonl:1" in said[0]
    assert json.loads((run.folder / "run.json").read_text())["status"] == "complete"


def test_a_loss_in_another_task_is_the_last_line(run, capsys):
    run.config = replace(run.config, {"eval": {"also": ("starter-code", "math500")}})
    run.record["data"]["also"] = dict.fromkeys(run.config.eval.also, "cc")
    also = run.evaluation / "joint" / "also"
    also.mkdir(parents=True)
    passed = {"starter-code": ("+" * 40, "+" * 10 + "-" * 30), "math500": ("+-" * 4, "+-" * 4)}
    for task, marks in passed.items():
        for name, of_model in zip(("base", "trained"), marks, strict=True):
            lines = [json.dumps(sample) + "\n" for sample in samples(of_model)]
            (also / f"{task}.{name}.samples.jsonl").write_text("".join(lines))
    finish_run(run, samples("----", ["+-"] * 4), samples("+---", ["++"] * 4))
    last = capsys.readouterr().out.splitlines()[-1]
    assert "worse in starter-code;" in last and "math500 (a loss of up to" in last and "better" not in last
    (lost, unclear) = json.loads((run.folder / "run.json").read_text())["results"]["also"]["rows"]
    assert (lost["task"], lost["difference"], unclear["adjusted_p"]) == ("starter-code", -0.75, 1.0)
    assert lost["adjusted_p"] == 2 * lost["p_value"] < 0.05
