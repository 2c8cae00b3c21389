"""Metrics of a step that TRL does not log, from values that a trainer hands over."""

import time

import pytest
import torch

from lora_grpo.monitoring import StepMetrics, clock


def step(**values):
    """Return the metrics of a step in which the sampler returned three tokens, one of them without a logprob."""
    metrics = StepMetrics(values)
    with metrics.timed("rollouts"):
        pass
    metrics.add_rollouts([[5, 6], [7]], [[-1.0, -2.0], [None]])
    metrics.complete()
    return values


def test_the_speed_of_the_sampler_is_that_of_its_tokens():
    values = step()
    assert values["rollouts/tokens_per_second"] == [pytest.approx(3 / values["time/rollouts"][0])]


def test_the_entropy_is_estimated_only_if_the_loss_does_not_log_it():
    assert step()["entropy"] == [1.5]
    assert step(entropy=[0.2])["entropy"] == [0.2]


def test_an_estimate_is_that_of_its_own_step():
    values = {}
    metrics = StepMetrics(values)
    with metrics.timed("rollouts"):
        pass
    metrics.add_rollouts([[5]], [[-1.0]])
    metrics.complete()
    values.clear()  # as the trainer does after a step
    metrics.complete()  # a step that uses the same rollouts
    assert "entropy" not in values


def test_a_time_is_read_when_the_gpu_has_done_its_work(monkeypatch):
    work_left = [0.05]  # seconds that a GPU still needs

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(work_left.pop()))
    started = time.perf_counter()
    assert clock() - started >= 0.05
    assert work_left == []


def test_a_machine_without_a_gpu_does_not_wait(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(torch.cuda, "synchronize")
    assert clock() <= clock()
