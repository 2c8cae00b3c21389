"""What is worked out from a card's memory, for every preset and for cards of every size."""

import re
import runpy

import pytest
from helpers.fresh_imports import RECIPES

from lora_grpo.cli.validate import check
from lora_grpo.config import RunConfig, check_fields, hardware, micro_batches, replace
from lora_grpo.errors import UserError
from lora_grpo.models import GIB, KNOWN_MODELS, Shape
from lora_grpo.planning.fit import USABLE_SHARE, Device, Planner
from lora_grpo.planning.suggestions import as_flags, changed, cheaper_settings, refusal


def presets_of(recipe):
    """The GPU presets of a recipe: size in GB -> (configuration, shape of its model)."""
    found = {}
    for name, changes in runpy.run_path(str(recipe))["PRESETS"].items():
        if size := hardware.preset_gigabytes(name):
            config = replace(RunConfig(output_dir="out", preset=name), changes)
            found[size] = (config, Shape.of(KNOWN_MODELS[config.model.name].config))
    return found


PRESETS = {recipe.stem: presets_of(recipe) for recipe in RECIPES}


def fit(shape, config, card, **others):
    planner = Planner(shape, card, **others)
    found = planner.choose(config)
    if found is None:
        raise UserError(refusal(planner, config))
    return found


def card(gigabytes, taken=0.3):
    """A card as it reports itself: a little less than its name says, and some of it in use."""
    total = int(0.96 * gigabytes * GIB)
    return Device(f"Card with {gigabytes} GB", total, total - int(taken * GIB))


@pytest.mark.parametrize("sampler", ["transformers", "vllm", "shared"])
@pytest.mark.parametrize(("recipe", "size"), [(recipe, size) for recipe in PRESETS for size in PRESETS[recipe]])
def test_every_preset_fits_its_card_and_no_larger_micro_batch_does(recipe, size, sampler):
    config, shape = PRESETS[recipe][size]
    check(check_fields(config))
    found = fit(shape, config, card(size), sampler=sampler)
    assert found.needed <= USABLE_SHARE * card(size).free
    sizes = micro_batches(config)
    assert found.micro_batch_size in sizes
    larger = [other for other in sizes if other > found.micro_batch_size]
    if larger:
        assert not Planner(shape, card(size), sampler).at(config, larger[-1], found.max_num_seqs).fits
    assert found.max_num_seqs == sizes[0]  # all of a step's completions at once
    if sampler == "transformers":
        assert found.gpu_memory_share is None
    else:
        asked = found.gpu_memory_share * card(size).total
        names = ("kv_cache", "vllm_weights", "vllm_adapter", "vllm_workspace")
        wanted = sum(found.parts[name] for name in names) + (found.parts["weights"] if sampler == "shared" else 0)
        assert asked == pytest.approx(wanted, rel=0.1)
        # vLLM starts only where that much is free beside what the trainer holds.
        assert sum(found.phases["sampling"].values()) <= card(size).usable


CONFIG, SHAPE = PRESETS["gsm8k_lora"][24]


def test_less_free_memory_means_smaller_numbers():
    numbers = []
    for taken in (0, 8, 12, 14, 15.5):
        found = fit(SHAPE, CONFIG, card(24, taken), sampler="vllm")
        assert found.fits
        numbers.append((found.micro_batch_size, found.max_num_seqs))
    assert numbers == sorted(numbers, reverse=True)
    assert len({micro for micro, _ in numbers}) > 2
    assert len({sequences for _, sequences in numbers}) > 1


def test_what_cannot_fit_is_refused_with_its_parts_and_what_to_change():
    asked = replace(CONFIG, {"model": {"bits": 16}, "train": {"gradient_checkpointing": False}})
    with pytest.raises(UserError) as refused:
        fit(SHAPE, asked, card(8), sampler="transformers")
    message = str(refused.value)
    assert "\n" not in message
    assert "Qwen/Qwen2.5-3B-Instruct does not fit on Card with 8 GB" in message
    assert "with a micro-batch of 1 needs" in message
    assert "(weights 5.75, adapter 0.22" in message
    assert (
        ", 6.64 are usable (7.38 of 7.68 are free); pass --train.gradient-checkpointing --model.bits 4 (needs "
        in message
    )


def test_the_settings_that_are_offered_need_less_each():
    asked = replace(
        CONFIG,
        {"model": {"bits": 16}, "train": {"gradient_checkpointing": False, "optimizer": "adamw_torch",
                                          "micro_batch_size": 64}},
    )  # fmt: skip
    offered = cheaper_settings(asked, with_engine=True)
    assert [as_flags(values[0]) for values in offered] == [
        "--train.micro-batch-size 32",
        "--train.gradient-checkpointing",
        "--sampling.backend transformers",
        "--train.optimizer adamw_8bit",
        "--model.bits 4",
        "--lora.rank 16",
        "--model.max-sequence-tokens 768",
        "--sampling.max-completion-tokens 256 --model.max-sequence-tokens 768",
    ]
    planner = Planner(SHAPE, card(24), "vllm")
    for values in offered:
        needed = [planner.least(changed(asked, offer)).needed for offer in values]
        for offer in values:
            check(check_fields(changed(asked, offer)))
        assert needed == sorted(needed, reverse=True), values
        assert needed[0] <= planner.least(asked).needed
    assert cheaper_settings(CONFIG)[0] == [{"lora.rank": 16}, {"lora.rank": 8}, {"lora.rank": 4}]


def test_a_named_share_is_filled_with_the_cache():
    found = fit(SHAPE, replace(CONFIG, {"model": {"gpu_memory_share": 0.3}}), card(24), sampler="vllm")
    assert found.gpu_memory_share == 0.3
    names = ("kv_cache", "vllm_weights", "vllm_adapter", "vllm_workspace")
    assert sum(found.parts[name] for name in names) == int(0.3 * card(24).total)
    assert found.max_num_seqs == 64
    tight = fit(SHAPE, replace(CONFIG, {"model": {"gpu_memory_share": 0.15}}), card(24), sampler="vllm")
    assert 1 <= tight.max_num_seqs < 64
    with pytest.raises(UserError) as refused:
        fit(SHAPE, replace(CONFIG, {"model": {"gpu_memory_share": 0.05}}), card(24), sampler="vllm")
    needed = float(re.match(r"--model.gpu-memory-share 0.05 is too small: .* need ([\d.]+);", str(refused.value))[1])
    for share, is_enough in ((needed, True), (needed - 0.001, False)):
        least = Planner(SHAPE, card(24), "vllm").least(replace(CONFIG, {"model": {"gpu_memory_share": share}}))
        assert least.fits is is_enough


def test_where_everything_is_as_small_as_can_be_only_the_model_is_left():
    least = {
        "model": {"max_sequence_tokens": 640},
        "sampling": {"max_completion_tokens": 512},
        "lora": {"rank": 4},
        "train": {"micro_batch_size": 1},
    }
    with pytest.raises(UserError, match=r"are free\); pass a smaller --model\.name$"):
        fit(SHAPE, replace(CONFIG, least), card(2), sampler="transformers")


def test_vllm_reserves_memory_for_an_adapter_on_all_layers_and_a_rank_that_it_serves():
    def reserved(rank, *targets):
        config = replace(CONFIG, {"lora": {"rank": rank, "targets": targets}})
        return fit(SHAPE, config, card(24), sampler="vllm").parts["vllm_adapter"]

    full = reserved(32, "all-linear")
    assert full == 2 * sum(SHAPE.adapter_tensors(32)) == reserved(17, "q_proj", "v_proj")
    with pytest.raises(UserError, match="vLLM serves ranks up to 512, not rank 513"):
        reserved(513, "q_proj")


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_a_step(processes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    found = fit(SHAPE, CONFIG, card(24), sampler="vllm")
    assert 64 // processes % found.micro_batch_size == 0
    assert found.max_num_seqs == 64 // processes
