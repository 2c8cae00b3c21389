"""Merged weights of all adapter types, compared with PEFT's merge, float64 arithmetic, and the unmerged adapter."""

import json
import re
import shutil

import pytest
import torch
from helpers.adapters import LINEAR, live, load, logits_of, make_adapter, make_base
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.files.tensors import model_tensors
from lora_grpo.merging import writer
from lora_grpo.merging.base_weights import base_tensors, empty_model
from lora_grpo.merging.mapping import plan_merge
from lora_grpo.models import base_model


def merged(base, adapter, output, dtype="fp32", onto="full"):
    """Run the merge without the report and the command."""
    model = empty_model(base)
    plan = plan_merge(base_tensors(base, onto, model), adapter, model)
    shards = writer.lay_out(plan, dtype)
    output.mkdir()
    writer.write_shards(output, shards)
    writer.write_index(output, shards)
    writer.write_config(output, base, plan, dtype)
    return output


KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 32, "layers.0.mlp.down_proj": 1}},
}
UNTIED = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
}
TIED = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding_and_head": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {
        (tied, dtype): make_base(folder / f"{tied}-{dtype}", tied=tied, dtype=dtype)
        for tied, dtype in [(True, "float32"), (False, "float32"), (False, "bfloat16"), (True, "bfloat16")]
    }


def check_against_peft(base, adapter, tmp_path):
    output = merged(base, adapter, tmp_path / "merged")
    model = live(base, adapter)
    logits = logits_of(model)
    ours = load(output)
    assert (logits_of(ours) - logits).abs().max() < 2e-5
    expected = model.merge_and_unload().state_dict()
    weights = load_file(output / "model.safetensors")
    assert set(weights) == set(expected) - ({"lm_head.weight"} if ours.config.tie_word_embeddings else set())
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_weights_are_pefts(kind, bases, tmp_path):
    base = bases[True, "float32"]
    adapter = make_adapter(base, tmp_path / "adapter", **KINDS[kind])
    check_against_peft(base, adapter, tmp_path)


@pytest.mark.parametrize("kind", UNTIED)
def test_an_untied_embedding_and_head_are_merged_apart(kind, bases, tmp_path):
    base = bases[False, "float32"]
    adapter = make_adapter(base, tmp_path / "adapter", **UNTIED[kind])
    check_against_peft(base, adapter, tmp_path)


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_head_follows_what_the_live_adapter_does(kind, bases, tmp_path):
    """PEFT's merge changes both through a shared tensor, but the unmerged adapter changes only one of them."""
    base = bases[True, "float32"]
    adapter = make_adapter(base, tmp_path / "adapter", **TIED[kind])
    output = merged(base, adapter, tmp_path / "merged")
    expected = logits_of(live(base, adapter))
    model = load(output)
    assert (logits_of(model) - expected).abs().max() < 2e-5
    assert model.config.tie_word_embeddings is (kind == "embedding_and_head")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_bfloat16_weights_are_rounded_once_and_no_further_off_than_pefts(kind, bases, tmp_path):
    base = bases[False, "bfloat16"]
    adapter = make_adapter(base, tmp_path / "adapter", **KINDS[kind])
    ours = load_file(merged(base, adapter, tmp_path / "merged", "bf16") / "model.safetensors")
    pefts = PeftModel.from_pretrained(load(base), adapter).merge_and_unload().state_dict()
    before, parts = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in before if any(f"{target}.weight" in name for target in LINEAR)]:
        key = "base_model.model." + name.removesuffix(".weight")
        weight = before[name].double()
        a, b = (parts[f"{key}.lora_{part}.weight"].double() for part in "AB")
        exact = weight + 6 / 4 * b @ a
        if kind == "dora":
            exact = exact * (parts[f"{key}.lora_magnitude_vector"].double() / exact.norm(dim=1)).unsqueeze(1)
        # Rounding once gives the nearest bfloat16, unless a float32 error crosses the boundary between two values.
        error, theirs = (ours[name].double() - exact).abs(), (pefts[name].double() - exact).abs()
        nearest = (exact.to(torch.bfloat16).double() - exact).abs()
        assert (error <= nearest + (weight.abs() + exact.abs()) * 2e-7).all()
        assert error.norm() <= theirs.norm() * (1 + 1e-6)


def test_a_stored_head_that_differs_is_kept_whatever_the_configuration_says(bases, tmp_path):
    """transformers and PEFT load such a base untied."""
    base = shutil.copytree(bases[False, "float32"], tmp_path / "base")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    adapter = make_adapter(base, tmp_path / "adapter")
    model = load(merged(base, adapter, tmp_path / "merged"))
    assert (logits_of(model) - logits_of(live(base, adapter))).abs().max() < 2e-5
    assert model.config.tie_word_embeddings is False


def test_a_stored_head_that_is_the_embedding_follows_the_tie(bases, tmp_path):
    base = shutil.copytree(bases[True, "float32"], tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(base, tmp_path / "adapter")
    output = merged(base, adapter, tmp_path / "merged")
    assert (logits_of(load(output)) - logits_of(live(base, adapter))).abs().max() < 2e-5
    assert "lm_head.weight" not in load_file(output / "model.safetensors")


def test_what_4_bit_training_saw_can_be_merged_onto(bases, tmp_path):
    """The logits match those of the adapter on the base as loaded by bitsandbytes."""
    base = bases[True, "bfloat16"]
    adapter = make_adapter(base, tmp_path / "adapter")
    packed = base_model.load_base(ModelConfig(name=str(base), bits=4))
    packed.save_pretrained(tmp_path / "packed")  # like the -bnb-4bit repositories
    trained = logits_of(PeftModel.from_pretrained(packed, adapter).eval())
    apart = (logits_of(live(base, adapter)) - trained).abs().max()
    onto_it = logits_of(load(merged(base, adapter, tmp_path / "merged", onto="dequantized")))
    assert (onto_it - trained).abs().max() < 1e-4 < apart / 10
    with pytest.raises(UserError, match=r"packed is quantized .* pass the 16-bit model"):
        merged(tmp_path / "packed", adapter, tmp_path / "unpacked", onto="dequantized")


def test_many_shards_come_out_as_many_with_an_index(tmp_path):
    base = make_base(tmp_path / "base", tied=False, shards="20KB")
    names = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(names) > 2
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=[*LINEAR, "lm_head"])
    output = merged(base, adapter, tmp_path / "merged")
    assert sorted(path.name for path in output.glob("*.safetensors")) == names
    assert (logits_of(load(output)) - logits_of(live(base, adapter))).abs().max() < 2e-5
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: stored.path.name for name, stored in model_tensors(output).items()}
    assert index["metadata"]["total_size"] == sum(stored.read().nbytes for stored in model_tensors(output).values())


KEY = "base_model.model.model.layers.0.self_attn.q_proj."


LINEAR_AND_EMBEDDING = {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {f"{KEY}lora_C.weight": torch.ones(4, 4)}, rf"{KEY}lora_C.weight of .* cannot be merged into this base"),
        ({}, {"prompt_embeddings": torch.ones(8, 32)}, "prompt_embeddings of .* cannot be merged into this base"),
        ({}, {f"{KEY}lora_A.weight": torch.ones(4, 40)}, r"q_proj has the shape \[32, 40\], expected \[32, 32\]"),
        (LINEAR_AND_EMBEDDING, {}, r"trains model\.embed_tokens with DoRA"),
        ({"use_dora": True}, {f"{KEY}lora_magnitude_vector": torch.ones(1)}, r"has the shape \[1\], expected \[32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(options, changes, message, bases, tmp_path):
    base = bases[True, "float32"]
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    weights = load_file(adapter / "adapter_model.safetensors") | changes
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message):
        merged(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, "sets modules_to_save, which cannot be merged here"),
        ({"bias": "all"}, "sets bias, which cannot be merged here"),
        ({"resize": 70}, r"embed_tokens\.weight.* cannot be merged here; merge it with PEFT"),
    ],
)
def test_tensors_that_were_trained_whole_are_refused(options, message, bases, tmp_path):
    base = bases[False, "float32"]
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    with pytest.raises(UserError, match=message):
        merged(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'; only LORA"),
        ({"lora_bias": True}, "sets lora_bias, which cannot be merged"),
        ({"trainable_token_indices": [3]}, "sets trainable_token_indices"),
        ({"a_setting_of_tomorrow": True}, "sets a_setting_of_tomorrow"),
        ({"r": 8}, "has rank 4, and adapter_config.json has 8"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(changes, message, bases, tmp_path):
    base = bases[True, "float32"]
    adapter = make_adapter(base, tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match=re.escape(message)):
        merged(base, adapter, tmp_path / "merged")
