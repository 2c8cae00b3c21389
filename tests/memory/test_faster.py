"""Where memory is used to save time: a base in 16 bits and no gradient checkpointing, on named cards."""

import re

import pytest

from lora_grpo.config import RunConfig, gpu_preset, replace
from lora_grpo.memory import GIB, KNOWN_MODELS, Shape, faster
from lora_grpo.memory.fit import BUSY_MICRO_BATCH, ROOM, Device, Planner

MIB = 1024**2
CARDS = {
    "RTX 4060": 8188, "RTX 3060": 12288, "Tesla T4": 15360, "RTX 4080": 16376, "RTX 4090": 24564, "RTX 5090": 32607,
    "A100": 40960, "H100": 81559, "H200": 143771,
}  # fmt: skip
"""MiB by card, of which 500 are in use."""
ENGINES = {
    "unsloth + vllm": {"sampler": "shared", "unsloth_kernels": True},
    "peft + vllm": {"sampler": "vllm", "packs": True},
    "peft": {"sampler": "transformers", "packs": True},
}
LEAST = (4, True)
IN_16_BITS = (16, True)
FASTEST = (16, False)


def config_of(name, /, **changes):
    return replace(replace(RunConfig(output_dir="out"), gpu_preset(f"Qwen/{name}")), changes)


def planner_for(card, model, engine, host=None, *, is_unified=False):
    total = CARDS[card] * MIB
    device = Device(card, total, total - 500 * MIB, host=host, is_unified=is_unified)
    return Planner(Shape.of(KNOWN_MODELS[f"Qwen/{model}"]), device, **ENGINES[engine])


def chosen(choice):
    return choice.config.model.bits, choice.config.train.gradient_checkpointing


@pytest.mark.parametrize(
    ("card", "model", "engine", "expected", "reason"),
    [
        ("RTX 4060", "Qwen2.5-0.5B-Instruct", "unsloth + vllm", LEAST, "16 bits, gradient checkpointing would need"),
        ("RTX 3060", "Qwen2.5-0.5B-Instruct", "unsloth + vllm", IN_16_BITS, "16 bits, no gradient checkpointing would"),
        ("RTX 3060", "Qwen2.5-1.5B-Instruct", "unsloth + vllm", LEAST, "16 bits, gradient checkpointing would need"),
        ("Tesla T4", "Qwen2.5-1.5B-Instruct", "unsloth + vllm", IN_16_BITS, "16 bits, no gradient checkpointing would"),
        ("RTX 4080", "Qwen2.5-1.5B-Instruct", "peft + vllm", LEAST, "16 bits, gradient checkpointing would need"),
        ("RTX 4090", "Qwen2.5-3B-Instruct", "unsloth + vllm", IN_16_BITS, "16 bits, no gradient checkpointing would"),
        ("RTX 4090", "Qwen2.5-3B-Instruct", "peft + vllm", LEAST, "16 bits, gradient checkpointing would need"),
        ("RTX 5090", "Qwen2.5-3B-Instruct", "peft + vllm", IN_16_BITS, "16 bits, no gradient checkpointing would"),
        ("H100", "Qwen2.5-3B-Instruct", "unsloth + vllm", FASTEST, "the fastest, "),
        ("H200", "Qwen2.5-3B-Instruct", "peft", FASTEST, "the fastest, "),
    ],
)
def test_what_a_card_gets_and_why(card, model, engine, expected, reason):
    planner = planner_for(card, model, engine)
    choice = faster.choose(planner, config_of(model), can_be_16_bits=True)
    assert chosen(choice) == expected
    name, _, why = choice.line.partition(": ")
    checkpointing = "gradient checkpointing" if expected[1] else "no gradient checkpointing"
    assert name == f"{expected[0]} bits, {checkpointing}"
    assert why.startswith(reason) and why.endswith(f"{planner.device.usable / GIB:.2f} GiB are usable")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("card", CARDS)
def test_no_choice_exceeds_its_card_and_what_only_saves_time_leaves_room(card, engine):
    for name in KNOWN_MODELS:
        planner = planner_for(card, name.removeprefix("Qwen/"), engine) if name.startswith("Qwen/Qwen2.5") else None
        if planner is None:
            continue
        config = config_of(name.removeprefix("Qwen/"))
        choice = faster.choose(planner, config, can_be_16_bits=True)
        if choice.estimate is None:
            assert planner.choose(faster.with_least_memory(config)) is None
            continue
        assert choice.estimate.needed <= planner.device.usable
        if chosen(choice) != LEAST:
            assert choice.estimate.needed + ROOM <= planner.device.usable
            assert choice.estimate.micro_batch_size >= BUSY_MICRO_BATCH
            assert choice.estimate.max_num_seqs == 64


@pytest.mark.parametrize("bits", ["auto", 4, 16])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_what_the_user_has_set_stays(bits, checkpointing):
    planner = planner_for("H200", "Qwen2.5-1.5B-Instruct", "peft")
    changes = {"model": {"bits": bits}, "train": {"gradient_checkpointing": checkpointing}}
    choice = faster.choose(planner, config_of("Qwen2.5-1.5B-Instruct", **changes), can_be_16_bits=True)
    assert chosen(choice) == (16 if bits == "auto" else bits, bool(checkpointing))
    assert choice.line.endswith(", as set") is (bits != "auto" and checkpointing is not None)


def test_a_quantized_checkpoint_stays_in_4_bits():
    planner = planner_for("H200", "Qwen2.5-1.5B-Instruct", "peft")
    choice = faster.choose(planner, config_of("Qwen2.5-1.5B-Instruct"), can_be_16_bits=False)
    assert chosen(choice) == (4, False)
    config = config_of("Qwen2.5-1.5B-Instruct", train={"gradient_checkpointing": True})
    choice = faster.choose(planner, config, can_be_16_bits=False)
    reason = "the checkpoint is quantized, and checkpointing is as set"
    assert choice.line == f"4 bits, gradient checkpointing: {reason}"


def test_host_memory_counts_too():
    """A vLLM with its own weights moves them to the host while it sleeps."""
    model = "Qwen2.5-3B-Instruct"
    planner = planner_for("H200", model, "peft + vllm", host=5 * GIB)
    choice = faster.choose(planner, config_of(model), can_be_16_bits=True)
    assert chosen(choice) == (4, False)
    assert re.search(r"would need [\d.]+ GiB of host memory, 5.00 GiB are available", choice.line)


def test_host_memory_is_what_the_gpu_leaves_of_a_memory_that_both_share():
    model = "Qwen2.5-1.5B-Instruct"
    planner = planner_for("RTX 4060", model, "unsloth + vllm", host=100 * GIB, is_unified=True)
    choice = faster.choose(planner, config_of(model), can_be_16_bits=True)
    rejected = faster._options(config_of(model), can_be_16_bits=True)[1]
    left = planner.device.usable - planner.smallest_fast(rejected).needed
    assert f"of host memory, {max(0, left) / GIB:.2f} GiB are available" in choice.line


def test_more_than_the_whole_gpu_for_vllm_is_told_in_gib():
    model = "Qwen2.5-3B-Instruct"
    choice = faster.choose(planner_for("RTX 4060", model, "unsloth + vllm"), config_of(model), can_be_16_bits=True)
    assert "16 bits, gradient checkpointing would need 10.35 GiB and 6 GiB to spare" in choice.line


def test_a_small_share_for_vllm_is_named():
    model = "Qwen2.5-3B-Instruct"
    config = config_of(model, model={"gpu_memory_share": 0.04})
    choice = faster.choose(planner_for("H200", model, "unsloth + vllm"), config, can_be_16_bits=True)
    assert choice.line.startswith("4 bits, ") and "would need --model.gpu-memory-share 0.0" in choice.line


def test_unsloths_micro_batch_is_limited_only_where_its_checkpointing_fills_host_memory():
    model = "Qwen2.5-0.5B-Instruct"
    planner = planner_for("H200", model, "unsloth + vllm")
    for checkpointing, micro_batch_size in ((True, 16), (False, 64)):
        config = config_of(model, train={"gradient_checkpointing": checkpointing})
        choice = faster.choose(planner, config, can_be_16_bits=True)
        assert choice.estimate.micro_batch_size == micro_batch_size
