"""What the kit is for: the default runs make the model measurably better. Minutes a seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "seed"), [("gsm8k_lora", 1), ("code_lora", 0)])
def test_the_default_run_raises_accuracy_by_30_points(tmp_path, recipe, seed):
    folder = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, str(RECIPES / f"{recipe}.py"), "--preset", "starter"),
            *("--seed", str(seed), "--output-dir", str(folder)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "evaluation" / "report.json").read_text())
    rows = {row["metric"]: row for row in report["table"]}
    assert report["protocol"]["rows"] >= 300
    assert rows["pass@1"]["difference"] >= 0.30 and rows["pass@1"]["p_value"] < 0.01
    assert rows["greedy"]["difference"] > 0 and rows["greedy"]["p_value"] < 0.01
    assert json.loads((folder / "run.json").read_text())["peak_memory_gib"] < 3
