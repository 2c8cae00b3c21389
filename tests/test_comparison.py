import json

import pytest

from lora_grpo import passk
from lora_grpo.comparison import compare, conclude, print_table, reward_curve
from lora_grpo.config import EvalConfig, RunConfig, SamplingConfig, TrainConfig
from lora_grpo.run_record import Run


def samples(greedy, drawn=None):
    """Samples of tasks t0, t1, ...: `greedy` and each task's `drawn` as strings of + and -."""
    made = []
    for place, verdict in enumerate(greedy):
        draws = [("greedy", verdict), *enumerate(drawn[place] if drawn else "")]
        for draw, passed in draws:
            made.append(
                {
                    "id": f"t{place}",
                    "draw": draw,
                    "completion": "...",
                    "passed": passed == "+",
                    "reason": "correct" if passed == "+" else "wrong_answer",
                    "rules": {"strict": False, "robust": passed == "+"},
                    "num_tokens": 10 if passed == "+" else 20,
                    "truncated": passed != "+",
                }
            )
    return made


def rows_of(before, after, num_samples=0, k=()):
    table = compare(before, after, EvalConfig(num_samples=num_samples, k=k), seed=0)
    return {row["metric"]: row for row in table}


def test_pass_at_k_of_known_samples():
    before = samples("----", ["+---", "----", "----", "++++"])
    after = samples("----", ["++--", "+---", "----", "++++"])
    table = rows_of(before, after, 4, (1, 2, 4))
    assert list(table) == ["pass@1", "pass@2", "pass@4", "greedy"]
    # pass@1 is the share of passing samples; pass@4 of 4 samples is whether any passed.
    assert table["pass@1"]["before"] == pytest.approx((1 + 0 + 0 + 4) / 16)
    assert table["pass@1"]["after"] == pytest.approx((2 + 1 + 0 + 4) / 16)
    assert table["pass@4"]["before"] == pytest.approx(2 / 4)
    assert table["pass@4"]["after"] == pytest.approx(3 / 4)
    # One task with c of 4 correct: 1 - C(4-c, 2) / C(4, 2).
    assert table["pass@2"]["before"] == pytest.approx((1 / 2 + 0 + 0 + 1) / 4)
    assert table["pass@2"]["after"] == pytest.approx((5 / 6 + 1 / 2 + 0 + 1) / 4)


def test_greedy_and_sampled_verdicts_are_kept_apart():
    table = rows_of(samples("++--", ["----"] * 4), samples("+++-", ["++++"] * 4), 4, (1,))
    assert (table["pass@1"]["before"], table["pass@1"]["after"]) == (0.0, 1.0)
    assert (table["greedy"]["before"], table["greedy"]["after"]) == (0.5, 0.75)


def test_the_difference_is_after_less_before():
    worse, better = samples("-" * 10, ["-"] * 10), samples("+" * 10, ["+"] * 10)
    gain, loss = rows_of(worse, better, 1, (1,)), rows_of(better, worse, 1, (1,))
    for metric in ("pass@1", "greedy"):
        assert gain[metric]["difference"] == 1.0
        assert loss[metric]["difference"] == -1.0
        low, high = gain[metric]["difference_interval"]
        assert 0 < low <= high <= 1
        low, high = loss[metric]["difference_interval"]
        assert -1 <= low <= high < 0
        assert gain[metric]["p_value"] == loss[metric]["p_value"] < 0.01


def test_no_change_has_a_p_value_of_1_and_an_interval_around_0():
    same = samples("+-+-", ["+-", "--", "++", "+-"])
    for row in rows_of(same, same, 2, (1, 2)).values():
        assert row["difference"] == 0
        assert row["p_value"] == 1.0
        low, high = row["difference_interval"]
        assert low < 0 < high


def test_more_tasks_that_gained_are_better_evidence():
    few = rows_of(samples("---+"), samples("+--+"))
    many = rows_of(samples("-" * 7 + "+"), samples("+" * 8))
    assert many["greedy"]["p_value"] < few["greedy"]["p_value"] <= 1


def test_tasks_are_paired_by_their_id_whatever_the_order():
    before, after = samples("+--", ["+-", "--", "--"]), samples("++-", ["++", "+-", "--"])
    assert compare(before, after[::-1], EvalConfig(num_samples=2, k=(1, 2)), 0) == compare(
        before, after, EvalConfig(num_samples=2, k=(1, 2)), 0
    )


def test_one_sample_a_task_has_a_wilson_interval():
    table = rows_of(samples("--", "+-"), samples("--", "++"), 1, (1,))
    assert table["pass@1"]["before_interval"] == list(passk.wilson_interval(1, 2))
    assert table["pass@1"]["after_interval"] == list(passk.wilson_interval(2, 2))


def test_without_samples_only_greedy_is_compared():
    assert list(rows_of(samples("+-"), samples("++"), 0, (1, 4))) == ["greedy"]


def test_intervals_hold_their_rate_and_the_table_is_json():
    table = rows_of(samples("+-+", ["+-", "--", "++"]), samples("++-", ["++", "+-", "+-"]), 2, (1, 2))
    for row in table.values():
        for side in ("before", "after"):
            low, high = row[f"{side}_interval"]
            assert 0 <= low <= row[side] <= high <= 1
        assert 0 < row["p_value"] <= 1
    assert json.loads(json.dumps(table, allow_nan=False)) == table


# The end of a run


@pytest.fixture
def run(tmp_path):
    config = RunConfig(
        output_dir=str(tmp_path),
        sampling=SamplingConfig(max_completion_tokens=64),
        train=TrainConfig(max_steps=2),
        eval=EvalConfig(num_samples=2, k=(1, 2)),
    )
    made = Run(tmp_path, config, {"data": {"eval": {"sha256": "bb"}}, "policy": {"base_model": "starter"}})
    made.evaluation.mkdir()
    made.metrics.write_text('{"step": 1, "reward": 0.25}\n{"step": 2, "reward": 1.5}\n')
    return made


@pytest.fixture
def concluded(run, capsys):
    conclude(run, samples("----", ["+-", "--", "--", "--"]), samples("+---", ["++", "+-", "--", "--"]))
    return run, capsys.readouterr().out


def test_the_reward_curve_is_the_first_and_the_last_step(run):
    assert reward_curve(run) == {"first": 0.25, "last": 1.5, "steps": 2}


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
    assert (protocol["rows"], protocol["num_samples"], protocol["data_sha256"]) == (4, 2, "bb")
    assert protocol["policy"] == {"base_model": "starter"}
    assert protocol["max_completion_tokens"] == 64
    base, trained = report["base"], report["trained"]
    assert base["samples"] == trained["samples"] == 4 + 8
    assert base["reasons"] == {"correct": 1, "wrong_answer": 11}
    assert trained["reasons"] == {"correct": 4, "wrong_answer": 8}
    assert trained["rules"] == {"strict": 0.0, "robust": pytest.approx(4 / 12)}
    assert trained["truncated"] == pytest.approx(8 / 12)
    assert trained["mean_tokens"] == pytest.approx((4 * 10 + 8 * 20) / 12)


def test_the_markdown_is_a_table_in_per_cent(concluded):
    run, _ = concluded
    lines = (run.evaluation / "report.md").read_text().splitlines()
    assert lines[0].startswith("starter, 4 held-out problems, 2 samples each at temperature 1")
    table = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in table} == {6}
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in table[2:]}
    assert list(cells) == ["pass@1", "pass@2", "greedy"]
    before, after, difference, p_value = cells["pass@1"]
    assert before.startswith("12.5 [")
    assert after.startswith("37.5 [")
    assert difference.startswith("+25.0 [")
    assert 0 < float(p_value) <= 1
    assert cells["greedy"][0].startswith("0.0 [0.0, ")
    protocol = next(line for line in lines if line.startswith("Protocol: "))
    assert json.loads(protocol.removeprefix("Protocol: `").removesuffix("`"))["rows"] == 4


def test_what_is_printed_says_where_things_are_and_what_to_do_next(concluded):
    run, printed = concluded
    for text in ("pass@1", "37.5", "+25.0", "reward: 0.25 in step 1, 1.50 in step 2", str(run.adapter)):
        assert text in printed
    assert "--resume --train.max-steps 4" in printed
    assert (run.evaluation / "report.md").is_file()


def test_a_loss_is_shown_with_its_sign_and_a_small_p_as_small(capsys):
    table = compare(samples("+" * 20), samples("-" * 20), EvalConfig(num_samples=0), 0)
    print_table(table, {"task": "starter", "rows": 20, "num_samples": 0, "temperature": 1.0})
    printed = capsys.readouterr().out
    assert "-100.0 [" in printed
    assert "<0.001" in printed
