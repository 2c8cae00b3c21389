"""Random models: published shapes, loadable by transformers, and completions that do not end."""

import pytest
from helpers.model_configs import TINY_QWEN2 as TINY

from lora_grpo import starter
from lora_grpo.config.schema import ModelConfig
from lora_grpo.models import base_model
from lora_grpo.models.shape import Shape
from lora_grpo.planning.random_model import QWEN, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "model"
    build(path, TINY)
    return path


@pytest.mark.parametrize(
    ("name", "parameters"), [("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("3B", 3_085_938_688)]
)
def test_the_shapes_have_the_published_number_of_parameters(name, parameters):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN[name]))
    assert model.num_parameters() == Shape.of(QWEN[name]).parameters == parameters


def test_transformers_finds_every_weight_and_no_other(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 2
    with torch.no_grad():  # tokens are about equally likely, so that nothing ends
        probabilities = model.float()(torch.tensor([[5, 9, 700, 1300, 4095]])).logits.softmax(-1)
    assert probabilities.max() < 20 / TINY["vocab_size"] and probabilities[..., 2].max() < 5 / TINY["vocab_size"]


def test_the_tokenizer_reads_as_the_embedded_one_and_decodes_every_id(folder):
    ours = base_model.load_tokenizer(ModelConfig(name=str(folder)))
    embedded = base_model.load_tokenizer(ModelConfig(name=str(starter.model_path())))
    text = "Tom has 12 plums x1000 and x 4095.\n<|im_end|>"
    assert ours(text)["input_ids"] == embedded(text)["input_ids"]
    chat = [{"role": "user", "content": "How many?"}]
    assert ours.apply_chat_template(chat, tokenize=False) == embedded.apply_chat_template(chat, tokenize=False)
    words = ours.batch_decode([[number] for number in range(TINY["vocab_size"])])
    assert len(ours) == TINY["vocab_size"] and all(words) and words[3000] == "x3000"
