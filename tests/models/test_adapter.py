"""The reader of adapter_config.json: scales, features, and what it refuses."""

import json

import pytest

from lora_grpo.errors import UserError
from lora_grpo.models import SELECTION, read_adapter

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture
def saved(tmp_path):
    def write(**changes):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**PLAIN, **changes}))
        return tmp_path

    return write


def test_the_scale_of_a_module_follows_the_patterns_as_in_peft(saved):
    adapter = read_adapter(saved(rank_pattern={"q_proj": 16}, alpha_pattern={r"layers\.1\..*": 2}))
    assert adapter.scale("model.layers.0.v_proj", 4) == 2
    assert adapter.scale("model.layers.0.q_proj", 16) == 0.5
    assert adapter.scale("model.layers.1.v_proj", 4) == 0.5
    assert read_adapter(saved(use_rslora=True)).scale("v_proj", 4) == 4
    with pytest.raises(UserError, match="has rank 8"):
        adapter.scale("model.layers.0.v_proj", 8)


def test_features_are_named_and_checked(saved):
    folder = saved(use_dora=True, bias="all", layers_to_transform=[0], use_new_thing=1, init_lora_weights="pissa")
    adapter = read_adapter(folder)
    others = ("bias", "init_lora_weights", "use_dora", "use_new_thing")
    assert adapter.features == tuple(sorted((*others, "layers_to_transform")))
    with pytest.raises(UserError, match="sets bias, init_lora_weights, use_dora, use_new_thing, which vLLM"):
        adapter.check(SELECTION, "which vLLM does not serve")
    adapter.check((*others, *SELECTION), "")
