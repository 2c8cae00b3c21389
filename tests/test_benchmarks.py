"""tools/benchmark_step.py: what a ratio compares, and that both sides are measured."""

import os
import subprocess
import sys
from pathlib import Path

import benchmark_step
import pytest

ROOT = Path(benchmark_step.__file__).parents[1]


def test_a_ratio_compares_the_sides_of_each_round():
    ours = [[{"training": seconds}] for seconds in (1.0, 3.0, 8.0)]
    theirs = [[{"training": seconds}] for seconds in (2.0, 4.0, 8.0)]
    assert benchmark_step.ratio(ours, theirs, "training") == "0.75 (0.50–1.00)"


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
