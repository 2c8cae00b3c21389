import json
import sys
import types

import bitsandbytes
import pytest
import torch
from helpers.tiny_models import CONFIGS, make_model

from lora_grpo.config import replace
from lora_grpo.config.schema import LoraSettings, ModelConfig, RunConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.models import policy
from lora_grpo.models.base_model import load_base, load_tokenizer
from lora_grpo.models.policy import load_policy
from lora_grpo.sampling.build import build_sampler


def config(name="starter", bits=4, seed=0, **lora):
    return RunConfig(model=ModelConfig(name=name, bits=bits, engine="peft"), lora=LoraSettings(**lora), seed=seed)


def adapter(policy):
    return {n: p.detach().clone() for n, p in policy.model.named_parameters() if p.requires_grad}


def test_the_base_is_4_bit_and_the_adapter_on_every_linear_layer():
    policy = load_policy(config(rank=4))
    layers = [m for m in policy.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    num_layers = policy.model.config.num_hidden_layers
    assert len(layers) == 7 * num_layers
    assert all(layer.weight.quant_state.quant_type == "nf4" and layer.weight.quant_state.nested for layer in layers)
    assert len(adapter(policy)) == 2 * 7 * num_layers
    assert policy.record["bits"] == 4 and policy.record["engine"] == "peft" and policy.record["device"] == "cpu"
    assert policy.record["trainable_parameters"] == sum(t.numel() for t in adapter(policy).values())


def test_the_seed_fixes_the_adapter():
    first, same, other = (adapter(load_policy(config(seed=seed))) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("lora", "scale"), [({}, 2.0), ({"rslora": True}, 8.0), ({"alpha": 8}, 0.5)])
def test_alpha_rank_and_rslora_set_the_scale(lora, scale):
    policy = load_policy(config(**{"rank": 16, "alpha": 32, **lora}))
    layer = policy.model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == pytest.approx(scale)


def test_dora_and_targets_reach_peft():
    policy = load_policy(config(dora=True, targets=("q_proj", "v_proj")))
    names = adapter(policy)
    assert any("lora_magnitude_vector" in name for name in names)
    assert all("q_proj" in name or "v_proj" in name for name in names)
    # The merged copy does not support DoRA: the model itself is sampled.
    assert build_sampler(policy, config(dora=True)).model is policy.model


def test_a_target_that_names_no_module_is_refused_beside_one_that_does():
    with pytest.raises(
        UserError, match=r"--lora\.targets q_prok names no linear layer of this model; did you mean 'q_proj'"
    ):
        load_policy(config(targets=("v_proj", "q_prok")))


def test_a_damaged_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_policy(config(name=str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.fixture
def load_unsloth(monkeypatch):
    """Load a policy with a stand-in for Unsloth's `from_pretrained`, on a GPU with 6 of 8 GiB free."""

    def load(from_pretrained, prompts_per_step=8):
        loader = types.SimpleNamespace(from_pretrained=from_pretrained)
        monkeypatch.setitem(sys.modules, "unsloth", types.SimpleNamespace(FastLanguageModel=loader))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 << 30, 8 << 30))
        settings = {
            "model": {"gpu_memory_share": 0.3, "engine": "unsloth"},
            "sampling": {"backend": "vllm", "num_generations": 8},
            "train": {"prompts_per_step": prompts_per_step},
        }
        policy._load_unsloth(replace(config(), settings))

    return load


@pytest.mark.parametrize(("prompts_per_step", "at_once"), [(8, 64), (32, 257)])
def test_unsloth_starts_vllm_with_the_share_of_the_total_memory_and_all_completions(
    load_unsloth, prompts_per_step, at_once
):
    """Unsloth multiplies the share by the free memory, and takes 256 completions for its default, which is 8 to 256."""

    class Loaded(Exception):
        pass

    def from_pretrained(**options):
        raise Loaded(options)

    with pytest.raises(Loaded) as loaded:
        load_unsloth(from_pretrained, prompts_per_step)
    [options] = loaded.value.args
    assert options["gpu_memory_utilization"] * 6 / 8 == pytest.approx(0.3)
    assert options["max_num_seqs"] == at_once
    assert options["dtype"] == torch.float16


def test_a_context_that_unsloth_shortens_is_an_error(load_unsloth):
    shorter = types.SimpleNamespace(max_model_len=768)
    model = types.SimpleNamespace(vllm_engine=types.SimpleNamespace(model_config=shorter))
    with pytest.raises(RunError, match="limits vLLM to 768 tokens of context, less than --model"):
        load_unsloth(lambda **options: (model, None))


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("change", [{"intermediate_size": 128}, {"vocab_size": 800}])
def test_a_configuration_that_contradicts_the_weights_is_refused(change, bits, tmp_path):
    folder = make_model(tmp_path, CONFIGS["qwen2"])
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_base(config(str(folder), bits).model)
    assert "\n" not in str(caught.value)


def test_the_tokenizer_of_a_model_on_the_hub_needs_the_hub():
    with pytest.raises(UserError, match="tokenizer of owner/absent cannot be loaded") as caught:
        load_tokenizer(config(name="owner/absent").model)
    assert "\n" not in str(caught.value)
