"""Random models: loadable by transformers, with completions that do not end."""

from helpers.model_configs import TINY_QWEN2 as TINY

from lora_grpo.gpu_check.random_model import build


def test_transformers_finds_every_weight_and_no_other(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    build(tmp_path / "model", TINY)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 2
    with torch.no_grad():  # tokens are about equally likely, so that nothing ends
        probabilities = model.float()(torch.tensor([[5, 9, 700, 1300, 4095]])).logits.softmax(-1)
    assert probabilities.max() < 20 / TINY["vocab_size"] and probabilities[..., 2].max() < 5 / TINY["vocab_size"]
