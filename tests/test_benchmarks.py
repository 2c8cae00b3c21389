"""tools/benchmark_step.py and benchmark_accuracy.py: what a ratio compares, and that all sides do the same work."""

import os
import subprocess
import sys
from pathlib import Path

import benchmark_accuracy
import benchmark_step
import pytest

ROOT = Path(benchmark_step.__file__).parents[1]


def test_a_ratio_compares_the_sides_of_each_round():
    ours = [[{"training": seconds}] for seconds in (1.0, 3.0, 8.0)]
    theirs = [[{"training": seconds}] for seconds in (2.0, 4.0, 8.0)]
    assert benchmark_step.ratio(ours, theirs, "training") == "0.75 (0.50–1.00)"


def test_rewards_are_compared_by_step():
    def rounds(*rewards):
        return [[dict.fromkeys(benchmark_step.COLUMNS, 1.0) | {"reward": reward} for reward in (9.0, *rewards)]]

    printed = benchmark_step.table("starter", {"plain": rounds(0.1, 0.5, 0.6), "now": rounds(0.2, 0.6, 0.7)})
    cells = {row.split(" |")[0]: row.split("|")[-2].strip() for row in printed.splitlines() if row}
    assert (cells["| plain"], cells["| now / plain"]) == ("0.400 ± 0.153", "+0.100 ± 0.000")


def test_a_crossing_is_interpolated_and_later_checkpoints_are_not_evaluated():
    def point(step, accuracy):
        return {"step": step, "seconds": 10.0 * step, "cpu": 1.0, "pass@1": accuracy}

    def points():
        yield from (point(5, 0.4), point(10, 0.8))
        raise AssertionError("evaluated")

    crossing = benchmark_accuracy.crossing(points(), 0.7)
    assert crossing == pytest.approx({"step": 8.75, "seconds": 87.5, "cpu": 1.0, "pass@1": 0.8})
    assert benchmark_accuracy.crossing(points(), 0.3) == point(5, 0.4)
    missed = benchmark_accuracy.crossing([point(5, 0.4), point(10, 0.8)], 0.9)
    assert missed["pass@1"] == 0.8 and missed["step"] != missed["step"]
    printed = benchmark_accuracy.table({"plain": [point(8, 0.8), missed], "now": [point(4, 0.8), missed]}, [0, 1])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    assert rows[2] == ["plain", "0", "8.0", "80.0", "1.0", "80.0"] and rows[3][2] == "-"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_sides_continue_from_the_same_adapter(tmp_path):
    sft = ("recipes/sft_lora.py", "--preset", "starter", "--train.max-steps", "10", *benchmark_step.FEW_ROWS)
    benchmark_step.execute(*sft, "--output-dir", str(tmp_path / "sft"))
    command = (*benchmark_step.WORKLOADS["starter"], "--train.max-steps", "1", "--lora.from", str(tmp_path / "sft"))
    steps = {side: benchmark_step.measure(side, ROOT, *command)[0] for side in ("plain", "fast", "now")}
    for name in ("reward", "loss", "grad_norm"):  # both have the same sampler and seeds
        assert steps["fast"][name] == pytest.approx(steps["now"][name], rel=1e-4, abs=1e-5)
    assert all(step["reward"] > 3 for step in steps.values())  # 2.2 to 2.4 with a new adapter


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_step_of_the_kit_and_of_a_plain_script_are_measured():
    command = [sys.executable, "tools/benchmark_step.py", "--steps", "2", "--rounds", "1", "--workloads", "starter"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    cells = {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows if row[0]}
    for side in ("plain", "now"):
        step, rollouts, training = (float(cells[side][f"{name}, s"]) for name in ("step", "rollouts", "training"))
        assert rollouts > 0 and training > 0 and step == pytest.approx(rollouts + training, rel=0.1, abs=0.2)
        assert int(cells[side]["tokens"].replace(",", "")) > 500
        assert float(cells[side]["reward"].partition(" ±")[0]) > 0
    assert "now / plain" in cells
