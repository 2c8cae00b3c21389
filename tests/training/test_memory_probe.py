"""The memory probe: it runs the same computation as training, and restores the state."""

import json

import pytest
import torch
from helpers.tiny_runs import TINY, begin_tiny
from transformers import TrainerCallback

from lora_grpo.errors import RunError
from lora_grpo.training import train
from lora_grpo.training.memory_probe import probe

LONGEST = 40


class Probe(TrainerCallback):
    """Runs the probe where a run on a GPU does."""

    def __init__(self, trainer, config):
        self.trainer, self.config, self.calls = trainer, config, 0

    def on_train_begin(self, *args, **kwargs):
        self.calls += 1
        probe(self.trainer, self.config, LONGEST)


def whole_run(folder, *, probed):
    run, policy, trainer = begin_tiny(
        folder, lora={"rank": 4, "alpha": 8, "dropout": 0.1}, train={**TINY["train"], "beta": 0.1}
    )
    callback = Probe(trainer, run.config)
    if probed:
        trainer.add_callback(callback)
    run.begin(policy.record)
    train(run, policy, trainer)
    assert callback.calls == probed
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    kept = [{key: row[key] for key in row if "time" not in key and "per_second" not in key} for row in rows]
    return kept, (run.adapter / "adapter_model.safetensors").read_bytes()


def test_a_run_with_a_probe_ends_in_the_same_bits(tmp_path):
    assert whole_run(tmp_path / "with", probed=True) == whole_run(tmp_path / "without", probed=False)


def test_the_trainers_own_loss_meets_the_longest_micro_batch_of_all(tmp_path, monkeypatch):
    run, _, trainer = begin_tiny(tmp_path / "run", train={**TINY["train"], "beta": 0.1})
    met = {}
    loss = type(trainer)._compute_loss

    def validation_rows(self, model, inputs):
        met.update(inputs)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        met["gradients"] = all(parameter.grad is not None for parameter in trained)
        met["training"] = model.training
        return loss(self, model, inputs)

    monkeypatch.setattr(type(trainer), "_compute_loss", validation_rows)
    probe(trainer, run.config, LONGEST)
    rows, completion = run.config.train.micro_batch_size, run.config.sampling.max_completion_tokens
    assert met["prompt_ids"].shape == (rows, LONGEST)
    assert met["completion_mask"].shape == (rows, completion)
    assert met["completion_mask"].all()
    assert 0 < rows * LONGEST - met["prompt_mask"].sum() <= rows  # padding gives the same kind of mask as real batches
    assert len(met["prompt_ids"].unique(dim=0)) == rows / run.config.sampling.num_generations
    assert met["ref_per_token_logps"].shape == (rows, completion)
    assert met["gradients"]  # from an earlier pass
    assert met["training"]


def out_of_memory(trainer, error):
    """Make the last layer of the model run out of memory in its forward pass."""

    def fail(module, arguments):
        raise error

    return trainer.model.base_model.model.model.layers[-1].register_forward_pre_hook(fail)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_says_what_to_change(error, tmp_path):
    run, _, trainer = begin_tiny(tmp_path / "run")
    hook = out_of_memory(trainer, error)
    with pytest.raises(RunError) as refused:
        probe(trainer, run.config, LONGEST)
    hook.remove()
    message = str(refused.value)
    assert "\n" not in message
    assert "out of memory in a pass over 4 completions of 40 + 32 tokens" in message
    assert "--resume --train.micro-batch-size 2 (same result, slower)" in message
    assert "--overwrite --train.gradient-checkpointing or --train.optimizer adamw_8bit" in message
    assert "llocate" in message
    probe(trainer, run.config, LONGEST)  # and it can run again


def test_another_error_is_not_taken_for_want_of_memory(tmp_path):
    run, _, trainer = begin_tiny(tmp_path / "run")
    out_of_memory(trainer, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        probe(trainer, run.config, LONGEST)
