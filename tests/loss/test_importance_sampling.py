"""Importance weights are those of TRL, without TRL's pass for old logprobs."""

import math
import statistics
from dataclasses import dataclass

import pytest
import torch
from helpers.loss_passes import distance, make_trainer, random_model, with_adapter

from lora_grpo.training import trl_compat

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
WEIGHTS = "sampling/importance_sampling_ratio"
DIFFERENCE = "sampling/sampling_logp_difference"
ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, -1.5])


def trainer_of_given_rollouts(folder, beta=0.0, **settings):
    """Return a trainer whose sampler is off by up to 1.5 nats, and returns no logprob for one token."""
    model = with_adapter(random_model(), init_lora_weights=beta > 0)
    # The limits replace some of the ratios of tokens and of completions.
    limits = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 2.0}
    trainer = make_trainer(model, folder, max_completion_length=12, beta=beta, **limits, **settings)
    trl_compat.enable_importance_sampling(trainer)
    generator = torch.Generator().manual_seed(0)
    prompt_ids = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    completion_ids = [torch.randint(1, 300, (length,), generator=generator).tolist() for length in (12, 3, 7, 5)]
    with torch.no_grad():
        logprobs = [completion_logprobs(model, *ids) for ids in zip(prompt_ids, completion_ids, strict=True)]
    noise = [3 * torch.rand(len(ids), generator=generator) - 1.5 for ids in completion_ids]
    sampled = [(row + error).tolist() for row, error in zip(logprobs, noise, strict=True)]
    sampled[2][1] = math.nan
    masks = [[1] * len(ids) for ids in completion_ids]
    masks[0][4:6] = [0, 0]  # an answer of a tool
    rollouts = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": sampled, "env_mask": masks}
    trainer.rollout_func = lambda prompts, trainer: rollouts
    return trainer


def completion_logprobs(model, prompt, completion):
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(1)[range(len(completion)), completion]


@dataclass
class Step:
    loss: float
    gradients: dict
    metrics: dict
    rows_read: list
    """Number of rows of each pass through the model."""


def step_of(trainer, weights_in_loss, advantages=ADVANTAGES, micro_batches=1):
    """Sample, and compute the loss of all micro-batches of a step."""
    rows_read = []
    score = trainer.loss_pass._score

    def counted(model, ids, *args, **kwargs):
        rows_read.append(len(ids))
        return score(model, ids, *args, **kwargs)

    trainer.loss_pass._score = counted
    trainer.weights_in_loss = weights_in_loss
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    rollouts = trainer._generate_and_score_completions([{"prompt": "a"}] * 4)
    rollouts["advantages"] = advantages.clone()
    loss = 0.0
    for number in range(micro_batches):
        rows = slice(number * 4 // micro_batches, (number + 1) * 4 // micro_batches)
        inputs = {name: value[rows] if value.dim() else value for name, value in rollouts.items()}
        trainer.accelerator.gradient_state._set_sync_gradients(number == micro_batches - 1)
        loss_of_part = trainer.compute_loss(trainer.model, inputs)
        loss_of_part.backward()
        loss += loss_of_part.item()
    trainer.loss_pass._score = score

    weights = trainer.model.named_parameters()
    gradients = {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}
    metrics = {name: statistics.fmean(values) for name, values in trainer._metrics["train"].items()}
    del metrics["num_tokens"]  # counted since the start
    return Step(loss, gradients, metrics, rows_read)


def assert_same(step, expected, without=()):
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    assert distance(step.gradients, expected.gradients) < 1e-5
    assert step.metrics.keys() == expected.metrics.keys()
    for name in step.metrics.keys() - set(without):
        if not name.startswith(("time/", "rollouts/")):
            assert step.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-6), name


CASES = [("dapo", mode) for mode in MODES] + [("cispo", "sequence_mask"), ("vespo", "token_truncate")]


@pytest.mark.parametrize(("loss_type", "mode"), CASES)
def test_loss_gradient_and_metrics_are_those_of_trl_with_one_pass_less(loss_type, mode, tmp_path):
    trainer = trainer_of_given_rollouts(tmp_path, loss_type=loss_type, vllm_importance_sampling_mode=mode)
    expected = step_of(trainer, weights_in_loss=False)
    step = step_of(trainer, weights_in_loss=True)
    assert expected.rows_read == [4, 4]
    assert step.rows_read == [4]
    assert_same(step, expected)
    assert step.metrics[f"{DIFFERENCE}/max"] > 1
    assert step.metrics[f"{WEIGHTS}/min"] == (0.5 if mode.endswith("truncate") else 0)


def test_metrics_cover_all_micro_batches_of_a_step(tmp_path):
    trainer = trainer_of_given_rollouts(tmp_path)
    expected = step_of(trainer, weights_in_loss=False)
    step = step_of(trainer, weights_in_loss=True, micro_batches=2)
    assert step.rows_read == [2, 2]
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    for name in (f"{DIFFERENCE}/mean", f"{DIFFERENCE}/max", f"{WEIGHTS}/min", f"{WEIGHTS}/mean", f"{WEIGHTS}/max"):
        assert step.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4), name


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_completions_without_an_advantage_are_not_read_at_all(mode, tmp_path):
    advantages = torch.tensor([1.0, 0.0, 0.3, 0.0])
    trainer = trainer_of_given_rollouts(tmp_path, vllm_importance_sampling_mode=mode)
    expected = step_of(trainer, weights_in_loss=False, advantages=advantages)
    step = step_of(trainer, weights_in_loss=True, advantages=advantages)
    assert expected.rows_read == [4, 2]
    assert step.rows_read == [2]
    sampling_metrics = [name for name in step.metrics if name.startswith("sampling/")]
    assert len(sampling_metrics) == 5
    assert_same(step, expected, without=sampling_metrics)  # which cover two of the four completions


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_a_micro_batch_without_any_advantage_needs_no_pass(mode, tmp_path):
    advantages = torch.tensor([1.0, -0.5, 0.0, 0.0])
    trainer = trainer_of_given_rollouts(tmp_path, vllm_importance_sampling_mode=mode)
    expected = step_of(trainer, weights_in_loss=False, advantages=advantages)
    step = step_of(trainer, weights_in_loss=True, advantages=advantages, micro_batches=2)
    assert step.rows_read == [2]
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    assert distance(step.gradients, expected.gradients) < 1e-5

    flat = step_of(trainer, weights_in_loss=True, advantages=0 * advantages, micro_batches=2)
    assert flat.rows_read == [1] and flat.loss == 0
    assert flat.gradients.keys() == expected.gradients.keys()
    assert not any(gradient.abs().max() for gradient in flat.gradients.values())
    assert flat.metrics[f"{DIFFERENCE}/mean"] > 0  # of the completion that is read to compare the sampler


def test_the_passes_for_an_updated_policy_and_for_the_reference_stay(tmp_path):
    for settings, passes in (({"num_iterations": 2}, 2), ({"steps_per_generation": 2}, 2), ({"beta": 0.1}, 2)):
        trainer = trainer_of_given_rollouts(tmp_path, **settings)
        expected = step_of(trainer, weights_in_loss=False)
        step = step_of(trainer, weights_in_loss=True)
        assert len(step.rows_read) == passes, settings
        assert_same(step, expected)


def test_without_the_correction_nothing_is_weighted(tmp_path):
    trainer = trainer_of_given_rollouts(tmp_path, vllm_importance_sampling_correction=False)
    step = step_of(trainer, weights_in_loss=True)
    assert step.rows_read == [4]
    assert f"{WEIGHTS}/mean" not in step.metrics
    assert step.metrics[f"{DIFFERENCE}/max"] > 1
    assert not trainer.vllm_importance_sampling_correction
