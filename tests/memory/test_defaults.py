"""What the defaults of every recipe come to on named cards: plan and run choose the same, and refuse nothing that works."""

import functools
import json
import runpy
import sys
from types import SimpleNamespace

import psutil
import pytest
from helpers.fresh_imports import RECIPES

from lora_grpo.cli.arguments import parse
from lora_grpo.errors import UserError
from lora_grpo.hardware import nvidia_gpus, save_measured_engine
from lora_grpo.memory import GIB, KNOWN_MODELS, make_plan, show_plan

PRESETS = {path.stem: runpy.run_path(str(path))["PRESETS"] for path in RECIPES}
CONVERSATIONS = ("guess_lora", "sql_lora")
ON_A_GPU = sorted(recipe for recipe, presets in PRESETS.items() if "24gb" in presets)

# As nvidia-smi lists them: name, memory in MiB, driver, compute capability.
CARDS = {
    "RTX 4060": ("NVIDIA GeForce RTX 4060", 8188, "580.65.06", "8.9"),
    "RTX 3060": ("NVIDIA GeForce RTX 3060", 12288, "580.65.06", "8.6"),
    "T4": ("Tesla T4", 15360, "580.65.06", "7.5"),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", 24564, "580.65.06", "8.9"),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", 32607, "580.65.06", "12.0"),
    "A100": ("NVIDIA A100-SXM4-80GB", 81920, "580.65.06", "8.0"),
    "H100": ("NVIDIA H100 80GB HBM3", 81559, "580.65.06", "9.0"),
    "H200": ("NVIDIA H200", 143771, "580.65.06", "9.0"),
    "GB10": ("NVIDIA GB10", "[N/A]", "580.95.05", "12.1"),
}
V100 = ("Tesla V100-SXM2-16GB", 16384, "580.65.06", "7.0")
FAMILIES = (
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3.5-2B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "google/gemma-4-E2B-it",
)
ALL_ENGINES = [(engine, backend) for engine in ("peft", "unsloth") for backend in ("transformers", "vllm")]


@pytest.fixture(autouse=True)
def build(monkeypatch, tmp_path):
    """PyTorch with CUDA 13, on a machine with 119 GiB."""
    monkeypatch.setattr("lora_grpo.hardware.nvidia._torch_build", lambda: ("2.13.0+cu130", 13))
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemTotal: {119 * 1024**2} kB\nMemFree: 1 kB\nMemAvailable: {110 * 1024**2} kB\n")
    monkeypatch.setattr("lora_grpo.hardware.nvidia._MEMORY_OF_MACHINE", memory)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=119 * GIB, available=110 * GIB))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return monkeypatch


@pytest.fixture
def plug_in(machine):
    """Return a function that puts a card of the table into the machine."""

    def put(name, mebibytes, driver, capability):
        free = mebibytes if mebibytes == "[N/A]" else mebibytes - 500
        machine(script=f"echo '0, GPU-0abc, {name}, {mebibytes}, {free}, {driver}, {capability}'")

    return put


@pytest.fixture
def install(packages, monkeypatch):
    """Return a function that installs stand-ins of an extra's engines, and hides the others."""

    def engines(extra):
        versions = {"gpu": {"vllm": "0.27.1", "unsloth": "2026.10.9"}, "none": {}}
        versions["vllm"] = {"vllm": "0.33.0", "vllm_bnb_plugin": "0.0.3"}
        for name in {"vllm", "unsloth"} - versions[extra].keys():
            monkeypatch.setitem(sys.modules, name, None)
        packages(**versions[extra])

    return engines


@pytest.fixture
def folder_of(tmp_path):
    """Return a function that makes the folder of a known model, without weights."""

    @functools.cache
    def folder(name):
        path = tmp_path / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(KNOWN_MODELS[name]))
        (path / "model.safetensors").touch()
        return str(path)

    return folder


def planned(recipe, *flags):
    method = "sft" if recipe == "sft_lora" else "grpo"
    config, invocation = parse(flags, recipe=recipe, description="", presets=PRESETS[recipe], method=method)
    return make_plan(config, invocation)[1]


def model_flags(recipe, model, folder_of):
    """Return the flags for a model, or for the one of the recipe's preset, from a folder."""
    if model is None:
        model = planned(recipe, "--plan").config.model.name
    return ("--model.name", folder_of(model))


def choices(plan):
    return plan.engine, plan.backend, plan.planner.sampler


@pytest.mark.parametrize("recipe", ON_A_GPU)
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("extra", ["gpu", "vllm", "none"])
def test_plan_and_run_choose_the_same_and_refuse_nothing_that_works(
    plug_in, install, folder_of, recipe, card, extra
):
    plug_in(*CARDS[card])
    install(extra)
    for model in (None, *FAMILIES):
        flags = model_flags(recipe, model, folder_of)
        try:
            plan = planned(recipe, "--plan", *flags)
        except UserError as error:
            for engine, backend in ALL_ENGINES:
                with pytest.raises(UserError):
                    planned(recipe, "--plan", *flags, "--model.engine", engine, "--sampling.backend", backend)
            assert "does not fit" in str(error)
            continue
        assert plan.estimate.fits
        assert choices(planned(recipe, *flags)) == choices(plan)

        # Unsloth is for single turns, and vLLM samples wherever it is installed, fits, and computes in 4 bits.
        if recipe in CONVERSATIONS or extra != "gpu":
            assert plan.engine == "peft"
        if extra == "none" or (card == "T4" and plan.engine == "peft"):
            assert plan.backend == "transformers"
        elif not plan.not_fitting:
            assert plan.backend == "vllm"
