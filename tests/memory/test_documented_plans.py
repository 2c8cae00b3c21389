"""The tables of GPUs and models in the documentation, recomputed for stand-ins of the GPUs."""

import runpy

import pytest
from helpers.fresh_imports import RECIPES, ROOT

from lora_grpo.cli.arguments import parse
from lora_grpo.config import LAPTOP_MODEL
from lora_grpo.memory import GIB, KNOWN_MODELS, make_plan

PRESETS = {path.stem: runpy.run_path(str(path))["PRESETS"] for path in RECIPES}
ENGINES = ("--model.engine", "unsloth", "--sampling.backend", "vllm")
LEAST = ("--model.bits", "4", "--train.gradient-checkpointing")
"""The least memory, for which the limits of models are documented."""
LONG = ("--sampling.max-completion-tokens", "1024", "--model.max-sequence-tokens", "1536")

pytestmark = pytest.mark.usefixtures("gpu_packages")


def rows(start):
    """Return the cells of the documentation's table whose first heading is `start`."""
    lines = [line for path in sorted((ROOT / "docs").glob("*.md")) for line in [*path.read_text().splitlines(), ""]]
    first = next(number for number, line in enumerate(lines) if line.startswith(f"| {start} |"))
    table = lines[first + 2 : next(n for n in range(first, len(lines)) if not lines[n].startswith("|"))]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


GPUS = {row[0]: row for row in rows("`nvidia-smi` shows")}
MEMORY = {row[0]: row[1:] for row in rows("GPU")}
MODELS = [[cell.partition("`")[0] for cell in row] for row in rows("preset | `--model.name`")]


def planned(recipe, *flags):
    return make_plan(*parse(["--plan", *ENGINES, *flags], recipe=recipe, description="", presets=PRESETS[recipe]))


@pytest.mark.parametrize("gpu", GPUS)
def test_the_run_on_a_listed_gpu_is_the_documented_one(machine, gpu):
    _, memory, _, _, _, preset, model, micro, share = GPUS[gpu]
    total = int(memory.removesuffix(" MiB").replace(",", ""))
    machine(script=f"echo '0, GPU-0abc, {gpu}, {total}, {total - 500}'")
    config, plan = planned("gsm8k_lora")
    assert (config.preset, config.model.name) == (preset, f"Qwen/{model}")
    assert plan.estimate.fits and plan.estimate.max_num_seqs == 64
    assert plan.estimate.micro_batch_size == int(micro)
    assert plan.estimate.gpu_memory_share == pytest.approx(float(share), abs=0.03)
    phases = [sum(plan.estimate.phases[name].values()) for name in ("sampling", "loss", "backward")]
    assert [float(cell.split()[0]) * GIB for cell in MEMORY[gpu]] == pytest.approx(
        [*phases, plan.estimate.host_bytes], rel=0.02
    )


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


def test_the_table_of_models_has_every_model_of_the_math_recipe():
    of_recipe = PRESETS["gsm8k_lora"]
    presets = {(name, preset["model"]["name"]) for name, preset in of_recipe.items() if name.endswith("gb")}
    assert presets < {tuple(row[:2]) for row in MODELS}
    on_gpu = {name for name in KNOWN_MODELS if "Coder" not in name and name != LAPTOP_MODEL}
    assert {name for _, name, *_ in MODELS} == on_gpu


@pytest.mark.parametrize("row", MODELS, ids=lambda row: " ".join(row[:2]))
def test_a_listed_model_fits_its_gpu_with_the_listed_limits(machine, row):
    preset, name, gigabytes, micro, parallel, share, longest = row
    engine = ("--model.engine", "auto") if "Qwen3.5" in name or "gemma-4" in name else ()
    flags = ("--preset", preset, "--model.name", name, *engine, *LEAST)
    _, plan = planned("gsm8k_lora", *flags)
    assert f"{KNOWN_MODELS[name]['weights_bytes'] / 1e9:.2f} GB" == gigabytes
    assert plan.estimate.fits and plan.estimate.sampler == ("vllm" if engine else "shared")
    assert plan.engine == ("peft" if engine else "unsloth")
    assert (plan.estimate.micro_batch_size, plan.estimate.max_num_seqs) == (int(micro), int(parallel))
    assert plan.estimate.gpu_memory_share == pytest.approx(float(share), abs=0.05)
    assert plan.longest_context == pytest.approx(int(longest.replace(",", "")), rel=0.05)
    # A GPU reports less memory than its name says, and drives a desktop.
    machine(int(0.93 * 1024 * int(preset.removesuffix("gb"))))
    for command in (("code_lora",), ("gsm8k_lora", *LONG)):
        assert planned(*command, *flags)[1].estimate.fits
