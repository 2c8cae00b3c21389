"""Completions without an advantage are not computed, and nothing changes but the work."""

import math

import pytest
from helpers.loss_passes import distance, loss_and_gradients, make_trainer, micro_batch, random_model, with_adapter

from lora_grpo.loss import exact_pass

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def batch_with_zero_advantage():
    """Return three groups of four; the rewards of the second are equal."""
    inputs = micro_batch([4, 4, 4])
    inputs["advantages"][4:8] = 0
    return inputs


def rows_read(trainer, monkeypatch):
    """Return a list that gets the number of rows of each pass."""
    nums_rows = []
    score = trainer.loss_pass._score

    def recorded(model, ids, *args, **kwargs):
        nums_rows.append(len(ids))
        return score(model, ids, *args, **kwargs)

    monkeypatch.setattr(trainer.loss_pass, "_score", recorded)
    return nums_rows


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_gradients_and_clipping_are_those_of_all_completions(loss_type, tmp_path, monkeypatch):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, loss_type=loss_type, max_completion_length=12)
    read = rows_read(trainer, monkeypatch)
    inputs = batch_with_zero_advantage()
    loss, gradients, metrics = loss_and_gradients(trainer, inputs)
    monkeypatch.setattr(exact_pass, "rows_with_advantage", lambda inputs, needs_one: None)
    all_loss, all_gradients, all_metrics = loss_and_gradients(trainer, inputs)
    assert read == [8, 12]
    assert loss == pytest.approx(all_loss, rel=1e-6)
    assert distance(gradients, all_gradients) < 1e-6
    assert metrics.keys() == all_metrics.keys()
    # The entropy is estimated, and the mismatch with the sampler leaves completions out.
    for name in metrics.keys() - {"entropy", "sampling/sampling_logp_difference/mean"}:
        assert metrics[name] == pytest.approx(all_metrics[name]), name


def test_the_entropy_of_what_is_left_out_is_that_of_its_samples(tmp_path):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12)
    inputs = batch_with_zero_advantage()
    mask = inputs["completion_mask"].bool()
    *_, metrics = loss_and_gradients(trainer, inputs)
    rows_with_advantage = [*range(4), *range(8, 12)]
    computed_inputs = {}
    for name, value in inputs.items():
        computed_inputs[name] = value[rows_with_advantage] if value.dim() else value
    *_, computed_metrics = loss_and_gradients(trainer, computed_inputs)
    entropies_left_out = -inputs["sampling_per_token_logps"][4:8][mask[4:8]]
    total = entropies_left_out.sum().item() + computed_metrics["entropy"] * mask[rows_with_advantage].sum().item()
    assert metrics["entropy"] == pytest.approx(total / mask.sum().item(), rel=1e-5)
    # The mismatch is that of the completions that both have computed.
    name = "sampling/sampling_logp_difference/mean"
    assert metrics[name] == pytest.approx(computed_metrics[name], rel=1e-5)


def test_logprobs_that_the_sampler_lacks_do_not_reach_the_loss(tmp_path):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12)
    inputs = batch_with_zero_advantage()
    expected, *_ = loss_and_gradients(trainer, inputs)
    inputs["sampling_per_token_logps"][5, 0] = math.nan  # as from vLLM
    loss, _, metrics = loss_and_gradients(trainer, inputs)
    assert loss == expected and math.isfinite(metrics["entropy"])


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(("processes", "is_last", "rows"), [(1, False, []), (1, True, [1]), (2, False, [1])])
def test_a_micro_batch_that_teaches_nothing_reads_at_most_one_completion(
    loss_type, processes, is_last, rows, tmp_path, monkeypatch
):
    """With several processes, DDP needs a forward pass. The last micro-batch compares the sampler, if none has."""
    trainer = make_trainer(with_adapter(random_model()), tmp_path, loss_type=loss_type, max_completion_length=12)
    state = trainer.accelerator.gradient_state._shared_state  # of all accelerators
    monkeypatch.setitem(state, "sync_gradients", is_last)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", processes)
    read = rows_read(trainer, monkeypatch)
    inputs = batch_with_zero_advantage()
    inputs["advantages"][:] = 0
    loss, gradients, metrics = loss_and_gradients(trainer, inputs)
    assert read == rows
    assert loss == 0 and gradients
    assert all(gradient.abs().max() == 0 for gradient in gradients.values())
    assert ("sampling/sampling_logp_difference/mean" in metrics) == is_last
    if not rows:
        mask = inputs["completion_mask"].bool()
        assert metrics["entropy"] == pytest.approx(-inputs["sampling_per_token_logps"][mask].mean().item(), rel=1e-5)


@pytest.mark.parametrize("settings", [{"beta": 0.04}, {"entropy_coef": 0.01}, {"top_entropy_quantile": 0.5}], ids=str)
def test_what_acts_on_all_tokens_keeps_all_completions(settings, tmp_path, monkeypatch):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, max_completion_length=12, **settings)
    read = rows_read(trainer, monkeypatch)
    inputs = batch_with_zero_advantage()
    inputs["ref_per_token_logps"] = inputs["sampling_per_token_logps"]
    loss_and_gradients(trainer, inputs)
    assert read == [12]
