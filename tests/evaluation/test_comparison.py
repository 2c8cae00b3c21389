import pytest
from helpers.graded_samples import samples

from lora_grpo.evaluation.comparison import compare, problem_changes
from lora_grpo.evaluation.measurement import measure


def rows_of(before, after, k=()):
    table = compare(before, after, k, seed=0)
    return {row.metric: row for row in table}


def test_pass_at_k_of_known_samples():
    before = samples("----", ["+---", "----", "----", "++++"])
    after = samples("----", ["++--", "+---", "----", "++++"])
    table = rows_of(before, after, (1, 2, 4))
    assert list(table) == ["pass@1", "pass@2", "pass@4", "greedy"]
    # pass@1 is the share of passing samples; pass@4 of 4 samples is whether any passed.
    assert table["pass@1"].before == pytest.approx((1 + 0 + 0 + 4) / 16)
    assert table["pass@1"].after == pytest.approx((2 + 1 + 0 + 4) / 16)
    assert table["pass@4"].before == pytest.approx(2 / 4)
    assert table["pass@4"].after == pytest.approx(3 / 4)
    # One task with c of 4 correct: 1 - C(4-c, 2) / C(4, 2).
    assert table["pass@2"].before == pytest.approx((1 / 2 + 0 + 0 + 1) / 4)
    assert table["pass@2"].after == pytest.approx((5 / 6 + 1 / 2 + 0 + 1) / 4)


def test_greedy_and_sampled_verdicts_are_kept_apart():
    table = rows_of(samples("++--", ["----"] * 4), samples("+++-", ["++++"] * 4), (1,))
    assert (table["pass@1"].before, table["pass@1"].after) == (0.0, 1.0)
    assert (table["greedy"].before, table["greedy"].after) == (0.5, 0.75)


def test_the_difference_is_after_less_before():
    worse, better = samples("-" * 10, ["-"] * 10), samples("+" * 10, ["+"] * 10)
    gain, loss = rows_of(worse, better, (1,)), rows_of(better, worse, (1,))
    for metric in ("pass@1", "greedy"):
        assert gain[metric].difference == 1.0
        assert loss[metric].difference == -1.0
        low, high = gain[metric].difference_interval
        assert 0 < low <= high <= 1
        low, high = loss[metric].difference_interval
        assert -1 <= low <= high < 0
        assert gain[metric].p_value == loss[metric].p_value < 0.01


def test_tasks_are_paired_by_their_id_whatever_the_order():
    before, after = samples("+--", ["+-", "--", "--"]), samples("++-", ["++", "+-", "--"])
    assert compare(before, after[::-1], (1, 2), 0) == compare(before, after, (1, 2), 0)


def test_one_sample_a_task_is_mcnemars_and_several_are_permuted():
    once = rows_of(samples("+-", "+-"), samples("+-", "++"), (1,))
    assert once["pass@1"].test == once["greedy"].test == "exact McNemar"
    several = rows_of(samples("+-", ["+-", "--"]), samples("+-", ["++", "+-"]), (1,))
    assert (several["pass@1"].test, several["greedy"].test) == ("paired permutation", "exact McNemar")


def test_fixed_and_regressed_tasks_are_named_the_most_moved_first():
    before = samples("----", ["----", "+---", "++++", "++--"])
    after = samples("----", ["++--", "++++", "+---", "+++-"])
    changes = problem_changes(before, after)
    assert [(change.problem_id, change.before, change.after) for change in changes.fixed] == [
        ("t1", [1, 4], [4, 4]),
        ("t0", [0, 4], [2, 4]),
    ]
    assert [(change.problem_id, change.before, change.after) for change in changes.regressed] == [
        ("t2", [4, 4], [1, 4])
    ]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ("-" * 20, "+" * 20, "greedy: better, +100.0 points (p <0.001, exact McNemar)"),
        (
            "+" + "-" * 19,
            "++" + "-" * 18,
            "greedy: no significant difference, +5.0 points (p 1.000, exact McNemar); this many tasks detect",
        ),
    ],
)
def test_a_verdict_says_what_can_be_said(before, after, verdict):
    (row,) = compare(samples(before), samples(after), (), 0)
    assert row.verdict.startswith(verdict)


@pytest.mark.parametrize(
    ("answers", "usual"),
    [
        (["Yes"] * 9 + ["No"], "Yes"),
        (["Yes"] * 8 + ["No"] * 2, None),
        ([None] * 10, None),  # no answer could be read
        (["Yes"] * 9, None),  # nine tasks may well have the same answer
        ([["Yes"]] * 10, "['Yes']"),  # a file of other tools
    ],
)
def test_one_answer_to_nearly_all_tasks_is_named(answers, usual):
    results = samples("+" * len(answers))
    for result, answer in zip(results, answers, strict=True):
        result |= {} if answer is None else {"extracted": answer}
    assert measure("trained", results, {}, (1,), 0).usual_answer == usual
