import bitsandbytes
import pytest
import torch
from helpers.tiny_models import CONFIGS, make_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_grpo.config.schema import LoraSettings, ModelConfig, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.models.base_model import load_base
from lora_grpo.models.policy import load_adapter, load_policy, save_adapter


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


def test_a_target_without_a_module_and_a_damaged_adapter_are_errors(tmp_path):
    with pytest.raises(UserError, match=r"--lora\.targets q_prj names no linear layer"):
        load_policy(config(targets=("v_proj", "q_prj")))
    policy = load_policy(config(rank=4))
    save_adapter(policy.model, policy.tokenizer, tmp_path)
    load_adapter(policy.model, tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = next(iter(weights))
    weights[name][0, 0] = float("nan")
    save_file(weights, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="is NaN or infinite"):
        load_adapter(policy.model, tmp_path)


@pytest.mark.parametrize("kind", ["half", "pointer"])
def test_weights_that_are_not_all_there_are_one_line(kind, tmp_path):
    """A download that was interrupted, and a clone without Git LFS, whose files name their content."""
    folder = make_model(tmp_path / "base", CONFIGS["qwen3"])
    path = folder / "model.safetensors"
    weights = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 1000\n"
    path.write_bytes(weights[: len(weights) // 2] if kind == "half" else pointer)
    with pytest.raises(UserError, match=r"base cannot be loaded: .*download it again, or run `git lfs pull`") as error:
        load_base(ModelConfig(name=str(folder), bits=16))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3"])
def test_the_scores_of_attention_are_capped_if_the_configuration_says_so(name, tmp_path):
    """transformers 5.17 leaves the cap out with its default implementation, sdpa."""
    cap = {"attn_logit_softcapping": 0.01} if name == "gemma2" else {}
    folder = make_model(tmp_path / "base", CONFIGS[name] | cap)
    base = load_base(ModelConfig(name=str(folder), bits=16))
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.allclose(base(ids).logits, reference(ids).logits, atol=1e-5)
    assert (base.config._attn_implementation == "eager") == bool(cap)
