"""Chunked logprobs: the same loss and gradients, without the full logits."""

import pytest
import torch
from helpers.loss_passes import distance, loss_and_gradients, make_trainer, micro_batch, random_model, with_adapter
from helpers.tensor_memory import TensorMemory
from helpers.tiny_runs import run_tiny
from trl import GRPOTrainer

from lora_grpo.config.schema import ModelConfig
from lora_grpo.models import base_model

VOCABULARY = 50_000


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


def test_no_tensor_has_a_logit_for_every_token_and_entry(tmp_path):
    trainer = make_trainer(with_adapter(random_model(vocabulary=VOCABULARY)), tmp_path, max_completion_length=32)
    inputs = micro_batch([1] * 4, 32, VOCABULARY)
    tokens = int(inputs["completion_mask"].sum())
    largest = {}
    for chunked in (True, False):
        trainer.use_liger_kernel = chunked
        with TensorMemory() as held:
            trainer.compute_loss(trainer.model, dict(inputs)).backward()
        largest[chunked] = held.largest
    assert largest[True] <= 4 * max(tokens, 32) * 8192  # one tile in float32
    assert largest[False] >= 4 * 4 * 32 * VOCABULARY


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("gemma2", {"final_logit_softcapping": 1.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 8.0}),
    ],
)
def test_what_a_model_does_to_its_logits_is_done_to_tiles(family, changes, tmp_path, capsys):
    trainer = make_trainer(with_adapter(random_model(family, **changes)), tmp_path)
    assert trainer.use_liger_kernel
    assert "vocabulary" not in capsys.readouterr().err


def told(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "logits of the whole vocabulary" in line]


def test_a_model_that_does_more_than_tiles_know_of_keeps_whole_logits(tmp_path, capsys):
    model = random_model()
    model.register_forward_hook(lambda module, inputs, output: setattr(output, "logits", 2 * output.logits))
    trainer = make_trainer(with_adapter(model), tmp_path)
    assert not trainer.use_liger_kernel
    [line] = told(capsys)
    assert "the llama model transforms its logits" in line


def test_an_adapter_on_the_head_is_trained_by_whole_logits(tmp_path, capsys):
    model = with_adapter(random_model(tie_word_embeddings=False), ["q_proj", "lm_head"])
    trainer = make_trainer(model, tmp_path, max_completion_length=8)
    assert not trainer.use_liger_kernel
    [line] = told(capsys)
    assert "the output head is not a plain linear layer" in line
    _, gradients, _ = loss_and_gradients(trainer, micro_batch([1] * 4, 8))
    assert any("lm_head" in name and gradient.abs().max() > 0 for name, gradient in gradients.items())


def test_the_pass_before_the_loss_takes_a_micro_batch_at_once(tmp_path, monkeypatch):
    """A KL penalty needs the base's logprobs of all 8 completions. TRL's chunked path would compute them at once."""
    rows, chunked = [], GRPOTrainer._chunked_logps

    def counted(self, model, ids, *args, **given):
        if not torch.is_grad_enabled():
            rows.append(len(ids))
        return chunked(self, model, ids, *args, **given)

    monkeypatch.setattr(GRPOTrainer, "_chunked_logps", counted)
    run_tiny(tmp_path / "out", train={"beta": 0.04, "max_steps": 1, "micro_batch_size": 2})
    assert rows[-4:] == [2, 2, 2, 2]


def test_slices_say_what_the_whole_does(tmp_path):
    trainer = make_trainer(with_adapter(random_model(vocabulary=VOCABULARY)), tmp_path)
    ids = torch.randint(1, 300, (5, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[4, 9:] = 0
    with torch.no_grad():
        asked = (trainer.model, ids, mask, 6)
        whole = trainer._get_per_token_logps_and_entropies(*asked, compute_entropy=True)
        sliced = trainer._get_per_token_logps_and_entropies(*asked, batch_size=2, compute_entropy=True)
    assert sliced[2] is None
    for one, other in zip(whole[:2], sliced[:2], strict=True):
        assert one.shape == (5, 6)
        torch.testing.assert_close(one, other)
