"""Tools that measure and compare: benchmark_step.py, benchmark_result.py, compare_scaling.py; runs that they keep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import benchmark_result
import benchmark_step
import compare_scaling
import kept_runs
import pytest

ROOT = Path(benchmark_step.__file__).parents[1]


def test_a_ratio_compares_the_sides_of_each_round():
    ours = [[{"training": seconds}] for seconds in (1.0, 3.0, 8.0)]
    theirs = [[{"training": seconds}] for seconds in (2.0, 4.0, 8.0)]
    assert benchmark_step.ratio(ours, theirs, "training") == "0.75 (0.50–1.00)"


def test_the_crossing_is_interpolated_between_two_checkpoints(tmp_path, monkeypatch):
    def recipe(tree, command):
        run = Path(command[command.index("--output-dir") + 1])
        for step in (5, 10, 15):
            (run / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
            (run / f"checkpoints/checkpoint-{step}/manifest.json").touch()
        (run / "evaluation").mkdir()
        scores = {"baseline": {"scores": {"pass@1": 0.3}}, "evaluated": {"scores": {"pass@1": 0.93}}}
        (run / "evaluation/report.json").write_text(json.dumps(scores))
        (run / "run.json").write_text(json.dumps({"config": {}}))
        (run / "metrics.jsonl").write_text(15 * (json.dumps({"time/training": 1.5}) + "\n"))
        (tmp_path / "steps.jsonl").write_text(15 * (json.dumps({"step": 2.0, "cpu": 3.0}) + "\n"))

    accuracies = {"checkpoint-5": 0.4, "checkpoint-10": 0.8}
    monkeypatch.setattr(benchmark_result, "execute", recipe)
    monkeypatch.setattr(benchmark_result, "evaluate", lambda checkpoint, *_: accuracies.get(checkpoint.name, 0.9))
    found = benchmark_result.measure(ROOT, tmp_path, "gsm8k_lora", seed=0, goal=0.85, flags=[])
    assert (found["step"], found["training"], found["cpu"]) == pytest.approx((12.5, 25.0, 37.5))
    assert (found["base"], found["trained"], found["passes"]) == (0.3, 0.93, 22.5)


def write_scaling_run(run, passes):
    """Write a finished run. `passes` has whether each row is passed, for each validation pass."""
    (run / "validation").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"status": "complete"}))
    for number, passed in enumerate(passes):
        lines = [
            {"id": str(row), "passed": each, "rewards": {"strict_xml_format": float(number > 1)}}
            for row, each in enumerate(passed)
        ]
        name = f"step-{number * compare_scaling.EVERY:05d}.jsonl"
        (run / "validation" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_scalings_are_compared_with_group_over_rows_and_seeds(tmp_path):
    """Of 20 rows, 5 are passed at first. With `none`, all but one are passed after 8 steps, else after 16."""
    before, after = [row < 5 for row in range(20)], [row < 19 for row in range(20)]
    for name in compare_scaling.SCALINGS:
        for seed in (0, 1):
            passes = [before, after if name == "none" else before, after]
            write_scaling_run(tmp_path / f"gsm8k-{name}-{seed}", passes)
    rows = compare_scaling.table(tmp_path, "gsm8k", [0, 1]).strip().splitlines()
    cells = {row.split(" | ")[0].strip("| "): [each.strip("| ") for each in row.split(" | ")[1:]] for row in rows[2:]}
    assert cells["group"] == ["25.0%", "25.0%", "95.0%", "42.5%", "", "", "16, 16"]
    assert cells["batch"] == [
        "25.0%",
        "25.0%",
        "95.0%",
        "42.5%",
        "+0.0, +0.0; p 1.000",
        "+0.0, +0.0; p 1.000",
        "16, 16",
    ]
    assert cells["none"][3:5] == ["77.5%", "+35.0, +35.0; p <0.001"] and cells["none"][5] == "+0.0, +0.0; p 1.000"


def test_only_a_complete_run_is_kept(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(kept_runs, "execute", lambda _, command: trained.append(command))
    for name, status in (("a", "complete"), ("b", "interrupted")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"status": status}))
    for name in "abc":
        kept_runs.train(tmp_path / name, "gsm8k_lora", "--seed", 1)
    flags = ["--overwrite", "--seed", 1]
    assert trained == [["recipes/gsm8k_lora.py", "--output-dir", tmp_path / name, *flags] for name in "bc"]


@pytest.mark.slow
def test_a_step_of_the_kit_and_of_a_plain_script_are_measured():
    command = [sys.executable, "tools/benchmark_step.py", "--steps", "2", "--rounds", "1", "--workloads", "starter"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    cells = {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows if row[0]}
    for side in ("plain", "now"):
        step, rollouts, training = (float(cells[side][f"{name}, s"]) for name in ("step", "rollouts", "training"))
        assert rollouts > 0 and training > 0 and step == pytest.approx(rollouts + training, abs=0.2)
        assert int(cells[side]["tokens"].replace(",", "")) > 500
    assert "now / plain" in cells
