"""Logits in tiles: the same loss and gradients, without the full logits."""

import pytest
import torch
from helpers.loss_passes import distance, loss_and_gradients, make_trainer, micro_batch, random_model, with_adapter
from helpers.tiny_runs import run_tiny
from trl import GRPOTrainer

from lora_grpo.config.schema import ModelConfig
from lora_grpo.models import base_model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_entropy_and_gradients_are_those_of_whole_logits(temperature, tmp_path):
    model = with_adapter(base_model.load_base(ModelConfig(bits=4)))
    trainer = make_trainer(model, tmp_path, temperature=temperature, max_completion_length=12)
    assert trainer.use_liger_kernel
    inputs = micro_batch([1] * 4)
    loss, gradients, metrics = loss_and_gradients(trainer, inputs)
    trainer.use_liger_kernel = False
    whole_loss, whole_gradients, whole_metrics = loss_and_gradients(trainer, inputs)
    # float32: sums over the vocabulary have a different order.
    assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-7)
    assert metrics["entropy"] == pytest.approx(whole_metrics["entropy"], rel=1e-5)
    assert distance(gradients, whole_gradients) < 1e-5


def printed_lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "logits of the whole vocabulary" in line]


def test_a_model_that_does_more_than_tiles_know_of_keeps_whole_logits(tmp_path, capsys):
    model = random_model()
    model.register_forward_hook(lambda module, inputs, output: setattr(output, "logits", 2 * output.logits))
    trainer = make_trainer(with_adapter(model), tmp_path)
    assert not trainer.use_liger_kernel
    [line] = printed_lines(capsys)
    assert "the llama model transforms its logits" in line


def test_the_pass_before_the_loss_takes_a_micro_batch_at_once(tmp_path, monkeypatch):
    """A KL penalty needs the base's logprobs of all 8 completions. TRL's chunked path would compute them at once."""
    nums_rows = []
    chunked_logps = GRPOTrainer._chunked_logps

    def recorded(self, model, ids, *args, **kwargs):
        if not torch.is_grad_enabled():
            nums_rows.append(len(ids))
        return chunked_logps(self, model, ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_chunked_logps", recorded)
    run_tiny(tmp_path / "out", train={"beta": 0.04, "max_steps": 1, "micro_batch_size": 2})
    assert nums_rows[-4:] == [2, 2, 2, 2]
