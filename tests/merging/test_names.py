"""Adapters with the names of older versions of transformers are merged as transformers and PEFT load them."""

import json
import re
import shutil

import pytest
import torch
from helpers.adapters import IDS
from helpers.tiny_models import CONFIGS, make_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.merging import MergeOptions, merge
from lora_grpo.models import ModelFlags, base_model, resolve
from lora_grpo.sampling import build

pytestmark = pytest.mark.usefixtures("no_divergence")

PREFIX = "base_model.model."


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def load(folder):
    return base_model.load_base(ModelConfig(name=str(folder), bits=16))


def changed(folder, **options):
    """Save an adapter of a base in the names of today, with weights far from zero."""
    base = folder.with_name("base")
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def write_adapter(folder, weights, **settings):
    """Write an adapter of any names, as an older version saved it."""
    folder.mkdir(exist_ok=True)
    values = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def check_merged(base, adapter, tmp_path):
    """Check that the merged model computes what the adapter does in PEFT, and not what the base does."""
    output = merge(MergeOptions(str(adapter), base=str(base), dtype="fp32", output=tmp_path / "merged"))
    live = logits(PeftModel.from_pretrained(load(base), adapter))
    torch.testing.assert_close(logits(load(output)), live, rtol=0, atol=1e-4)
    assert (live - logits(load(base))).abs().max() > 0.01
    # An evaluation loads the adapter as PEFT does.
    target = resolve(str(adapter), ModelFlags(base=str(base)))
    sampler = build.load_sampler(target, "transformers", build.load_tokenizer(target), 0, 0)
    sampler.wake_up(adapter=True)
    torch.testing.assert_close(logits(sampler.model), live, rtol=0, atol=1e-5)
    return output


RENAMED = {
    # The name of today, and of transformers before 4.52.
    "gemma3 with images": (r"^model\.language_model\.", "language_model.model."),
    "mistral3": (r"^model\.language_model\.", "language_model.model."),
}


@pytest.mark.parametrize(
    "targets", [["q_proj", "down_proj"], r".*language_model.*\.(q|up)_proj"], ids=["names", "regex"]
)
@pytest.mark.parametrize("family", RENAMED)
def test_the_names_of_multimodal_models_before_they_were_renamed(tmp_path, family, targets):
    base = make_model(tmp_path / "base", CONFIGS[family])
    today = changed(tmp_path / "today", target_modules=targets)
    before = shutil.copytree(today, tmp_path / "before")
    weights = load_file(today / "adapter_model.safetensors")
    renamed = {PREFIX + re.sub(*RENAMED[family], key.removeprefix(PREFIX)): value for key, value in weights.items()}
    assert not renamed.keys() & weights.keys()
    save_file(renamed, before / "adapter_model.safetensors", metadata={"format": "pt"})
    merged = check_merged(base, before, tmp_path)
    expected = merge(MergeOptions(str(today), base=str(base), dtype="fp32"))
    assert (merged / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_the_former_name_of_a_tied_head(tmp_path):
    """PEFT 0.21 does not find it, and leaves the head as it is."""
    base = make_model(tmp_path / "base", CONFIGS["gemma3 with images"])
    merged = []
    for number, module in enumerate(["lm_head", "language_model.lm_head"]):
        torch.manual_seed(1)
        parts = {"A": torch.randn(4, 64), "B": torch.randn(768, 4)}
        weights = {f"{PREFIX}{module}.lora_{part}.weight": value for part, value in parts.items()}
        adapter = write_adapter(tmp_path / f"{number}", weights, target_modules=["lm_head"])
        merged.append(merge(MergeOptions(str(adapter), base=str(base), dtype="fp32")))
    today, before = (load_file(folder / "model.safetensors") for folder in merged)
    assert "lm_head.weight" in today and today.keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in today.items())


EXPERTS = {
    # The layers of an expert, in an adapter that transformers 4 saved.
    "mixtral": ("block_sparse_moe.experts.{}.", ("w1", "w2", "w3")),
    "qwen3 moe": ("mlp.experts.{}.", ("gate_proj", "down_proj", "up_proj")),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_that_were_layers_of_their_own(tmp_path, family):
    """transformers 5 stacks the experts of a layer; the files of a base still have one tensor for each expert."""
    base = make_model(tmp_path / "base", CONFIGS[family])
    torch.manual_seed(1)
    stored = load_file(base / "model.safetensors")
    experts, parts = EXPERTS[family]
    weights = {}
    for name, weight in stored.items():
        if name.split(".")[-2] in (*parts, "q_proj"):
            module = PREFIX + name.removesuffix(".weight")
            weights[f"{module}.lora_A.weight"] = torch.randn(4, weight.shape[1]) * 0.2
            weights[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], 4) * 0.2
    assert f"{PREFIX}model.layers.0.{experts.format(3)}{parts[1]}.lora_A.weight" in weights
    targets = [*parts, "q_proj"]
    adapter = write_adapter(tmp_path / "adapter", weights, target_modules=targets, base_model_name_or_path=str(base))
    check_merged(base, adapter, tmp_path)


def test_ranks_and_alphas_by_the_names_in_the_adapter(tmp_path):
    base = make_model(tmp_path / "base", CONFIGS["gemma3 with images"])
    module = "language_model.model.layers.1.self_attn.q_proj"
    weights = {
        f"{PREFIX}{module}.lora_A.weight": torch.ones(2, 64),
        f"{PREFIX}{module}.lora_B.weight": torch.ones(64, 2),
    }
    patterns = {"rank_pattern": {f"^{module}": 2}, "alpha_pattern": {f"^{module}": 6}}
    adapter = write_adapter(tmp_path / "adapter", weights, target_modules=["q_proj"], **patterns)
    output = merge(MergeOptions(str(adapter), base=str(base), dtype="fp32"))
    name = f"{module}.weight"
    change = load_file(output / "model.safetensors")[name] - load_file(base / "model.safetensors")[name]
    torch.testing.assert_close(change, torch.full((64, 64), 6.0), rtol=0, atol=1e-5)  # 2 ranks times 6 / 2


def test_a_name_that_no_version_had_is_refused_as_the_adapter_has_it(tmp_path):
    base = make_model(tmp_path / "base", CONFIGS["gemma3 with images"])
    module = "language_model.model.layers.9.self_attn.q_proj"
    weights = {
        f"{PREFIX}{module}.lora_A.weight": torch.ones(4, 64),
        f"{PREFIX}{module}.lora_B.weight": torch.ones(64, 4),
    }
    adapter = write_adapter(tmp_path / "adapter", weights, target_modules=["q_proj"])
    with pytest.raises(UserError, match=re.escape(module)):
        merge(MergeOptions(str(adapter), base=str(base)))
    assert not (tmp_path / "adapter-merged").exists()
