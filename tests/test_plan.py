"""The plan of a run on the machine at hand: what it settles, says, records and refuses."""

import dataclasses
import json

import pytest
from test_hardware import machine  # noqa: F401 (a fixture)
from test_memory import LLAMA_ONE, QWEN25_HALF

from lora_grpo.command_line import parse, replace
from lora_grpo.config import Invocation, RunConfig
from lora_grpo.config_check import micro_batches
from lora_grpo.errors import UserError
from lora_grpo.plan import make_plan


def planned(config, **how):
    """What a recipe gets: the settled configuration, and what run.json says of the GPU's memory."""
    config, plan = make_plan(config, Invocation(**how))
    return config, plan.record()["memory"]


@pytest.fixture
def model(tmp_path):
    """A folder with a model's configuration and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN25_HALF))
    return folder


def asked(model, **changes):
    settings = {"model": {"name": str(model), "engine": "peft"}, "train": {"gradient_checkpointing": True}}
    settings["sampling"] = {"backend": "transformers"}
    return replace(replace(RunConfig(output_dir="out"), settings), changes)


def test_without_a_gpu_a_configuration_stays_as_it_is(machine, model, capsys):  # noqa: F811
    config = asked(model)
    assert planned(config) == (config, None)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["memory", "work", "time"]
    assert told[0].startswith("memory: micro-batch 8 (at most ")
    assert told[1] == "work: 200 steps of 64 completions, at most 13.1 million tokens"
    assert told[2].startswith("time: no estimate for a CPU; the first 3 steps of a run in out give one")


def test_on_a_gpu_what_is_open_is_settled_said_and_recorded(machine, model, capsys):  # noqa: F811
    machine(8188)
    config, record = planned(asked(model))
    assert config.train.micro_batch_size in micro_batches(config)
    assert config.train.micro_batch_size > 1
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(f"memory: micro-batch {config.train.micro_batch_size} (at most ")
    assert ", 64 completions at once; planned " in line
    assert line.endswith(" of 7.5 free")
    assert record["derived"] == ["train.micro_batch_size"]
    assert record["gpu"] == "Card 0"
    assert record["planned_gib"]["weights"] == pytest.approx(0.43, abs=0.01)
    assert set(record["planned_phases_gib"]) == {"drawing", "loss", "backward"}
    assert json.loads(json.dumps(record)) == record


def test_several_processes_plan_with_the_whole_card(machine, model, monkeypatch):  # noqa: F811
    machine(8188)
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, record = planned(asked(model))
    assert record["free_gib"] == record["total_gib"]


def test_a_model_that_cannot_be_planned_wants_the_numbers_named(machine, model, capsys):  # noqa: F811
    machine(8188)
    (model / "config.json").write_text(json.dumps({**LLAMA_ONE, "model_type": "gemma3"}))
    with pytest.raises(UserError, match="the memory of a gemma3 model cannot be planned"):
        planned(asked(model))
    named = replace(asked(model), {"train": {"micro_batch_size": 2}, "model": {"gpu_memory_share": 0.4}})
    assert planned(named) == (named, None)
    assert "memory: not planned: the memory of a gemma3 model" in capsys.readouterr().err
    (model / "config.json").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        planned(asked(model))


def test_a_record_taken_to_another_card_is_planned_anew(machine, model, tmp_path):  # noqa: F811
    machine(8188)
    (model / "model.safetensors").write_bytes(b"")
    config, record = planned(asked(model))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"lora_grpo_run": 1, "config": config.to_dict(), "memory": record}))
    presets = {"starter": {}}

    def reread(*flags):
        return parse(
            ["--config", str(path), "--preset", "starter", *flags], recipe="x", description="", presets=presets
        )[0]

    assert reread().train.micro_batch_size is None
    assert reread().model.gpu_memory_share is None
    assert reread("--train.micro-batch-size", "4").train.micro_batch_size == 4
    named = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=2))
    settled, record = planned(named)
    assert record["derived"] == []
    path.write_text(json.dumps({"lora_grpo_run": 1, "config": settled.to_dict(), "memory": record}))
    assert reread().train.micro_batch_size == 2
