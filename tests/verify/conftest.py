"""The starter model as a base, with an adapter, and both merged."""

import peft
import pytest
import torch
import transformers
from helpers.stand_in_servers import Model

from lora_grpo import starter


class Folders:
    """The model and the adapter in folders, and the two models in memory."""

    def __init__(self, folder):
        self.base_folder = folder / "base"
        self.adapter_folder = folder / "tuned"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(starter.model_path())
        base = transformers.AutoModelForCausalLM.from_pretrained(starter.model_path(), dtype=torch.float32)
        base.generation_config.update(temperature=0.5, top_k=2)  # which servers use, unless a request says otherwise
        base.save_pretrained(self.base_folder)
        self.tokenizer.save_pretrained(self.base_folder)

        torch.manual_seed(0)
        lora = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
        )
        tuned = peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(self.base_folder, dtype=torch.float32), lora
        )
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.data.mul_(0.3)
        tuned.save_pretrained(self.adapter_folder)
        self.base = Model(base.eval(), self.tokenizer)
        self.tuned = Model(tuned.merge_and_unload().eval(), self.tokenizer)

    def render(self, messages):
        return self.base.encode(self.base.render(messages))


@pytest.fixture(scope="session")
def starter_models(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("models"))
