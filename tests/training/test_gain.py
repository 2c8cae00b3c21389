"""The default runs measurably improve the model. Each test takes minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def trained(recipe, folder, *arguments):
    """Run a recipe until it is complete, and return its report."""
    resume = ["--resume"] if (ROOT / folder / "run.json").exists() else []
    done = subprocess.run(
        [
            *(sys.executable, f"recipes/{recipe}.py", "--preset", "starter"),
            *("--output-dir", str(folder), *resume, *arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return json.loads((ROOT / folder / "evaluation" / "report.json").read_text())


def raises_accuracy(recipe, folder, *arguments):
    """Run a recipe and check that it gains 30 points on at least 300 evaluation problems."""
    report = trained(recipe, folder, *arguments)
    rows = {row["metric"]: row for row in report["table"]}
    assert report["protocol"]["rows"] >= 300
    assert rows["pass@1"]["difference"] >= 0.30 and rows["pass@1"]["p_value"] < 0.01
    assert rows["greedy"]["difference"] > 0 and rows["greedy"]["p_value"] < 0.01
    record = json.loads((ROOT / folder / "run.json").read_text())
    assert record["peak_memory_gib"] < 3 and record["alarms"] == []


@pytest.mark.slow
def test_the_default_run_gains_30_points():
    # Uses the recipe's own folder, so that the test reuses or resumes a run of `make demo`.
    raises_accuracy("gsm8k_lora", "outputs/gsm8k_lora")


@pytest.mark.slow
def test_the_code_recipe_gains_30_points_in_half_its_steps(tmp_path):
    raises_accuracy("code_lora", tmp_path / "run", "--train.max-steps", "30", "--data.eval-limit", "300")


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_the_own_task_is_learned_in_ten_steps(tmp_path, seed):
    """80 problems x 4 samples before and after a sixth of the default steps, with p < 0.01 on each seed."""
    asked = ("--train.max-steps", "10", "--data.eval-limit", "80", "--eval.k", "1", "--monitor.rows", "0")
    report = trained("your_task", tmp_path / "run", "--seed", str(seed), "--eval.num-samples", "4", *asked)
    rows = {row["metric"]: row for row in report["table"]}
    assert (report["protocol"]["task"], report["protocol"]["rows"]) == ("your_task", 80)
    for metric in ("pass@1", "mean score"):
        assert rows[metric]["difference"] > 0 and rows[metric]["p_value"] < 0.01
