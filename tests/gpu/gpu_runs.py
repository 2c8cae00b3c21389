"""How the tests on a GPU run the recipe."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parent.parent.parent / "recipes" / "gsm8k_lora.py"
COIN = "pattern:x77[0-9][0-9][0-9]=1.0"
"""A third of the completions of 64 random words earn it."""
COMBINATIONS = [(engine, backend) for engine in ("peft", "unsloth") for backend in ("transformers", "vllm")]


def skip_without(engine="peft", backend="transformers"):
    """Skip a test whose packages are not installed."""
    needed = ["bitsandbytes"] + ["unsloth"] * (engine == "unsloth") + ["vllm"] * (backend == "vllm")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")


def run_script(script, *arguments):
    """Run a script in a process of its own, without a network."""
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def run_recipe(folder, *arguments):
    """Run the recipe and return its record and its steps."""
    done = run_script(RECIPE, "--output-dir", folder, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "run.json").read_text()), steps
