"""Logits in tiles: the same loss and gradients, without the full logits."""

import pytest
import torch
from helpers.loss_passes import distance, loss_and_gradients, make_trainer, micro_batch, random_model, with_adapter
from helpers.tiny_runs import run_tiny

from lora_grpo.config.schema import ModelConfig
from lora_grpo.loss import exact_pass
from lora_grpo.models import base_model
from lora_grpo.training import trl_compat


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_entropy_and_gradients_are_those_of_whole_logits(temperature, tmp_path, monkeypatch):
    def trained_with_tiles(expected):
        model = with_adapter(base_model.load_base(ModelConfig(bits=4)))
        trainer = make_trainer(model, tmp_path, temperature=temperature, max_completion_length=12)
        assert trainer.loss_pass.uses_tiles == expected
        return loss_and_gradients(trainer, micro_batch([1] * 4))

    loss, gradients, metrics = trained_with_tiles(True)
    monkeypatch.setattr(trl_compat, "tiles_of", lambda trainer, score, model: None)
    whole_loss, whole_gradients, whole_metrics = trained_with_tiles(False)
    # float32: sums over the vocabulary have a different order.
    assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-7)
    assert metrics["entropy"] == pytest.approx(whole_metrics["entropy"], rel=1e-5)
    assert distance(gradients, whole_gradients) < 1e-5


def printed_lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "logits of the whole vocabulary" in line]


def test_a_model_that_does_more_than_tiles_know_of_keeps_whole_logits(tmp_path, capsys):
    model = random_model()
    forward = model.forward

    def doubling(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    model.forward = doubling
    trainer = make_trainer(with_adapter(model), tmp_path)
    assert not trainer.loss_pass.uses_tiles
    [line] = printed_lines(capsys)
    assert "the llama model transforms its logits" in line


def test_the_pass_before_the_loss_takes_a_micro_batch_at_once(tmp_path, monkeypatch):
    """A KL penalty needs the base's logprobs of all 8 completions. TRL's tiles (1.14) would compute them at once."""
    nums_rows = []
    score_in_slices = exact_pass.score_in_slices

    def recorded_slices(score, *args, **kwargs):
        def recorded(model, ids, *args, **kwargs):
            if not torch.is_grad_enabled():
                nums_rows.append(len(ids))
            return score(model, ids, *args, **kwargs)

        return score_in_slices(recorded, *args, **kwargs)

    monkeypatch.setattr(exact_pass, "score_in_slices", recorded_slices)
    run_tiny(tmp_path / "out", train={"beta": 0.04, "max_steps": 1, "micro_batch_size": 2})
    assert nums_rows[-4:] == [2, 2, 2, 2]
