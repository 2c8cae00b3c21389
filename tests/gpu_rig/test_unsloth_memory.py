"""What Unsloth allocates in a training step on seven GPUs is what the plan says. unsloth_memory.py counts it.

Not covered: the CUDA context, fragmentation, workspaces and vLLM's CUDA graphs, which are estimates.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers.gpus import GPUS

from lora_grpo.memory import GIB

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("LORA_GRPO_RIG_PYTHON", ROOT / ".venv-gpu" / "bin" / "python"))
pytestmark = [
    pytest.mark.gpu_rig,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} does not exist: make gpu-rig"),
]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """What `unsloth_memory.py` prints, by GPU."""
    folder = tmp_path_factory.mktemp("memory")
    command = [PYTHON, HERE / "unsloth_memory.py", json.dumps(GPUS), folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["gpu"]: line for line in lines}


@pytest.mark.parametrize("gpu", [gpu for gpu, *_ in GPUS])
def test_a_step_takes_what_the_plan_says(counted, gpu):
    line = counted[gpu]
    for name in ("scoring", "loss", "backward", "host"):
        assert line["planned"][name] == pytest.approx(line["counted"][name], rel=0.1), name


@pytest.mark.parametrize("gpu", [gpu for gpu, *_ in GPUS])
def test_the_documented_bytes_are_those_counted(counted, gpu):
    lines = (ROOT / "docs" / "gpu-reference.md").read_text().splitlines()
    [cells] = [re.findall(r"\(([\d.]+)\)", line) for line in lines if line.startswith(f"| {gpu} |") and "(" in line]
    found = [(counted[gpu]["fixed"] + counted[gpu]["counted"][name]) / GIB for name in ("loss", "backward")]
    assert [*map(float, cells)] == pytest.approx([*found, counted[gpu]["counted"]["host"] / GIB], abs=0.02)
