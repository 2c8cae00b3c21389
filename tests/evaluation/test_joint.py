"""Several tasks in one table: the adjusted p-values, and what the statement may claim."""

import json

import pytest
from helpers.graded_samples import samples

from lora_grpo.evaluation.joint import Joint, make_joint
from lora_grpo.evaluation.pass_at_k import holm
from lora_grpo.evaluation.protocol import Protocol
from lora_grpo.evaluation.report import Graded, make_report, read_as


def report(task, before, after):
    """One greedy sample per problem: `+` passes, `-` does not."""
    protocol = Protocol(task=task, rows=len(before), data_sha256="", grading="", seed=0)
    trained = Graded("trained", samples(after, []), {}, protocol)
    base = Graded("base", samples(before, []), {}, protocol)
    return make_report((), trained, base)


def row(joint, task):
    return next(row for row in joint.rows if row.task == task)


def test_holm_adjusts_as_in_r():
    """`p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")`, and values that stay in order and below 1."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.5]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_losses_are_first_and_a_change_must_survive_the_adjustment():
    gained = report("gained", "-" * 40, "+" * 20 + "-" * 20)
    lost = report("lost", "+" * 40, "-" * 20 + "+" * 20)
    unclear = report("unclear", "+" * 40, "-" * 6 + "+" * 34)  # p = 0.031 alone
    same = report("same", "+-" * 20, "+-" * 20)
    joint = make_joint([gained, same, unclear, lost])
    directions = {row.task: row.direction for row in joint.rows}
    assert list(directions.items()) == [("lost", -1), ("unclear", 0), ("same", 0), ("gained", 1)]
    alone = row(make_joint([unclear]), "unclear")
    assert alone.direction == -1
    assert alone.adjusted_p == alone.p_value
    among_four = row(joint, "unclear")
    assert among_four.adjusted_p == pytest.approx(2 * among_four.p_value)

    worse, better, not_clear = joint.statement.split("; ")
    assert "lost" in worse
    assert "gained" in better
    assert "unclear" in not_clear
    assert "same" in not_clear
    assert not_clear.count("points is possible") == 2


def test_no_loss_is_not_claimed_where_an_interval_contains_one():
    """Equal answers to a few problems exclude nothing."""
    few = make_joint([report("few", "+" * 8, "+" * 8)])
    lower, _ = row(few, "few").difference_interval
    assert row(few, "few").difference == 0
    assert lower < -0.2
    assert "points is possible" in few.statement
    one_gain = make_joint([report("one gain", "-" + "+" * 39, "+" * 40)])
    assert row(one_gain, "one gain").difference > 0
    assert "points is possible" in one_gain.statement
    better = make_joint([report("better", "-" * 40, "+" * 40)])
    assert "possible" not in better.statement


def test_the_files_are_read_as_they_were_written(tmp_path):
    joint = make_joint([report("a", "+-" * 10, "-+" * 10), report("b", "--" * 10, "++" * 10)])
    joint.write(tmp_path)
    assert read_as(Joint, tmp_path) == joint
    assert json.loads((tmp_path / "report.json").read_text())["statement"] == joint.statement
    assert (tmp_path / "report.md").read_text().count("\n| ") == 2
