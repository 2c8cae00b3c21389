"""What the kit is for: the default runs make the model measurably better. Minutes each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gsm8k_lora", "code_lora"])
def test_the_default_run_raises_accuracy_by_30_points(recipe):
    # In the recipe's own folder: what `make demo` has finished there answers at once, and what it has not goes on.
    folder = ROOT / "outputs" / recipe
    done = subprocess.run(
        [sys.executable, f"recipes/{recipe}.py", "--preset", "starter", "--resume"],
        cwd=ROOT,
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
