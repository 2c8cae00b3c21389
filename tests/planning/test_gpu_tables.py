"""The tables of GPUs in the documentation, recomputed for stand-ins of the GPUs."""

import re
import runpy

import pytest
from helpers.fresh_imports import RECIPES, ROOT, run

from lora_grpo.cli.arguments import parse
from lora_grpo.planning import make_plan

PRESETS = {path.stem: runpy.run_path(str(path))["PRESETS"] for path in RECIPES}
ENGINES = ("--model.engine", "unsloth", "--sampling.backend", "vllm")


def rows(document, start):
    """Return the cells of the table whose first heading is `start`."""
    lines = (ROOT / "docs" / document).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"| {start} |"))
    table = lines[first + 2 : next(n for n in range(first, len(lines)) if not lines[n].startswith("|"))]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


GPUS = {row[0]: row for row in rows("gpu.md", "`nvidia-smi` shows")}
HOURS = rows("decisions/0018-hyperparameters.md", "model")
HOURS_ON = ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3")


def planned(machine, gpu, recipe, *flags):
    total = int(GPUS[gpu][1].removesuffix(" MiB").replace(",", ""))
    machine(script=f"echo '0, GPU-0abc, {gpu}, {total}, {total - 500}'")
    return make_plan(*parse(["--plan", *ENGINES, *flags], recipe=recipe, description="", presets=PRESETS[recipe]))


def check_hours(plan, text):
    listed = [float(number) for number in re.findall(r"[\d.]+", text.replace("under", "0 to"))]
    assert len(listed) == 2
    for seconds, hours in zip(plan.duration.training, listed, strict=True):
        assert seconds / 3600 == pytest.approx(hours, rel=0.1, abs=0.06)


@pytest.mark.parametrize("gpu", GPUS)
def test_the_run_on_a_listed_gpu_is_the_documented_one(machine, gpu):
    *_, preset, model, micro, share, hours = GPUS[gpu]
    config, plan = planned(machine, gpu, "gsm8k_lora")
    assert (config.preset, config.model.name) == (preset, f"Qwen/{model}")
    assert plan.fit.fits and plan.fit.max_num_seqs == 64
    assert plan.fit.micro_batch_size == int(micro)
    assert plan.fit.gpu_memory_share == pytest.approx(float(share), abs=0.03)
    check_hours(plan, hours)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_listed_gpu_computes_in_the_documented_numbers(monkeypatch, gpu):
    import torch

    from lora_grpo.models import base_model

    major, minor = map(int, GPUS[gpu][2].split("."))
    properties = type("Properties", (), {"major": major, "minor": minor})()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    assert base_model.compute_dtype() == getattr(torch, GPUS[gpu][3])


@pytest.mark.engines
def test_vllm_takes_the_documented_attention():
    pytest.importorskip("vllm")
    code = (
        "import sys\n"
        "from vllm.platforms.interface import DeviceCapability\n"
        "from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend\n"
        "from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend\n"
        "for text in sys.argv[1:]:\n"
        "    capability = DeviceCapability(*map(int, text.split('.')))\n"
        "    assert TritonAttentionBackend.supports_compute_capability(capability)\n"
        "    print('FlashAttention' if FlashAttentionBackend.supports_compute_capability(capability) else 'Triton')\n"
    )
    result = run(code, *(row[2] for row in GPUS.values()))
    assert result.stdout.splitlines()[-len(GPUS) :] == [row[4] for row in GPUS.values()], result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("row", HOURS, ids=lambda row: row[0])
def test_the_documented_hours_are_those_of_the_plan(machine, row):
    model, *hours = row
    recipe = "code_lora" if "Coder" in model else "gsm8k_lora"
    for gpu, text in zip(HOURS_ON, hours, strict=True):
        _, plan = planned(machine, gpu, recipe, "--model.name", model)
        assert plan.fit.fits
        check_hours(plan, text)
