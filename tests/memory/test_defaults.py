"""The defaults of every recipe on named cards: plan and run choose the same, and refuse nothing that works."""

import dataclasses
import functools
import itertools
import json
import re
import runpy
import shlex
import sys
from types import SimpleNamespace

import psutil
import pytest
from helpers.fresh_imports import RECIPES

from lora_grpo.commands import Start, started
from lora_grpo.config import Invocation, replace
from lora_grpo.errors import UserError
from lora_grpo.hardware import nvidia_gpus, save_measured_engine
from lora_grpo.memory import GIB, KNOWN_MODELS, faster, make_plan, show_plan, summary
from lora_grpo.memory.fit import ROOM, USABLE_FRACTION
from lora_grpo.settings import Recipe, settle

MIB = 1024**2
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
ONLY_PEFT = ("Qwen/Qwen3.5-2B", "google/gemma-4-E2B-it")


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


def planned(recipe, *, plan=True, **settings):
    """Return the plan of a recipe as `--plan` makes it, or as a run does."""
    method = "sft" if recipe == "sft_lora" else "grpo"
    invocation = Invocation(plan=plan)
    return make_plan(settle(settings, invocation, Recipe(recipe, PRESETS[recipe], method)), invocation)[1]


def choices(plan):
    return plan.engine, plan.backend, plan.planner.sampler


SINGLE_TURN_AND_CONVERSATION = ("gsm8k_lora", "guess_lora")
SMALL = ("RTX 4060", "RTX 3060", "T4")
BY_DEFAULT = {
    *itertools.product(SINGLE_TURN_AND_CONVERSATION, CARDS, ["gpu"], [None]),
    *itertools.product(SINGLE_TURN_AND_CONVERSATION, SMALL, ["vllm", "none"], [None]),
    *itertools.product(SINGLE_TURN_AND_CONVERSATION, SMALL, ["gpu"], FAMILIES),
}


def cases():
    """Return recipe, card, installed extra and model (None: the recipe's): all, of which few run by default."""
    everything = itertools.product(ON_A_GPU, CARDS, ["gpu", "vllm", "none"], [None, *FAMILIES])
    rest = [pytest.mark.slow, pytest.mark.exhaustive]
    return [pytest.param(*case, marks=[] if case in BY_DEFAULT else rest) for case in everything]


@pytest.mark.parametrize(("recipe", "card", "extra", "model"), cases())
def test_plan_and_run_choose_the_same_and_refuse_nothing_that_works(
    plug_in, install, folder_of, recipe, card, extra, model
):
    plug_in(*CARDS[card])
    install(extra)
    if model is None:
        model = planned(recipe).config.model.name
    folder = folder_of(model)
    try:
        plan = planned(recipe, model={"name": folder})
    except UserError as error:
        assert "does not fit" in str(error)
        for engine, backend in itertools.product(("peft", "unsloth"), ("transformers", "vllm")):
            with pytest.raises(UserError):
                planned(recipe, model={"name": folder, "engine": engine}, sampling={"backend": backend})
        return
    assert plan.estimate.fits
    assert choices(planned(recipe, plan=False, model={"name": folder})) == choices(plan)

    # Unsloth is for single turns. vLLM samples where it is installed, fits, and computes like the trainer.
    needs_peft = recipe in CONVERSATIONS or model in ONLY_PEFT or extra != "gpu"
    needs_transformers = extra == "none" or (card == "T4" and needs_peft)
    if plan.not_fitting:
        assert (plan.engine, plan.backend) == ("peft", "transformers") and not needs_transformers
    else:
        assert plan.engine == ("peft" if needs_peft else "unsloth")
        assert plan.backend == ("transformers" if needs_transformers else "vllm")


def test_the_built_in_sampler_takes_the_place_of_a_vllm_that_does_not_fit(plug_in, install, folder_of, capsys):
    plug_in(*CARDS["RTX 3060"])
    install("gpu")
    folder = folder_of("google/gemma-4-E2B-it")
    plan = planned("gsm8k_lora", model={"name": folder})
    assert choices(plan) == ("peft", "transformers", "transformers")
    show_plan(plan)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("engine ")]
    assert line.endswith("peft with transformers, because peft with vllm does not fit")
    with pytest.raises(
        UserError, match=r"pass .*--sampling\.backend transformers"
    ):  # what is asked for is not replaced
        planned("gsm8k_lora", model={"name": folder}, sampling={"backend": "vllm"})


@pytest.mark.parametrize(
    ("share", "fix"),
    [(0.9, "pass no --model.gpu-memory-share"), (0.01, "0.01 is too small: .* leave the flag out")],
)
def test_vllms_memory_fraction_is_not_left_out_for_the_built_in_sampler(plug_in, install, folder_of, share, fix):
    plug_in(*CARDS["RTX 3060"])
    install("gpu")
    model = {"name": folder_of("Qwen/Qwen2.5-1.5B-Instruct"), "gpu_memory_share": share}
    with pytest.raises(UserError, match=fix):
        planned("gsm8k_lora", model=model)


@pytest.mark.parametrize("is_plan", [True, False])
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"sampling": {"reproducible": True}}, "--sampling.reproducible"),
        ({"sampling": {"engine_sleep": True}}, "--sampling.engine-sleep"),
        ({"sampling": {"engine_sleep": False}}, "--sampling.no-engine-sleep"),
        ({"grpo": ("vllm_importance_sampling_clip_max=2",)}, "--grpo vllm_importance_sampling_clip_max"),
    ],
)
def test_settings_of_vllm_are_refused_where_auto_is_the_built_in_sampler(
    plug_in, install, folder_of, settings, name, is_plan
):
    plug_in(*CARDS["RTX 4090"])
    model = {"name": folder_of("Qwen/Qwen2.5-1.5B-Instruct")}
    install("none")
    with pytest.raises(UserError, match=f"^{name} needs vLLM, .* or pass --sampling.backend vllm$"):
        planned("gsm8k_lora", plan=is_plan, model=model, **settings)


@pytest.mark.parametrize(
    "settings", [{"sampling": {"reproducible": True}}, {"grpo": ("vllm_importance_sampling_mode=token_mask",)}], ids=str
)
def test_settings_of_vllm_keep_vllm(plug_in, install, folder_of, settings):
    plug_in(*CARDS["RTX 3060"])
    install("gpu")
    model = {"name": folder_of("Qwen/Qwen2.5-1.5B-Instruct")}
    assert planned("gsm8k_lora", model=model, **settings).backend == "vllm"


def test_settings_of_vllm_are_not_advised_away(plug_in, install, folder_of):
    plug_in(*CARDS["RTX 3060"])
    install("gpu")
    model = {"name": folder_of("google/gemma-4-E2B-it")}
    with pytest.raises(UserError, match="does not fit on") as error:  # fits with the built-in sampler
        planned("gsm8k_lora", model=model, sampling={"reproducible": True})
    assert "--sampling.backend" not in str(error.value)


@pytest.mark.parametrize("recipe", CONVERSATIONS)
def test_a_measurement_of_check_gpu_does_not_give_conversations_to_unsloth(plug_in, install, folder_of, recipe):
    plug_in(*CARDS["RTX 4090"])
    install("gpu")
    save_measured_engine("unsloth", "vllm", CARDS["RTX 4090"][0])
    folder = folder_of("Qwen/Qwen2.5-3B-Instruct")
    for is_plan in (True, False):
        plan = planned(recipe, plan=is_plan, model={"name": folder})
        assert (choices(plan), plan.measured) == (("peft", "vllm", "vllm"), None)
        assert planned("gsm8k_lora", plan=is_plan, model={"name": folder}).measured.engine == "unsloth"


def test_a_run_that_was_killed_before_it_began_is_planned_as_a_new_one(plug_in, install, folder_of, tmp_path):
    plug_in(*CARDS["RTX 4090"])
    install("gpu")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    settings = {"output_dir": str(folder), "model": {"name": folder_of("Qwen/Qwen2.5-3B-Instruct")}}
    invocation = Invocation(resume=True)
    config = settle(settings, invocation, Recipe("guess_lora", PRESETS["guess_lora"], "grpo"))
    assert choices(make_plan(config, invocation)[1]) == ("peft", "vllm", "vllm")


@pytest.mark.parametrize(
    ("recipe", "settings", "words"),
    [
        ("guess_lora", {"model": {"engine": "unsloth"}}, "--model.engine peft"),
        ("guess_lora", {"data": {"few_shot": 1}}, "--data.few-shot"),
        ("gsm8k_lora", {"model": {"engine": "unsloth"}}, "'lora-grpo[gpu]'"),
        ("gsm8k_lora", {"sampling": {"backend": "vllm"}}, "'lora-grpo[vllm]'"),
    ],
)
@pytest.mark.parametrize("is_plan", [True, False])
def test_a_plan_refuses_what_a_run_refuses(plug_in, install, folder_of, recipe, settings, words, is_plan):
    plug_in(*CARDS["RTX 4090"])
    install("gpu" if recipe == "guess_lora" else "none")
    model = {"name": folder_of("Qwen/Qwen2.5-3B-Instruct"), **settings.get("model", {})}
    with pytest.raises(UserError) as error:
        planned(recipe, plan=is_plan, **{**settings, "model": model})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_evaluation_on_conversations_needs_peft_too(plug_in, install, folder_of):
    plug_in(*CARDS["RTX 4090"])
    install("gpu")
    model = {"name": folder_of("Qwen/Qwen2.5-3B-Instruct")}
    task = str(next(path for path in RECIPES if path.stem == "guess_lora"))
    assert planned("gsm8k_lora", model=model).engine == "unsloth"
    assert planned("gsm8k_lora", model=model, eval={"also": (task,)}).engine == "peft"


def test_a_card_that_cuda_13_has_left_behind_is_told_the_way_that_works(plug_in, install, folder_of, build, capsys):
    plug_in(*V100)
    install("none")
    model = {"name": folder_of("Qwen/Qwen2.5-1.5B-Instruct")}
    planned("gsm8k_lora", model=model)
    assert "compute capability 7.0" in capsys.readouterr().err
    with pytest.raises(UserError, match="make install EXTRA=cuda12"):
        planned("gsm8k_lora", plan=False, model=model)
    build.setattr("lora_grpo.hardware.nvidia._torch_build", lambda: ("2.13.0+cu126", 12))
    assert choices(planned("gsm8k_lora", plan=False, model=model)) == ("peft", "transformers", "transformers")


def test_the_memory_of_a_dgx_spark_is_the_machines_and_is_counted_once(plug_in, install, folder_of, capsys):
    plug_in(*CARDS["GB10"])
    install("gpu")
    folder = folder_of("Qwen/Qwen2.5-3B-Instruct")
    plan = planned("guess_lora", model={"name": folder}, sampling={"engine_sleep": True})
    estimate = plan.estimate
    assert "NVIDIA GB10 with 119 GiB of unified memory" in capsys.readouterr().err
    assert (estimate.device.total, estimate.device.free) == (119 * GIB, 110 * GIB)
    assert estimate.host_bytes > 0 and estimate.host_available == estimate.device.usable - estimate.needed

    # A device in which the GPU's part fits alone, but not with what leaves it.
    free = int((estimate.needed + estimate.host_bytes / 2) / USABLE_FRACTION)
    tight = dataclasses.replace(estimate, device=dataclasses.replace(estimate.device, free=free))
    assert tight.training <= tight.device.usable and not tight.fits
    assert dataclasses.replace(tight, device=dataclasses.replace(tight.device, is_unified=False)).host_fits


def test_what_only_saves_time_leaves_room_beside_what_leaves_a_gpu_that_shares_its_memory(plug_in, install, folder_of):
    plug_in(*CARDS["GB10"])
    install("gpu")
    folder = folder_of("Qwen/Qwen2.5-3B-Instruct")
    plan = planned("guess_lora", model={"name": folder}, sampling={"engine_sleep": True})
    free = int((plan.estimate.needed + plan.estimate.host_bytes + ROOM) / USABLE_FRACTION)
    for bytes_free, has_room in ((free - MIB, False), (free + MIB, True)):
        device = dataclasses.replace(plan.estimate.device, free=bytes_free)
        assert dataclasses.replace(plan.estimate, device=device).leaves(ROOM) is has_room

    # The reason counts it too, whether the memory is too small for it or for the room.
    in_16_bits = replace(plan.config, {"model": {"bits": 16}})
    rejected = plan.planner.smallest_fast(replace(in_16_bits, {"train": {"gradient_checkpointing": False}}))
    for room, words in ((-100 * MIB, " of host memory, "), (ROOM - 100 * MIB, " and 6 GiB to spare, ")):
        free = int((rejected.needed + rejected.host_bytes + room) / USABLE_FRACTION)
        planner = dataclasses.replace(plan.planner, device=dataclasses.replace(device, free=free))
        line = faster.choose(planner, in_16_bits, can_be_16_bits=True).line
        assert line.startswith("16 bits, gradient checkpointing: ") and words in line
        needed, *_, available = (float(number) for number in re.findall(r"([0-9.]+) GiB", line))
        assert needed + (ROOM / GIB if room > 0 else 0) > available


def test_an_alternative_that_the_card_cannot_run_does_not_hide_what_does_not_fit(plug_in, install, folder_of):
    plug_in(*CARDS["T4"])
    install("gpu")
    model = {"name": folder_of("Qwen/Qwen2.5-3B-Instruct"), "max_sequence_tokens": 300_000}
    sampling = {"backend": "vllm", "max_completion_tokens": 290_000}
    with pytest.raises(UserError, match="does not fit on Tesla T4"):  # with Unsloth; PEFT and vLLM exclude each other
        planned("gsm8k_lora", model=model, sampling=sampling)


def test_an_amd_gpu_is_named_with_what_may_work(machine, install, build, tmp_path, capsys):
    install("none")
    (tmp_path / "kfd").touch()
    build.setattr("lora_grpo.hardware.nvidia._AMD_DRIVER", tmp_path / "kfd")
    nvidia_gpus(refresh=True)
    plan = planned("gsm8k_lora")
    assert plan.config.preset == "starter" and plan.engine == "peft"
    [line] = [line for line in capsys.readouterr().err.splitlines() if "AMD" in line]
    for word in ("not supported", "PEFT", "ROCm", "--preset starter"):
        assert word in line
    with pytest.raises(UserError, match="AMD GPU"):
        planned("gsm8k_lora", plan=False, preset="8gb")


def test_several_gpus_are_offered_in_one_line(machine, install, folder_of, monkeypatch, capsys):
    machine(script="\n".join(f"echo '{n}, GPU-{n}, Tesla T4, 15360, 14860, 580.65.06, 7.5'" for n in range(2)))
    install("gpu")
    folder = folder_of("Qwen/Qwen2.5-1.5B-Instruct")

    def in_text(text):
        return [line for line in text.splitlines() if line.startswith("GPUs ") or "torch.distributed.run" in line]

    def lines():
        start = Start("lora-grpo", ("train", "gsm8k", "--plan", "--model.name", folder))
        with started(start):
            plan = planned("gsm8k_lora", model={"name": folder})
            show_plan(plan)
            at_start = "\n".join(summary(plan))
        shown = in_text(capsys.readouterr().out)
        assert in_text(at_start) == shown  # a run says it, too
        return shown

    line, command = lines()
    assert "PEFT" in line and line.endswith("(docs/gpu-reference.md):")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert shlex.split(command) == [*launcher, "-m", "lora_grpo", "train", "gsm8k", "--model.name", folder]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert lines() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lines() == []
