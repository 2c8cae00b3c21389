"""What vLLM is started with on seven GPUs, by Unsloth and by the kit's own engine, is what the plan of the run says.

The vLLM is that of the extra gpu, beside Unsloth; for the kit's own engine also that of the extra vllm.

Unsloth's own arithmetic runs, and vLLM's `LLM` is reached and replaced. Not covered: whether vLLM then starts, and how
much memory it takes.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers.gpus import GPUS

from lora_grpo.memory.estimate import GIB, VLLM_WORKSPACE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHONS = {
    "gpu": Path(os.environ.get("LORA_GRPO_RIG_PYTHON", ROOT / ".venv-gpu" / "bin" / "python")),
    "vllm": ROOT / ".venv-vllm" / "bin" / "python",
}
pytestmark = pytest.mark.gpu_rig


@pytest.fixture(scope="module", params=PYTHONS)
def started(request, tmp_path_factory):
    """What `vllm_arguments.py` prints, by GPU and engine."""
    python = PYTHONS[request.param]
    if not python.exists():
        pytest.skip(f"{python} does not exist: make {request.param}-rig")
    folder = tmp_path_factory.mktemp("vllm")
    command = [python, HERE / "vllm_arguments.py", json.dumps(GPUS), folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    started = {(line["gpu"], line["engine"]): line for line in lines}
    assert ("WSL2", "peft") in started
    assert (("WSL2", "unsloth") in started) == (request.param == "gpu")
    return started


def line_of(started, gpu, engine):
    if (gpu, engine) not in started:
        pytest.skip("the extra vllm has no Unsloth")
    return started[gpu, engine]


@pytest.mark.parametrize("engine", ["unsloth", "peft"])
@pytest.mark.parametrize(("gpu", "capability"), [(gpu, capability) for gpu, *_, capability in GPUS])
def test_vllm_gets_what_the_plan_says(started, gpu, capability, engine):
    line = line_of(started, gpu, engine)
    config, plan, vllm = (line[name] for name in ("config", "plan", "vllm"))
    assert line["unknown"] == []  # every argument exists in this version
    assert plan["gpu"] == gpu
    assert plan["max_num_seqs"] == 64 == vllm["max_num_seqs"]  # all completions of a step
    assert vllm["gpu_memory_utilization"] == pytest.approx(plan["gpu_memory_share"])
    assert vllm["max_model_len"] == config["model"]["max_sequence_tokens"]
    assert vllm["dtype"].removeprefix("torch.") == ("float16" if capability == "7.5" else "bfloat16")
    in_4_bits = config["model"]["bits"] == 4
    assert (vllm.get("quantization") == "bitsandbytes") is line["quantizes"] is in_4_bits
    assert vllm["max_lora_rank"] == config["lora"]["rank"] and vllm["max_loras"] == 1
    assert vllm["logprobs_mode"] == "processed_logprobs"
    assert vllm["enable_lora"] and vllm["enable_prefix_caching"]
    assert vllm["enable_sleep_mode"] is plan["engine_sleeps"] is config["sampling"]["engine_sleep"]
    largest_gpu = GPUS[-1][0]
    if engine == "unsloth" and gpu == largest_gpu:
        assert not plan["engine_sleeps"]  # everything fits at once


def test_vllm_loads_the_commit_of_the_revision(started):
    """Unsloth passes no revision to vLLM."""
    for (gpu, engine), line in started.items():
        if gpu != "WSL2":
            name, commit = line["config"]["model"]["name"], line["config"]["model"]["revision"]
            vllm, folder = line["vllm"], f"hub/models--{name.replace('/', '--')}/snapshots/{commit}"
            is_commit = vllm["model"].endswith(folder) or (vllm["model"], vllm["revision"]) == (name, commit)
            assert is_commit, (gpu, engine, vllm["model"])


@pytest.mark.parametrize("gpu", [gpu for gpu, *_ in GPUS])
def test_unsloth_expects_room_for_the_planned_cache(started, gpu):
    """It expects a little more, because it does not count vLLM's activations."""
    line = line_of(started, gpu, "unsloth")
    planned = line["plan"]["planned_gib"]["kv_cache"]
    assert 0.95 * line["kv_cache_gib"] >= planned  # Unsloth keeps 5% in reserve
    assert line["kv_cache_gib"] - planned < VLLM_WORKSPACE / GIB


@pytest.mark.parametrize("engine", ["unsloth", "peft"])
@pytest.mark.parametrize("gpu", [gpu for gpu, *_ in GPUS])
def test_flashinfer_is_off(started, gpu, engine):
    """With its sampler, vLLM 0.27 does not start below compute capability 8.0; with its autotuner, not from 9.0."""
    line = line_of(started, gpu, engine)
    assert line["flashinfer_sampler"] is False and line["has_flashinfer"] is False


@pytest.mark.parametrize("engine", ["unsloth", "peft"])
def test_memory_is_pinned_on_wsl(started, engine):
    """Otherwise vLLM ends with "UVA is not available"; vLLM's default on WSL2 is not to pin."""
    assert line_of(started, "WSL2", engine)["pins_memory"]
