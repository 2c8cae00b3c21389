"""A failed agent says nothing about the model: its episodes count nowhere, and are played again."""

import json

import pytest
from helpers.graded_samples import samples

from lora_grpo.errors import RunError
from lora_grpo.evaluation import Evaluations, TaskEvaluation, count_passed
from lora_grpo.evaluation.protocol import Protocol
from lora_grpo.evaluation.report import Graded, make_report
from lora_grpo.evaluation.results import append_batches
from lora_grpo.evaluation.shares import drop_failed, read_results
from lora_grpo.progress import Progress


def failed(results, *keys):
    """Mark the results with these problems and indices as those of failed agents."""
    marked = []
    for result in results:
        is_failed = (result["task_id"], result["sample_index"]) in keys
        marked.append({**result, "passed": False, "failure": "KeyError: 'x'"} if is_failed else result)
    return marked


def report(ks, after, before=None):
    protocol = Protocol(task="task", rows=4, data_sha256="", grading="", seed=0)
    trained = Graded("trained", after, {}, protocol)
    return make_report(ks, trained, Graded("base", before, {}, protocol) if before else None)


def test_a_failed_sample_is_not_scored_0():
    after = failed(samples("++-+", ["++", "+-", "--", "++"]), ("t0", 0), ("t1", 0), ("t3", "greedy"))
    made = report((1,), after)
    assert made.evaluated.failed == 3
    assert made.evaluated.samples == 9
    assert made.evaluated.scores == {"pass@1": (1 + 0 + 0 + 1) / 4, "greedy": 2 / 3}
    assert "samples 3 of trained" in made.left_out and made.left_out in made.markdown()
    assert report((1,), samples("++")).left_out is None


def test_a_problem_whose_agent_failed_is_not_said_to_have_no_samples(tmp_path, capsys):
    def shown(results):
        Evaluations("trained", [TaskEvaluation(report((1,), results), tmp_path)], joint=None).show()
        printed = capsys.readouterr()
        return printed.out + printed.err

    of_all = samples("++++")
    assert "have samples" not in shown(of_all)
    assert "only 3 of 4 tasks have samples" in shown(of_all[:3])
    of_failed_agent = shown(failed(of_all, ("t3", "greedy")))
    assert "left out, because the agent failed: samples 1 of trained" in of_failed_agent
    assert "have samples" not in of_failed_agent


def test_a_problem_with_too_few_samples_for_k_is_left_out():
    after = failed(samples("++-", ["++", "+-", "--"]), ("t0", 0), ("t1", "greedy"))
    made = report((1, 2), after)
    assert made.evaluated.scores == {"pass@1": (0.5 + 0) / 2, "pass@2": (1 + 0) / 2, "greedy": 1 / 2}


def test_only_problems_that_both_models_have_are_compared():
    before = samples("--++")
    after = failed(samples("+-++"), ("t2", "greedy"), ("t0", "greedy"))
    made = report((), after, before)
    [row] = made.table
    assert (row.before, row.after, row.difference) == (0.5, 0.5, 0.0)
    assert made.fixed == made.regressed == []
    assert (made.baseline.tasks, made.evaluated.tasks) == (2, 2)
    assert (made.baseline.failed, made.evaluated.failed) == (0, 2)


def test_nothing_but_failures_is_one_line():
    with pytest.raises(RunError, match=r"failed in 2 of 2 episodes of trained") as caught:
        report((1,), failed(samples("++"), ("t0", "greedy"), ("t1", "greedy")))
    assert "\n" not in str(caught.value)


def test_a_row_is_as_difficult_as_the_episodes_say_that_were_played():
    results = failed(samples("++", ["+++", "+-+"]), ("t0", 0), *(("t1", index) for index in range(3)))
    assert count_passed(results, [{"id": "t0"}, {"id": "t1"}]) == [(2, 2), (0, 0)]


def test_the_failed_samples_of_a_file_are_dropped(tmp_path):
    path = tmp_path / "results.jsonl"
    results = failed(samples("+-+"), ("t1", "greedy"))
    path.write_text("".join(json.dumps(result) + "\n" for result in results[:2]))
    path.with_name("results.jsonl.rank1").write_text(json.dumps(results[2]) + "\n")
    drop_failed(path)
    assert read_results(path) == {("t0", "greedy"): results[0], ("t2", "greedy"): results[2]}
    drop_failed(tmp_path / "missing.jsonl")
    assert not (tmp_path / "missing.jsonl").exists()


def test_the_progress_leaves_them_out(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(Progress, "show", lambda _, done, note: notes.append((done, note)))
    results = failed(samples("++"), ("t0", "greedy"))
    all_failed = failed(samples("+"), ("t0", "greedy"))
    append_batches(tmp_path / "samples.jsonl", [], [all_failed, results], 3, "evaluating")
    assert notes == [(1, "0.0% of greedy ones pass"), (3, "100.0% of greedy ones pass")]
