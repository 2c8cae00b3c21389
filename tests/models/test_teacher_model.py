"""A loaded teacher computes what it computes alone, and leaves the trained adapter as it was."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from lora_grpo import starter
from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.models import Teacher, base_model, load_policy, load_teacher

STARTER = ModelConfig(name=str(starter.model_path()), bits=16)
IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A saved adapter of the bundled model with random weights and dropout, on other layers than the trained one."""
    torch.manual_seed(3)
    settings = {"r": 3, "target_modules": ["v_proj", "down_proj"], "lora_dropout": 0.5, "init_lora_weights": False}
    model = get_peft_model(base_model.load_base(STARTER), LoraConfig(task_type="CAUSAL_LM", **settings))
    folder = tmp_path_factory.mktemp("teacher") / "adapter"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def policy():
    """The bundled model in training mode, with a trained adapter."""
    settings = {"model": {"name": STARTER.name, "bits": 16, "engine": "peft"}}
    settings |= {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}
    policy = load_policy(replace(RunConfig(), settings))
    torch.manual_seed(4)
    for name, parameter in policy.model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    policy.model.train()
    return policy


@torch.no_grad()
def logits_of(model):
    return model(IDS).logits


def logits_of_adapter(adapter):
    return logits_of(PeftModel.from_pretrained(base_model.load_base(STARTER), str(adapter)).eval())


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def teacher_of(kind, adapter):
    if kind == "base":
        return Teacher("starter", "base")
    return Teacher("other", kind, adapter=adapter, base=STARTER if kind == "model" else None)


@pytest.mark.parametrize("kind", ["base", "adapter", "model"])
def test_a_teacher_computes_what_it_computes_alone(adapter, policy, kind):
    """Also in training mode, and with the dropout with which it was trained."""
    before = logits_of(policy.model)
    trained = trainable(policy.model)
    teacher = load_teacher(teacher_of(kind, adapter), policy)
    with teacher.active():
        logits = logits_of(teacher.model)
    expected = logits_of(base_model.load_base(STARTER).eval()) if kind == "base" else logits_of_adapter(adapter)
    assert torch.allclose(logits, expected, atol=1e-5)
    assert not torch.allclose(logits, before, atol=1e-2)
    assert torch.equal(logits_of(policy.model), before)
    assert trainable(policy.model) == trained
    assert kind != "model" or not trainable(teacher.model)


@pytest.mark.parametrize("kind", ["base", "adapter"])
def test_an_error_leaves_the_trained_adapter_active(adapter, policy, kind):
    before = logits_of(policy.model)
    trained = trainable(policy.model)
    teacher = load_teacher(teacher_of(kind, adapter), policy)
    with pytest.raises(RuntimeError, match="out of memory"), teacher.active():
        raise RuntimeError("out of memory")
    assert torch.equal(logits_of(policy.model), before)
    assert trainable(policy.model) == trained


@pytest.mark.parametrize("kind", ["adapter", "model"])
@pytest.mark.parametrize("problem", ["missing", "unexpected", "other sizes", "truncated"])
def test_an_adapter_that_does_not_fit_is_one_line(adapter, policy, tmp_path, kind, problem):
    folder = shutil.copytree(adapter, tmp_path / "damaged")
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    name, weight = next(iter(weights.items()))
    if problem == "missing":
        del weights[name]
    elif problem == "unexpected":
        weights[name.replace("layers.0.", "layers.99.")] = weight.clone()
    elif problem == "other sizes":
        weights[name] = torch.zeros(5, 5)
    save_file(weights, file)
    if problem == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="the adapter of --teacher other") as raised:
        load_teacher(teacher_of(kind, folder), policy)
    assert "\n" not in str(raised.value)


def test_a_teacher_of_the_hub_is_recorded_with_its_commit(policy, tmp_path, monkeypatch):
    commit = "0" * 39 + "1"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--large"
    shutil.copytree(starter.model_path(), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    named = Teacher("owner/large", "model", base=ModelConfig("owner/large", bits=16))
    teacher = load_teacher(named, policy)
    with teacher.active():
        logits = logits_of(teacher.model)
    assert torch.allclose(logits, logits_of(base_model.load_base(STARTER).eval()), atol=1e-5)
    record = teacher.teacher.record()
    assert (record["name"], record["base_model"], record["revision"]) == ("owner/large", "owner/large", commit)
    assert str(tmp_path) not in json.dumps(record)
