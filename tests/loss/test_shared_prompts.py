"""Prompts that are read once for their group: the same logprobs, loss and gradients as with padded rows."""

import contextlib
import itertools

import pytest
import torch
from helpers.loss_passes import distance, loss_and_gradients, make_trainer, micro_batch, random_model, with_adapter
from helpers.tiny_models import CONFIGS, OTHERS
from torch.nn.attention import flex_attention
from transformers import AutoConfig

from lora_grpo.config.schema import ModelConfig
from lora_grpo.models import base_model
from lora_grpo.training import trl_compat


@contextlib.contextmanager
def padded(trainer):
    trainer.loss_pass.packing_disabled_reason = "for comparison"
    yield
    trainer.loss_pass.packing_disabled_reason = ""


def both(trainer, inputs):
    """Return loss, gradients and metrics of the packed pass, and those of the padded pass."""
    assert trainer.packing_disabled_reason == ""
    packed = loss_and_gradients(trainer, inputs)
    with padded(trainer):
        return packed, loss_and_gradients(trainer, inputs)


def logprobs(trainer, inputs):
    ids, mask = (torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], 1) for part in ("ids", "mask"))
    width = inputs["completion_ids"].shape[1]
    token_logprobs, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)
    return token_logprobs * inputs["completion_mask"]


def tokens_read(trainer):
    """Return a list that gets the number of tokens of each pass through the first layer."""
    read = []
    norm = trainer.model.base_model.model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda module, args, output: read.append(args[0].shape[:2].numel()))
    return read


GROUPS = [[2, 2], [3, 1, 4], [16], [1, 16, 7], [1], [8, 8, 8, 8]]
GROUPS_OF_EACH_MODEL = ([3, 1, 4], [16])


def models_and_groups():
    """Return all cases. By default, one model reads all groups, and every other one two of them."""
    cases = []
    for family, tied, groups in itertools.product(["qwen2", "qwen3", "llama"], [True, False], GROUPS):
        by_default = (family, tied) == ("qwen2", True) or groups in GROUPS_OF_EACH_MODEL
        marks = [] if by_default else [pytest.mark.slow, pytest.mark.exhaustive]
        name = f"{family}-{'tied' if tied else 'untied'}-{groups}"
        cases.append(pytest.param(family, tied, groups, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("family", "tied", "groups"), models_and_groups())
def test_logprobs_and_gradients_are_those_of_padded_rows(family, tied, groups, tmp_path):
    model = with_adapter(random_model(family, tie_word_embeddings=tied, num_key_value_heads=1))
    trainer = make_trainer(model, tmp_path, max_completion_length=12)
    inputs = micro_batch(groups)
    (loss, gradients, metrics), (padded_loss, padded_gradients, padded_metrics) = both(trainer, inputs)
    assert loss == pytest.approx(padded_loss, rel=1e-5, abs=1e-6)
    assert metrics == pytest.approx(padded_metrics, rel=1e-5)
    assert distance(gradients, padded_gradients) < 1e-5
    packed_logprobs = logprobs(trainer, inputs)
    with padded(trainer):
        torch.testing.assert_close(packed_logprobs, logprobs(trainer, inputs), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("groups", "checkpointing"), [([3, 1, 4], False), ([3, 1, 4], True), ([40], False)], ids=str)
def test_flex_attention_computes_the_same(groups, checkpointing, tmp_path, monkeypatch):
    """Without its kernel, which needs a GPU: what attends to what, and the gradients. 40 rows are several blocks.

    PyTorch has the gradient for a CPU, from the full scores, but refuses it.
    """
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    model = with_adapter(random_model("qwen3", num_key_value_heads=1))
    settings = {"max_completion_length": 12, "gradient_checkpointing": checkpointing}
    trainer = make_trainer(model, tmp_path, packed_attention="flex", **settings)
    (loss, gradients, metrics), (padded_loss, padded_gradients, padded_metrics) = both(trainer, micro_batch(groups))
    assert loss == pytest.approx(padded_loss, rel=1e-5, abs=1e-6)
    assert metrics == pytest.approx(padded_metrics, rel=1e-5)
    assert distance(gradients, padded_gradients) < 1e-5


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.0, "modules_to_save": ["embed_tokens"]}])
def test_other_adapters(settings, tmp_path):
    trainer = make_trainer(with_adapter(random_model(), **settings), tmp_path, max_completion_length=12)
    (_, gradients, _), (_, padded_gradients, _) = both(trainer, micro_batch([4, 4]))
    assert distance(gradients, padded_gradients) < 1e-5


@pytest.mark.skipif(trl_compat.has_fused_head(), reason="TRL 1.16 refuses an adapter on the head")
def test_an_adapter_on_the_head(tmp_path):
    """The model is called for its logits, and calls its backbone itself."""
    model = with_adapter(random_model("llama", tie_word_embeddings=False), ["q_proj", "lm_head"])
    trainer = make_trainer(model, tmp_path, max_completion_length=12)
    (_, gradients, _), (_, padded_gradients, _) = both(trainer, micro_batch([4, 4]))
    assert distance(gradients, padded_gradients) < 1e-5


def test_a_router_loss_needs_padded_rows(tmp_path):
    model = with_adapter(random_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))
    trainer = make_trainer(model, tmp_path, max_completion_length=12, router_aux_loss_coef=0.01)
    assert "router" in trainer.packing_disabled_reason
    read = tokens_read(trainer)
    inputs = micro_batch([4, 4])
    assert loss_and_gradients(trainer, inputs)[2]["aux_loss"] > 0
    assert read == [inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()]


def test_nf4(tmp_path):
    model = with_adapter(base_model.load_base(ModelConfig(bits=4)))
    base_model.keep_frozen(model)
    trainer = make_trainer(model, tmp_path, max_completion_length=12)
    (_, gradients, _), (_, padded_gradients, _) = both(trainer, micro_batch([4, 4, 2]))
    assert distance(gradients, padded_gradients) < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_recomputes_the_same(reentrant, tmp_path):
    inputs = micro_batch([4, 4])
    results = []
    for checkpointing in (True, False):
        trainer = make_trainer(
            with_adapter(random_model()),
            tmp_path,
            max_completion_length=12,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        read = tokens_read(trainer)
        results.append(loss_and_gradients(trainer, inputs))
        assert len(read) == 1 + checkpointing
    assert results[0][0] == results[1][0]
    assert distance(results[0][1], results[1][1]) == 0


def test_completions_without_tokens(tmp_path):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12)
    inputs = micro_batch([2, 2])
    inputs["completion_mask"][1] = 0  # a truncated one that is masked
    inputs["completion_mask"][2:, 1:] = 0  # a single token, predicted from the prompt
    (_, gradients, _), (_, padded_gradients, _) = both(trainer, inputs)
    assert distance(gradients, padded_gradients) < 1e-5
    inputs["completion_mask"][:, 1:] = 0
    (_, gradients, _), (_, padded_gradients, _) = both(trainer, inputs)
    assert distance(gradients, padded_gradients) < 1e-5


def test_the_layers_read_every_distinct_token_once(tmp_path):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12)
    read = tokens_read(trainer)
    inputs = micro_batch([4, 4])
    both(trainer, inputs)
    prompts = inputs["prompt_mask"][[0, 4]].sum()
    fed = (inputs["completion_mask"].sum(1) - 1).sum()  # nothing is predicted from the last token
    assert read == [prompts + fed, inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()]


def reason(config, folder, longest_row):
    torch.manual_seed(0)
    configuration = AutoConfig.for_model(**config)
    attention = base_model.attention_implementation(configuration)
    model = base_model.auto_class(configuration).from_config(
        configuration, dtype=torch.float32, attn_implementation=attention
    )
    with torch.no_grad():  # norms and biases too differ from the ones and zeros they start with
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return make_trainer(with_adapter(model), folder, longest_row).packing_disabled_reason


PADDED = {"falcon": "logprobs", "gemma2": "eager", "gpt_oss": "eager", "nemotron": "logprobs", "stablelm": "logprobs"}
PADDED |= dict.fromkeys(
    ("granite hybrid", "granite hybrid with experts", "lfm2", "qwen3_5", "qwen3_5 text"), "another kind"
)


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_which_models_read_prompts_once(name, tmp_path, capsys):
    config = {**CONFIGS, **OTHERS}[name]
    obstacle = reason(config, tmp_path, longest_row=16)
    assert PADDED.get(name, "") in obstacle and bool(obstacle) == (name in PADDED)
    assert ("once per completion" in capsys.readouterr().err) == bool(obstacle)
    if config.get("sliding_window") and not obstacle:
        assert "last 16 tokens" in reason(config, tmp_path, longest_row=17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_not_pass_the_packing_on_is_padded(dtype, tmp_path, capsys):
    model = random_model().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # as in trained models, attention moves logprobs by more than rounding
            parameter.mul_(4)
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *a, packing=None, forward=forward, **k: forward(*a, **k)
    trainer = make_trainer(with_adapter(model), tmp_path)
    assert trainer.packing_disabled_reason
    assert model.config._attn_implementation == "sdpa"
    assert trainer.packing_disabled_reason in capsys.readouterr().err
