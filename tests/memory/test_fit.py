"""What is worked out from a card's memory, for every preset and for cards of every size."""

import dataclasses
import re
import runpy

import pytest
from helpers.fresh_imports import RECIPES

from lora_grpo.config import RunConfig, check_fields, micro_batches, replace
from lora_grpo.errors import UserError
from lora_grpo.hardware import machine
from lora_grpo.memory import GIB, KNOWN_MODELS, Shape, faster
from lora_grpo.memory.advice import refusal
from lora_grpo.memory.fit import ROOM, USABLE_FRACTION, Device, Planner
from lora_grpo.settings import check


def presets_of(recipe):
    """The GPU presets of a recipe with the least memory: size in GB -> (configuration, shape of its model)."""
    presets = {}
    for name, changes in runpy.run_path(str(recipe))["PRESETS"].items():
        if size := machine.preset_gigabytes(name):
            config = faster.with_least_memory(replace(RunConfig(output_dir="out", preset=name), changes))
            presets[size] = (config, Shape.of(KNOWN_MODELS[config.model.name]))
    return presets


PRESETS = {recipe.stem: presets_of(recipe) for recipe in RECIPES}


def plan_for(shape, config, device, **settings):
    """The chosen batch sizes and their memory, or a UserError as a run raises it."""
    planner = Planner(shape, device, **settings)
    plan = planner.choose(config)
    if plan is None:
        raise UserError(refusal(planner, config))
    return plan


def bytes_of_vllm(plan):
    """What `gpu_memory_utilization` covers; Unsloth's engine also loads the weights that are trained."""
    names = ["kv_cache", "vllm_weights", "vllm_adapter", "vllm_workspace"]
    if plan.sampler == "shared":
        names.append("weights")
    return sum(plan.parts[name] for name in names)


def card(gigabytes, taken=0.3):
    """A card as it reports itself: a little less than its name says, and some of it in use."""
    total = int(0.96 * gigabytes * GIB)
    return Device(f"Card with {gigabytes} GB", total, total - int(taken * GIB))


@pytest.mark.parametrize("sampler", ["transformers", "vllm", "shared"])
@pytest.mark.parametrize(("recipe", "size"), [(recipe, size) for recipe in PRESETS for size in PRESETS[recipe]])
def test_every_preset_fits_its_card_and_no_larger_micro_batch_does(recipe, size, sampler):
    config, shape = PRESETS[recipe][size]
    check(check_fields(config))
    plan = plan_for(shape, config, card(size), sampler=sampler)
    assert plan.needed <= USABLE_FRACTION * card(size).free
    sizes = micro_batches(config)
    assert plan.micro_batch_size in sizes
    larger = [size for size in sizes if size > plan.micro_batch_size]
    if larger:
        assert not Planner(shape, card(size), sampler).memory(config, larger[-1], plan.max_num_seqs).fits
    assert plan.max_num_seqs == sizes[0]  # all of a step's completions at once
    if sampler == "transformers":
        assert plan.gpu_memory_share is None
    else:
        assert plan.gpu_memory_share * card(size).total == pytest.approx(bytes_of_vllm(plan), rel=0.1)
        # vLLM starts only where that much is free beside what the trainer holds.
        assert sum(plan.phases["sampling"].values()) <= card(size).usable


CONFIG, SHAPE = PRESETS["gsm8k_lora"][24]


def test_less_free_memory_means_smaller_numbers():
    numbers = []
    for taken in (0, 8, 12, 14, 15.5):
        plan = plan_for(SHAPE, CONFIG, card(24, taken), sampler="vllm")
        assert plan.fits
        numbers.append((plan.micro_batch_size, plan.max_num_seqs))
    assert numbers == sorted(numbers, reverse=True)
    assert len({micro for micro, _ in numbers}) > 2
    assert len({sequences for _, sequences in numbers}) > 1


def test_a_named_share_is_filled_with_the_cache():
    plan = plan_for(SHAPE, replace(CONFIG, {"model": {"gpu_memory_share": 0.3}}), card(24), sampler="vllm")
    assert plan.gpu_memory_share == 0.3
    assert bytes_of_vllm(plan) == int(0.3 * card(24).total)
    assert plan.max_num_seqs == 64
    tight = plan_for(SHAPE, replace(CONFIG, {"model": {"gpu_memory_share": 0.15}}), card(24), sampler="vllm")
    assert 1 <= tight.max_num_seqs < 64
    with pytest.raises(UserError) as refused:
        plan_for(SHAPE, replace(CONFIG, {"model": {"gpu_memory_share": 0.05}}), card(24), sampler="vllm")
    needed = float(re.match(r"--model.gpu-memory-share 0.05 is too small: .* need ([\d.]+);", str(refused.value))[1])
    for share, is_enough in ((needed, True), (needed - 0.001, False)):
        config = replace(CONFIG, {"model": {"gpu_memory_share": share}})
        assert Planner(SHAPE, card(24), "vllm").smallest(config).fits is is_enough


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_a_step(processes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    plan = plan_for(SHAPE, CONFIG, card(24), sampler="vllm")
    assert 64 // processes % plan.micro_batch_size == 0
    assert plan.max_num_seqs == 64 // processes


def test_unsloth_gets_at_most_16_completions_unless_more_are_asked_for():
    for requested, micro in ((None, 16), (64, 64)):
        config = replace(CONFIG, {"train": {"micro_batch_size": requested}})
        assert plan_for(SHAPE, config, card(24), sampler="shared", unsloth_kernels=True).micro_batch_size == micro


def test_unsloth_scores_completions_without_gradients_only_for_other_policies():
    """The reference of the KL penalty, and the policy before the update if rollouts are used again."""

    def phases(**changes):
        config = replace(CONFIG, changes)
        return plan_for(SHAPE, config, card(24), sampler="shared", unsloth_kernels=True).phases.keys()

    assert "scoring" not in phases()
    assert "scoring" in phases(train={"beta": 0.04})
    assert "scoring" in phases(grpo=("num_iterations=2",))


def test_what_unsloth_moves_to_host_memory_must_fit_there():
    device = card(24)
    plan = plan_for(SHAPE, CONFIG, device, sampler="shared", unsloth_kernels=True)
    inputs = 2 * 16 * CONFIG.model.max_sequence_tokens * SHAPE.hidden
    assert len(SHAPE.layers) * inputs <= plan.host_bytes < 2 * len(SHAPE.layers) * inputs
    assert plan.parts["activations"] < 4 * inputs  # three of them, whatever the number of layers, and a matrix
    less = dataclasses.replace(device, host=plan.host_bytes - 1)
    assert plan_for(SHAPE, CONFIG, less, sampler="shared", unsloth_kernels=True).micro_batch_size == 8
    with pytest.raises(UserError, match=r"needs 0.*GiB of host memory"):
        plan_for(SHAPE, CONFIG, dataclasses.replace(device, host=10**8), sampler="shared", unsloth_kernels=True)
    requested = replace(CONFIG, {"train": {"micro_batch_size": 16}})
    planner = Planner(SHAPE, less, "shared", unsloth_kernels=True)
    assert re.search(r"or pass --train\.micro-batch-size 8 \(needs ", refusal(planner, requested))

    # Without Unsloth, only the weights of a sleeping vLLM leave the GPU.
    sleeping = replace(CONFIG, {"sampling": {"engine_sleep": True}})
    plan = plan_for(SHAPE, sleeping, device, sampler="vllm")
    assert plan.host_bytes == plan.parts["vllm_weights"] + plan.parts["vllm_adapter"]
    assert plan_for(SHAPE, CONFIG, device, sampler="transformers").host_bytes == 0


@pytest.mark.parametrize("sampler", ["vllm", "shared"])
def test_vllm_keeps_its_memory_if_training_fits_beside_it(sampler):
    """Then no phase ends before the engine's memory is counted, and nothing waits in host memory for it."""
    unsloth_kernels = sampler == "shared"
    large = plan_for(SHAPE, CONFIG, card(80), sampler=sampler, unsloth_kernels=unsloth_kernels)
    assert not large.engine_sleeps and large.fits
    engine_parts = {"kv_cache", "vllm_adapter", "vllm_workspace"} | ({"vllm_weights"} if sampler == "vllm" else set())
    assert all(engine_parts <= phase.keys() for phase in large.phases.values())
    if sampler == "vllm":
        assert large.host_bytes == 0

    # On smaller cards it sleeps, and the batches are as large as with an engine that always sleeps.
    sleeping = replace(CONFIG, {"sampling": {"engine_sleep": True}})
    choices = []
    for gigabytes in range(80, 7, -1):
        plan = plan_for(SHAPE, CONFIG, card(gigabytes), sampler=sampler, unsloth_kernels=unsloth_kernels)
        expected = plan_for(SHAPE, sleeping, card(gigabytes), sampler=sampler, unsloth_kernels=unsloth_kernels)
        choices.append(plan.engine_sleeps)
        assert (plan.micro_batch_size, plan.max_num_seqs) == (expected.micro_batch_size, expected.max_num_seqs)
        if plan.engine_sleeps:
            assert plan == expected
        else:
            assert plan.needed + ROOM <= plan.device.usable
    assert not choices[0] and any(choices)


def test_whether_vllm_sleeps_can_be_requested():
    for engine_sleep in (True, False):
        config = replace(CONFIG, {"sampling": {"engine_sleep": engine_sleep}})
        assert plan_for(SHAPE, config, card(80), sampler="vllm").engine_sleeps is engine_sleep

    # If it is requested that vLLM does not sleep, and only this does not fit, the advice is to let it sleep.
    needed = {}
    for engine_sleep in (True, False):
        settings = {"sampling": {"engine_sleep": engine_sleep}, "train": {"micro_batch_size": 16}}
        config = replace(CONFIG, settings)
        needed[engine_sleep] = Planner(SHAPE, card(24), "vllm").smallest(config).needed
    free = int((needed[True] + needed[False]) / 2 / USABLE_FRACTION)
    assert "pass --sampling.engine-sleep (needs " in refusal(Planner(SHAPE, Device("Card", free, free), "vllm"), config)


@pytest.mark.parametrize(("taken", "helps"), [(20, True), (0.3, False)])
def test_closing_other_programs_is_advised_only_if_it_helps(taken, helps):
    config, shape = PRESETS["gsm8k_lora"][24]
    device = card(24 if helps else 4, taken)
    assert (
        "; close other programs that use the GPU, or pass " in refusal(Planner(shape, device, "vllm"), config)
    ) is helps


def test_cuda_graphs_come_on_top_of_vllms_share():
    for sampler in ("vllm", "shared"):
        plan = plan_for(SHAPE, CONFIG, card(24), sampler=sampler, unsloth_kernels=sampler == "shared")
        assert plan.gpu_memory_share * card(24).total == pytest.approx(bytes_of_vllm(plan), rel=0.01)
        assert all(phase["cuda_graphs"] > 0.4 * GIB for phase in plan.phases.values())


def test_a_smaller_evaluation_is_the_first_advice_on_a_cpu():
    config = replace(RunConfig(output_dir="out"), runpy.run_path(str(RECIPES[0]))["PRESETS"]["starter"])
    config = replace(config, {"train": {"micro_batch_size": 1, "prompts_per_step": 1}, "data": {"eval_limit": 400}})
    shape = PRESETS["gsm8k_lora"][8][1]
    step = Planner(shape, Device("this machine", 400 * GIB, 400 * GIB, on_cpu=True), "merged").memory(config, 1, 32)
    device = Device("this machine", 400 * GIB, int(step.needed / USABLE_FRACTION) + GIB, on_cpu=True)
    message = refusal(Planner(shape, device, "merged"), config)
    assert re.search(r"or pass --data\.eval-limit \d+ \(needs ", message), message
