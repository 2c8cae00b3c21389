"""Metrics that are added to each step. The rest is checked on whole runs (test_run.py, test_monitor.py)."""

from collections import defaultdict

import pytest

from lora_grpo.training import StepMetrics


class Generates:
    """Two completions. One token has no logprob, as vLLM returns for NaN."""

    def __init__(self):
        self._metrics = {"train": defaultdict(list)}

    def _generate(self, prompts):
        return [[1], [1]], [[5, 6], [7]], None, None, [[-0.5, None], [-1.5]], None, None, None

    def log(self, logs):
        self.logged = {name: sum(values) / len(values) for name, values in self._metrics["train"].items()}


class Trainer(StepMetrics, Generates):
    pass


def test_the_entropy_of_a_loss_without_one_is_estimated_from_the_sampled_tokens():
    trainer = Trainer()
    trainer.generate_rollouts(["a", "b"])
    trainer.log({})
    assert trainer.logged["entropy"] == pytest.approx(1.0)
    trainer._metrics["train"].clear()
    trainer.log({})
    assert "entropy" not in trainer.logged


def test_the_entropy_of_the_loss_is_kept():
    trainer = Trainer()
    trainer.generate_rollouts(["a", "b"])
    trainer._metrics["train"]["entropy"].append(0.3)
    trainer.log({})
    assert trainer.logged["entropy"] == 0.3
