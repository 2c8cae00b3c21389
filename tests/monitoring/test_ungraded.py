"""Rewards that return None, and agents that fail: their rows have no gradient and are left out of means."""

import json
import statistics

import pytest
from helpers.tiny_runs import run_tiny

from lora_grpo.cli import verbs
from lora_grpo.monitoring.alarms import Alarms
from lora_grpo.monitoring.monitor import Monitor
from lora_grpo.progress import Progress
from lora_grpo.runs import read_metrics

# In validation, the rows with even numbers are graded, or none at all in the pass after step 2.
# In training, no row of the second step is graded, of the third only the first group, and all rows of the others.
REWARDS = """
def mine(completions, id, trainer_state, **columns):
    step = trainer_state.global_step
    if len(completions) == 16:
        keeps = [step != 2 and int(name.rpartition("/")[2]) % 2 == 0 for name in id]
    else:
        keeps = {1: [False] * 8, 2: [True] * 4 + [False] * 4}.get(step, [True] * 8)
    values = [float(number % 3) for number, _ in enumerate(completions)]
    if len(completions) == 16:
        values = [value + step for value in values]
    return [value if keep else None for value, keep in zip(values, keeps)]

def never(completions, **columns):
    return [None for _ in completions]

def also(completions, id, **columns):
    return [None if number % 2 else 1.0 for number, _ in enumerate(completions)]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_and_passes_without_graded_rows_are_left_out(tmp_path, file, capsys):
    run, _ = run_tiny(
        tmp_path / "out",
        validates=True,
        rewards=(f"{file}:mine",),
        data={"task": "starter", "train_limit": 200, "eval_limit": 4},
        monitor={"rows": 16, "every_steps": 1},
        train={"max_steps": 4, "completions_steps": 1},
    )
    first, second, third, fourth = read_metrics(run.folder)
    assert first["reward"] == fourth["reward"] == pytest.approx(7 / 8) and "completions/ungraded_ratio" not in first
    assert (second["reward"], second["completions/ungraded_ratio"], second["grad_norm"]) == (None, 1.0, 0.0)
    assert (third["reward"], third["completions/ungraded_ratio"]) == (pytest.approx(3 / 4), 0.5)
    rewards = [line["reward"] for line in lines(run.completions / "step-00003.jsonl")]
    assert rewards == [0.0, 1.0, 2.0, 0.0, None, None, None, None]

    for number, step in enumerate((first, second, third, fourth), start=1):
        graded = [line["reward"] for line in lines(run.validation / f"step-{number:05d}.jsonl")]
        values = [value for value in graded if value is not None]
        assert step.get("validation/reward") == (statistics.fmean(values) if values else None)
        assert step.get("validation/ungraded_ratio", 0.0) == graded.count(None) / 16
        assert "validation/accuracy" in step
    assert second["validation/ungraded_ratio"] == 1.0 and run.record["best"]["step"] == 4
    err = capsys.readouterr().err
    assert err.count("of 8 completions") == 1 and err.count("validation rows") == 1
    assert verbs.run_front_door(["report", str(run.folder)]) == 0


def test_one_of_two_rewards_may_return_none(tmp_path, file):
    run, _ = run_tiny(
        tmp_path / "out", rewards=(f"{file}:also=2", "near_length:60"), train={"max_steps": 1, "completions_steps": 1}
    )
    [step] = read_metrics(run.folder)
    values = [(line["rewards"], line["reward"]) for line in lines(run.completions / "step-00001.jsonl")]
    assert [rewards["also"] for rewards, _ in values] == [1.0, None] * 4
    assert all(reward == 2 * (rewards["also"] or 0) + rewards["near_length"] for rewards, reward in values)
    assert step["reward"] == pytest.approx(statistics.fmean(reward for _, reward in values))
    assert "completions/ungraded_ratio" not in step and step["rewards/also/mean"] == 1.0


def test_a_run_whose_rows_are_never_graded_ends_with_its_evaluation(tmp_path, file, capsys):
    arguments = ["--rewards", f"{file}:never", "--train.max-steps", "2", "--train.prompts-per-step", "2"]
    arguments += ["--sampling.num-generations", "4", "--sampling.max-completion-tokens", "16", "--data.eval-limit", "4"]
    arguments += [
        "--monitor.rows",
        "0",
        "--train.micro-batch-size",
        "8",
        "--data.task",
        "starter",
        "--data.train-limit",
        "8",
        "--eval.num-samples",
        "1",
        "--eval.k",
        "1",
    ]
    with pytest.raises(SystemExit) as ended:
        verbs.run_front_door(["train", "gsm8k", *arguments, "--output-dir", str(tmp_path / "out")])
    shown = capsys.readouterr()
    assert not ended.value.code, shown.err
    assert "reward: none" in shown.out


def validation_lines(results):
    """Return the lines of a validation pass: + is a right answer, - a wrong one, and x a failed agent."""
    made = []
    for number, result in enumerate(results):
        line = {"id": str(number), "reward": float(result == "+"), "passed": result == "+"}
        made.append({**line, "reward": None, "failure": "KeyError: 1"} if result == "x" else line)
    return made


def test_a_failed_agent_is_no_wrong_answer_of_a_validation_pass():
    monitor = Monitor(None, None, None, Alarms(1.0), None, None, None, None)
    assert monitor._record_pass(0, validation_lines("+" * 20 + "-" * 20)) == []
    # The reward rises because failed rows have none. No answer became wrong.
    assert monitor._record_pass(10, validation_lines("x" * 12 + "+" * 8 + "-" * 10 + "x" * 10)) == []
    assert monitor._last["accuracy"] == pytest.approx(8 / 18)
    assert monitor._record_pass(20, validation_lines("x" * 12 + "+" * 8 + "-" * 2 + "x" * 18)) == []
    assert (monitor._last["accuracy"], monitor._best["step"]) == (0.8, 20)
    assert monitor._record_pass(30, validation_lines("x" * 40)) == []
    assert monitor._last == {"step": 30}


@pytest.mark.parametrize(
    ("mean", "spread", "shown"),
    [(None, None, "no reward"), (0.5, None, "reward 0.50"), (0.5, 0.1, "reward 0.50 ± 0.10")],
)
def test_progress_shows_what_was_graded(capsys, mean, spread, shown):
    Progress(1).step(1, {"reward": mean, "reward_std": spread, "loss": 0.0})
    assert capsys.readouterr().err == f"GRPO 1/1  {shown}\n"
