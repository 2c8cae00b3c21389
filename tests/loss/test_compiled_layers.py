"""Compiled norms and MLPs: the same loss and gradients, and sampling and evaluation as before."""

import copy

import pytest
import torch
from helpers.loss_passes import distance, loss_and_gradients, make_trainer, micro_batch, random_model, with_adapter
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from lora_grpo.config.schema import ModelConfig
from lora_grpo.loss.compiled_layers import compile_layers, restore_layers
from lora_grpo.models import base_model

pytestmark = pytest.mark.slow  # each graph takes the C++ compiler seconds


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # vLLM may have set it in the process of the tests
    with torch._dynamo.config.patch(disable=False):
        yield


def graphs():
    return counters["stats"]["unique_graphs"]


def eager_and_compiled(model, folder, inputs, **settings):
    """Return loss, gradients and metrics of both passes on the same model."""
    settings = {"max_completion_length": 12, **settings}
    passes = []
    for compiled in (False, True):
        trainer = make_trainer(model, folder, compiled_layers=compiled, **settings)
        assert trainer.packing_disabled_reason == ""
        assert trainer.loss_pass.compiles_layers == compiled
        torch.manual_seed(0)  # of dropout
        passes.append(loss_and_gradients(trainer, inputs))
    return passes


def check_equal(passes):
    (expected_loss, expected_gradients, expected_metrics), (loss, gradients, metrics) = passes
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)
    assert distance(gradients, expected_gradients) < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_those_of_the_eager_pass(checkpointing, tmp_path):
    model = with_adapter(random_model("qwen3", num_key_value_heads=1, num_hidden_layers=10))
    check_equal(eager_and_compiled(model, tmp_path, micro_batch([3, 1, 4]), gradient_checkpointing=checkpointing))
    # All layers share a norm, an MLP, and a norm of inputs without gradient. More than 8 would end compilation.
    compiled = graphs()
    assert 2 <= compiled <= 3
    trainer = make_trainer(model, tmp_path, compiled_layers=True, max_completion_length=12)
    loss_and_gradients(trainer, micro_batch([8, 8], seed=1))
    assert graphs() == compiled  # also of other lengths


def test_nf4(tmp_path):
    model = with_adapter(base_model.load_base(ModelConfig(bits=4)))
    base_model.keep_frozen(model)
    check_equal(eager_and_compiled(model, tmp_path, micro_batch([4, 4, 2])))
    assert graphs() > 0


def test_checkpointing_recomputes_the_same_dropout(tmp_path):
    results = []
    for checkpointing in (False, True):
        model = with_adapter(random_model(), lora_dropout=0.3)
        trainer = make_trainer(
            model,
            tmp_path,
            compiled_layers=True,
            max_completion_length=12,
            gradient_checkpointing=checkpointing,
        )
        torch.manual_seed(0)
        results.append(loss_and_gradients(trainer, micro_batch([4, 4])))
    check_equal(results)


def test_generation_is_eager_and_the_layers_can_be_restored(tmp_path):
    model = with_adapter(random_model())
    prompt = torch.arange(1, 9)[None]
    model.eval()
    expected = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    assert compile_layers(model) == ""
    assert not model.training
    compiled = graphs()
    for policy in (model, copy.deepcopy(model)):
        assert torch.equal(policy.generate(input_ids=prompt, max_new_tokens=8, do_sample=False), expected)
    assert graphs() == compiled
    restore_layers(model)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_without_a_compiler_the_layers_stay_eager(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no_such_compiler",))
    with fresh_cache():
        trainer = make_trainer(with_adapter(random_model()), tmp_path, compiled_layers=True)
    assert "ompiler" in reason(capsys)
    assert not trainer.loss_pass.compiles_layers
    loss_and_gradients(trainer, micro_batch([2, 2]))


def test_where_compilation_is_disabled_the_trainer_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    trainer = make_trainer(with_adapter(random_model()), tmp_path, compiled_layers=True)
    assert "TORCHDYNAMO_DISABLE" in reason(capsys)
    assert not trainer.loss_pass.compiles_layers


def reason(capsys):
    """Return the printed line that says why the layers are not compiled."""
    [line] = [line for line in capsys.readouterr().err.splitlines() if "not compiling the layers" in line]
    return line
