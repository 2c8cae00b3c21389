import bitsandbytes

from lora_grpo.config.schema import LoraSettings, ModelConfig, RunConfig
from lora_grpo.models.policy import load_policy


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
