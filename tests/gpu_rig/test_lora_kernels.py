"""check-gpu's search for the launch settings of vLLM's LoRA kernel calls that kernel as vLLM does."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lora_grpo.gpu_check import tune_kernels
from lora_grpo.hardware import ShrinkShape

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("LORA_GRPO_RIG_PYTHON", ROOT / ".venv-gpu" / "bin" / "python"))
pytestmark = [
    pytest.mark.gpu_rig,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} does not exist: make gpu-rig"),
]


def test_every_candidate_computes_the_product(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [PYTHON, HERE / "lora_kernels.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    timings = json.loads(done.stdout.splitlines()[-1])
    for slices in (1, 3):
        settings = [timing["kernel"] for timing in timings if timing["shape"]["slices"] == slices]
        candidates = list(tune_kernels.candidates(ShrinkShape(slices, 5, 576, 8)))
        assert [(one["block_k"], one["split_k"]) for one in settings] == [(c.block_k, c.split_k) for c in candidates]
        assert len({one["split_k"] for one in settings}) >= 4
