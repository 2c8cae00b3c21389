"""The logprob check of a run whose rollouts Unsloth's trainer makes, with a whole vLLM engine and with broken ones.

shared_vllm.py says what stands for the engine.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("LORA_GRPO_RIG_PYTHON", ROOT / ".venv-gpu" / "bin" / "python"))
pytestmark = [
    pytest.mark.gpu_rig,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} does not exist: make gpu-rig"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run and its output for each case, and `codes.json`."""
    folder = tmp_path_factory.mktemp("runs")
    command = [PYTHON, HERE / "shared_vllm.py", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def ended(runs, case):
    return json.loads((runs / "codes.json").read_text())[case], (runs / f"{case}.log").read_text()


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("whole", ["difference", "evaluation_difference"]),
        ("stop", ["difference", "evaluation_difference"]),  # with stop strings, which vLLM finds in the text
        ("sft", ["difference"]),
    ],
)
def test_a_whole_engine_passes_and_sleeps_while_the_model_is_trained(runs, case, names):
    """shared_vllm.py asserts that it sleeps before each optimizer step. Validation passes wake it up.

    It also asserts that rollouts come without text, unless they have stop strings.
    """
    code, output = ended(runs, case)
    assert code == 0, output[-4000:]
    record = json.loads((runs / case / "run.json").read_text())
    found = record["logprob_check"]
    assert [name for name in found if "difference" in name] == names
    assert all(found[name] < 1e-5 for name in names) and found["moved"] >= 5 * found["tolerance"]
    assert record["trained_steps"] == 2


@pytest.mark.parametrize(
    ("case", "measured"),
    [
        ("injection", "difference"),  # the trainer's requests come without an adapter
        ("stale", "difference"),  # the engine keeps the first adapter
        ("asleep", "difference"),  # the engine loses adapters in its first sleep with one
        ("evaluation", "evaluation_difference"),  # the engine ignores adapters in files, from which no rollout comes
    ],
)
def test_a_broken_engine_stops_the_run_at_its_start(runs, case, measured):
    code, output = ended(runs, case)
    assert code == 1, output[-4000:]
    last = output.strip().splitlines()[-1]
    assert "as it was before the adapter changed" in last and f"({measured})" in last
    assert not (runs / case / "metrics.jsonl").exists()
