"""The Unsloth engine, with the real package, which `make engines` installs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py")
SHORT = """--model.engine unsloth --train.max-steps 12 --train.prompts-per-step 4 --train.micro-batch-size 32
    --data.eval-limit 20 --eval.num-samples 2 --eval.k 1"""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="unsloth is not installed: make engines"),
]


def test_the_recipe_trains_with_unsloth(tmp_path):
    """Use a new process, because Unsloth patches imported packages, and 12 steps, so that the reward is logged."""
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, RECIPE, *SHORT.split(), "--output-dir", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Unsloth" in done.stdout + done.stderr
    record = json.loads((folder / "run.json").read_text())
    assert record["policy"]["engine"] == "unsloth" and record["versions"]["unsloth"]
    assert record["status"] == "complete"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert all(step["grad_norm"] > 0 for step in steps if step["frac_reward_zero_std"] < 1)

    from safetensors.torch import load_file

    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert saved and all(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)
