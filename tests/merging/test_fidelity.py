"""The retained fraction of the update, compared with float64 arithmetic, and the dtype that `auto` chooses."""

import pytest
import torch
from helpers.adapters import make_adapter, make_base
from safetensors.torch import load_file, save_file

from lora_grpo.errors import UserError
from lora_grpo.files import tensors
from lora_grpo.merging import fidelity
from lora_grpo.merging.base_weights import base_tensors, empty_model
from lora_grpo.merging.fidelity import choose, measure
from lora_grpo.merging.mapping import plan_merge
from lora_grpo.merging.outputs import LowRank

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def planned(base, adapter, *, size=1.0, edit=None):
    """Return a merge plan, after scaling the update by `size` and applying `edit` to the adapter's weights."""
    if size != 1.0 or edit:
        path = adapter / "adapter_model.safetensors"
        weights = load_file(path)
        for name in weights:
            if "lora_B" in name:
                weights[name] *= size
        if edit:
            edit(weights)
        save_file(weights, path)
    model = empty_model(base)
    return plan_merge(base_tensors(base, "full", model), adapter, model)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("fidelity") / "base", tied=False, dtype="bfloat16")


def in_float64(base, adapter, dora=False):
    """Return the update and base of every adapted layer."""
    weights, parts = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for key in [key for key in parts if key.endswith("lora_A.weight")]:
        module = key.removesuffix(".lora_A.weight")
        name = module.removeprefix("base_model.model.") + ".weight"
        before = weights[name].double()
        change = 6 / 4 * parts[f"{module}.lora_B.weight"].double() @ parts[key].double()
        if dora:
            merged = before + change
            factor = parts[f"{module}.lora_magnitude_vector"].double() / merged.norm(dim=1)
            change = factor.unsqueeze(1) * merged - before
        yield name, before, change


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("size", [1.0, 0.02, 0.002])
def test_every_figure_is_that_of_float64(size, dora, base, tmp_path):
    adapter = make_adapter(base, tmp_path / "adapter", use_dora=dora)
    plan = planned(base, adapter, size=size)
    for dtype in TORCH:
        retained = measure(plan.outputs, dtype)
        dots, squares, errors, retained_of = 0.0, 0.0, 0.0, {}
        for name, before, change in in_float64(base, adapter, dora):
            difference = (before + change).to(TORCH[dtype]).double() - before
            dots += float((difference * change).sum())
            squares += float(change.square().sum())
            errors += float((difference - change).square().sum())
            retained_of[name] = float((difference * change).sum() / change.square().sum())
        # If the float32 and float64 values of an element round differently, one of thousands of terms changes.
        tolerance = 1e-3 if dtype != "fp32" else 1e-4
        assert retained.overall == pytest.approx(dots / squares, abs=tolerance)
        assert retained.error == pytest.approx((errors / squares) ** 0.5, abs=tolerance)
        assert retained.worst == pytest.approx(min(retained_of.values()), abs=5 * tolerance)
        if dtype != "fp32":
            assert retained_of[retained.worst_layer] == pytest.approx(retained.worst, abs=5 * tolerance)


def test_of_a_large_tensor_a_block_is_measured_and_counts_for_the_whole(base, tmp_path, monkeypatch):
    plan = planned(base, make_adapter(base, tmp_path / "adapter"), size=0.02)
    whole = measure(plan.outputs, "bf16")
    outputs = {output.low_rank: output for output in plan.outputs.values() if output.low_rank}
    change = LowRank.change
    fractions_read = []

    def count(update, start, stop, weight):
        fractions_read.append((stop - start) / outputs[update].shape[0])
        return change(update, start, stop, weight)

    monkeypatch.setattr(LowRank, "change", count)
    monkeypatch.setattr(tensors, "BLOCK_ELEMENTS", 256)
    monkeypatch.setattr(fidelity, "SAMPLE_ELEMENTS", 256)
    sample = measure(plan.outputs, "bf16")
    assert len(fractions_read) == len(outputs)
    assert sum(fractions_read) < 0.5 * len(fractions_read)
    assert sample.overall == pytest.approx(whole.overall, abs=0.05) and sample.overall != whole.overall


def test_an_update_that_bfloat16_swallows_is_reported_and_avoided(base, tmp_path):
    plan = planned(base, make_adapter(base, tmp_path / "adapter"), size=0.003)
    choice = choose("auto", plan)
    assert measure(plan.outputs, "bf16").overall < 0.6 < 0.99 < choice.retained.overall
    assert choice.dtype == "fp16"
    assert choice.reason.startswith("bf16 keeps ") and "fp16 keeps 9" in choice.reason

    smaller = planned(base, make_adapter(base, tmp_path / "smaller"), size=0.00001)
    choice = choose("auto", smaller)
    assert choice.dtype == "fp32" and choice.retained.overall > 0.99
    assert "fp16 keeps" in choice.reason and choice.reason.endswith("only fp32 keeps it")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_no_number_is_refused_by_name(value, base, tmp_path):
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    adapter = make_adapter(base, tmp_path / "adapter")
    plan = planned(base, adapter, edit=lambda weights: weights[key].view(-1)[5:6].fill_(value))
    with pytest.raises(UserError, match=r"update of .*up_proj\.weight is NaN or infinite"):
        choose("auto", plan)
