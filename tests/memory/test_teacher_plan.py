"""The memory of a teacher in a plan, and which teacher is advised if it does not fit."""

import json

import numpy as np
import pytest
from helpers.model_configs import QWEN25_HALF
from safetensors.numpy import save_file

from lora_grpo.config import Invocation, RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.memory import Shape, make_plan, summary
from lora_grpo.memory.parameters import weight_bytes

QWEN25_7B = {
    **{**QWEN25_HALF, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
}
QWEN25_72B = {
    **{**QWEN25_7B, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"num_hidden_layers": 80, "intermediate_size": 29568},
}
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture
def folders(tmp_path):
    """Folders of a model, of two larger ones and of an adapter, with configurations and hardly any weights."""
    for name, config in (("model", QWEN25_HALF), ("large", QWEN25_7B), ("huge", QWEN25_72B)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "model"), "r": 8, "lora_alpha": 16}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**adapter, "target_modules": TARGETS}))
    save_file(
        {"base_model.model.x.lora_A.weight": np.zeros(1, np.float32)},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    return tmp_path


FIXED = {"gradient_checkpointing": True, "micro_batch_size": 8}
"""Settings of the training with which plans can be compared."""


def planned(folders, name=None, *, bits_of_model=4, train=FIXED, **teacher):
    """Return the plan of a run with a teacher."""
    changes = {
        "model": {"name": str(folders / "model"), "engine": "peft", "bits": bits_of_model},
        "train": train,
        "sampling": {"backend": "transformers"},
        "teacher": {"name": str(folders / name) if name else None, **teacher},
    }
    config = replace(RunConfig(output_dir="out"), changes)
    return make_plan(config, Invocation(plan=True))[1]


def test_another_adapter_hardly_needs_memory(machine, folders):
    machine(8188)
    without = planned(folders).estimate
    plan = planned(folders, "adapter")
    shape = Shape.of(QWEN25_HALF)
    assert plan.estimate.parts["teacher"] == 4 * sum(shape.adapter_tensors(8, tuple(TARGETS)))
    assert without.needed < plan.estimate.needed <= 1.05 * without.needed
    [line] = [line for line in summary(plan) if line.startswith("teacher ")]
    assert "an adapter on the same base" in line


@pytest.mark.parametrize("bits", [4, 16])
def test_a_second_model_has_its_weights_in_every_phase(machine, folders, bits):
    machine(24564)
    plan = planned(folders, "large", bits=bits)
    assert plan.estimate.parts["teacher"] == weight_bytes(Shape.of(QWEN25_7B), bits)
    assert all(parts["teacher"] for parts in plan.estimate.phases.values())
    assert "teacher" in plan.record()["memory"]["planned_phases_gib"]


def test_whole_distributions_need_more_than_sampled_tokens(machine, folders):
    machine(24564)
    sampled = planned(folders, "adapter").estimate
    distributions = planned(folders, "adapter", loss="jsd").estimate
    assert sampled.parts["divergence"] == 0
    assert distributions.phases["loss"]["divergence"] > 0
    assert "divergence" not in distributions.phases["backward"]


@pytest.mark.parametrize(
    ("gpu", "name", "bits", "advice"),
    [
        (12282, "large", 16, r"pass --teacher\.bits 4, or an adapter of"),
        (12282, "huge", 4, r"pass an adapter of .*model as --teacher.*less than [\d.]+ GiB of weights"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_with_one_that_does(machine, folders, gpu, name, bits, advice):
    machine(gpu)
    with pytest.raises(UserError, match=advice) as raised:
        planned(folders, name, bits=bits)
    assert "\n" not in str(raised.value)


def test_a_teacher_whose_memory_is_unknown_is_not_planned(machine, folders):
    (folders / "large" / "config.json").write_text(json.dumps({"model_type": "falcon", "vocab_size": 152064}))
    plan = planned(folders, "large")
    assert plan.estimate is None
    assert plan.not_planned.startswith("--teacher ")


def test_on_a_gpu_a_teacher_whose_memory_is_unknown_wants_the_numbers_named(machine, folders):
    machine(24564)
    (folders / "large" / "config.json").write_text(json.dumps({"model_type": "falcon", "vocab_size": 152064}))
    with pytest.raises(UserError, match=r"^--teacher .*large: .* of type falcon .*; pass --train\.micro-batch-size$"):
        planned(folders, "large", train={})
    config = planned(folders, "large", bits_of_model="auto", train={"micro_batch_size": 2}).config
    assert (config.model.bits, config.train.gradient_checkpointing) == (4, True)
