import sys

import pytest

from lora_grpo.cli import parse
from lora_grpo.config import RunConfig, replace, starter_preset
from lora_grpo.errors import UserError
from lora_grpo.hardware import check_vllm_quantizes, choose_preset, nvidia_gpus, uses_vllm, vllm_extra
from lora_grpo.memory import make_plan
from lora_grpo.models import check_engines

PRESETS = ("starter", "8gb", "12gb", "16gb", "24gb")


def refusal(wanted):
    with pytest.raises(UserError) as error:
        choose_preset(wanted, PRESETS)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("mebibytes", "preset"),
    [
        (6144, "starter"),
        (8188, "8gb"),
        (12288, "12gb"),
        (15360, "16gb"),  # Tesla T4
        (24564, "24gb"),
        (81559, "24gb"),
    ],
)
def test_auto_takes_the_largest_preset_that_fits(machine, mebibytes, preset):
    machine(mebibytes)
    chosen, why = choose_preset("auto", PRESETS)
    assert chosen == preset
    assert f"preset {preset}" in why
    assert f"Card 0 with {mebibytes / 1024:.0f} GiB" in why


@pytest.mark.parametrize("mebibytes", [(), (6144,)])
def test_a_recipe_for_gpus_alone_is_refused_on_other_machines(machine, mebibytes):
    machine(*mebibytes)
    with pytest.raises(UserError, match="needs a"):
        choose_preset("auto", ("8gb", "16gb"))


def test_auto_without_a_gpu_is_the_starter(machine):
    preset, why = choose_preset("auto", PRESETS)
    assert preset == "starter" and "no NVIDIA GPU (nvidia-smi is not on the PATH; " in why


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", "nvidia-smi failed: NVIDIA-SMI has failed"),
        ("exit 3", "nvidia-smi failed: exit code 3"),
        ("true", "nvidia-smi lists no GPU"),
        ("echo 'warning, of, some, kind, or other'", "nvidia-smi lists no GPU"),
    ],
)
def test_a_tool_that_fails_is_quoted(machine, script, reason):
    machine(script=script)
    preset, why = choose_preset("auto", PRESETS)
    assert preset == "starter"
    assert reason in why
    assert "\n" not in why
    assert reason in refusal("16gb")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["Card 0", "Card 1"]),
        ("1", ["Card 1"]),
        ("1,0", ["Card 1", "Card 0"]),
        ("GPU-1a", ["Card 1"]),
        ("0,7,1", ["Card 0"]),
        ("7", []),
        ("MIG-12", ["Card 0", "Card 1"]),
    ],
)
def test_the_gpus_are_those_that_cuda_sees_in_its_order(machine, monkeypatch, visible, names):
    machine(8188, 24564)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, why = nvidia_gpus()
    assert [gpu.name for gpu in gpus] == names
    assert bool(why) == (not names)


@pytest.mark.parametrize(
    ("answer", "driver", "capability"),
    [("550.54.14, 12.0", "550.54.14", (12, 0)), ("[N/A], [N/A]", "[N/A]", None), ("", "", None)],
)
def test_a_gpu_has_its_driver_and_compute_capability(machine, answer, driver, capability):
    machine(script=f"case $1 in *driver_version,compute_cap) echo '0, GPU-1, Card, 8188, 8000, {answer}';; esac")
    [gpu], _ = nvidia_gpus()
    assert (gpu.driver, gpu.compute_capability, gpu.free_gib) == (driver, capability, 8000 / 1024)


def test_a_preset_asked_for_is_taken_where_it_fits(machine):
    machine(24564)
    assert choose_preset("8gb", PRESETS) == ("8gb", "preset 8gb (requested) on Card 0 with 24 GiB")
    assert choose_preset("24gb", PRESETS)[0] == "24gb"


def test_a_preset_too_large_for_the_card_offers_one_that_fits(machine):
    machine(12288)
    message = refusal("24gb")
    assert "preset 24gb needs a GPU with 24 GB, got Card 0 with 12 GiB; pass --preset 12gb" in message
    machine(2048)
    assert refusal("8gb").endswith("pass --preset starter")


@pytest.mark.parametrize(
    ("capability", "engine", "bits", "samples"),
    [
        ("7.5", "peft", 4, False),  # vLLM would compute in bfloat16
        ("7.5", "peft", 16, True),
        ("7.5", "unsloth", 4, True),  # which has vLLM compute in float16
        ("8.0", "peft", 4, True),
        ("[N/A]", "peft", 4, True),
    ],
)
def test_vllm_samples_where_it_computes_in_the_dtype_of_the_trainer(
    machine, gpu_packages, capability, engine, bits, samples
):
    machine(script=f"echo '0, GPU-1, Card, 15360, 15000, 580.65.06, {capability}'")
    assert uses_vllm(replace(RunConfig(), {"model": {"engine": engine, "bits": bits}})) is samples
    flags = ["--plan", "--sampling.backend", "vllm", "--model.engine", engine, "--model.bits", str(bits)]
    names = {"recipe": "r", "description": "", "presets": {"starter": starter_preset()}}
    config, invocation = parse(flags, **names)
    if samples:
        assert make_plan(config, invocation)[1].backend == "vllm"
    else:
        with pytest.raises(UserError, match=r"pass --sampling\.backend transformers or --model\.bits 16"):
            make_plan(config, invocation)


@pytest.mark.parametrize(
    ("versions", "bits", "refused"),
    [
        ({"vllm": "0.28.0"}, 4, True),
        ({"vllm": "0.33.1rc1"}, 4, True),
        ({"vllm": "0.28.0"}, 16, False),
        ({"vllm": "0.28.0", "vllm_bnb_plugin": "0.0.3"}, 4, False),
        ({"vllm": "0.27.1"}, 4, False),
    ],
)
def test_a_vllm_that_cannot_load_4_bits_is_refused_before_a_run(
    machine, packages, monkeypatch, versions, bits, refused
):
    machine(16_376)
    if "vllm_bnb_plugin" not in versions:
        monkeypatch.setitem(sys.modules, "vllm_bnb_plugin", None)
    packages(**versions)
    config = replace(RunConfig(), {"model": {"engine": "peft", "bits": bits}, "sampling": {"backend": "vllm"}})
    if refused:
        with pytest.raises(UserError, match=r"vllm-bnb-plugin.*select the transformers backend$"):
            check_engines(config)
        with pytest.raises(UserError, match=r"pip install .*vllm-bnb-plugin"):
            check_vllm_quantizes()
    else:
        check_engines(config)


def test_beside_unsloth_its_own_vllm_is_named(packages, monkeypatch):
    monkeypatch.setitem(sys.modules, "unsloth", None)
    assert vllm_extra() == "vllm"
    monkeypatch.delitem(sys.modules, "unsloth")
    packages(unsloth="2026.10.9")
    assert vllm_extra() == "gpu"
