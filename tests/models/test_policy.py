import json

import bitsandbytes
import pytest
from helpers.tiny_models import CONFIGS, make_model

from lora_grpo.config.schema import LoraSettings, ModelConfig, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.models.base_model import load_base
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


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("change", [{"intermediate_size": 128}, {"vocab_size": 800}])
def test_a_configuration_that_contradicts_the_weights_is_refused(change, bits, tmp_path):
    folder = make_model(tmp_path, CONFIGS["qwen2"])
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_base(config(str(folder), bits).model)
    assert "\n" not in str(caught.value)
