"""Metrics added to each step. The rest is checked on whole runs (test_run.py, test_monitor.py)."""

import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.tiny_runs import run_tiny
from measure_importance_sampling import LIMIT, weights

from lora_grpo.config.trl_fields import CHOICES
from lora_grpo.report import report_line
from lora_grpo.sampling import VllmSampler, build_sampler
from lora_grpo.training import StepMetrics
from lora_grpo.training.step_metrics import _completion_columns


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


class NoisyVllm(VllmSampler):
    """Returns the completions of another sampler with noise in their logprobs. As a VllmSampler, it is corrected."""

    def __init__(self, sampler):
        self.sampler, self.tokenizer, self.eos_token_ids = sampler, sampler.tokenizer, sampler.eos_token_ids

    def sample(self, *arguments, **options):
        self.random = random.Random(0)
        groups = self.sampler.sample(*arguments, **options)
        return [[replace(each, logprobs=self.noisy(each.logprobs)) for each in group] for group in groups]

    def noisy(self, logprobs):
        """Half of the completions have noise, and every tenth of their tokens has no logprob."""
        if self.random.random() < 0.5:
            return logprobs
        noisy = [each + self.random.gauss(0, 0.8) for each in logprobs]
        return [None if index % 10 == 3 else each for index, each in enumerate(noisy)]


@pytest.fixture(scope="module")
def corrected(tmp_path_factory):
    """A run with one step that corrects for the sampler's logprobs, its trainer, and what TRL scored last."""
    folder, seen, log = tmp_path_factory.mktemp("corrected") / "run", {}, StepMetrics._log_masked

    def log_and_keep(trainer, scored):
        seen.update(trainer=trainer, scored=scored)
        log(trainer, scored)

    with pytest.MonkeyPatch.context() as while_tested, pytest.MonkeyPatch.context() as patch:
        while_tested.setattr(StepMetrics, "_log_masked", log_and_keep)
        patch.setattr("helpers.tiny_runs.build_sampler", lambda *arguments: NoisyVllm(build_sampler(*arguments)))
        patch.setattr("lora_grpo.training.trainer.check_logprobs", lambda *arguments: {})
        run, _ = run_tiny(folder, train={"max_steps": 1}, monitor={"stop_on": ("nan",)})
        patch.undo()
        yield run, seen


def masked_by_trl(trainer, scored):
    """Return which tokens have a weight that TRL masked or truncated."""
    mask, weights = scored["completion_mask"].bool(), scored["importance_sampling_ratio"]
    args = trainer.args
    limits = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if trainer.vllm_importance_sampling_mode.endswith("mask"):
        limited = weights == 0
    else:
        limited = sum((weights == limit for limit in limits if limit is not None), torch.zeros_like(mask)).bool()
    return limited & mask, mask


@pytest.mark.parametrize(("low", "high"), [(None, 3.0), (0.5, 1.5), (0.8, None)])
@pytest.mark.parametrize("mode", CHOICES["vllm_importance_sampling_mode"])
def test_masked_shares_are_those_of_trl(mode, low, high, corrected, monkeypatch):
    _, seen = corrected
    trainer = seen["trainer"]
    for name, value in (("mode", mode), ("clip_min", low), ("clip_max", high)):
        monkeypatch.setattr(trainer, f"vllm_importance_sampling_{name}", value)
        monkeypatch.setattr(trainer.args, f"vllm_importance_sampling_{name}", value)
    trainer.model.train()
    trainer._metrics["train"].clear()
    trainer._generate_and_score_completions([trainer.train_dataset[index // 4] for index in range(8)])
    masked, mask = masked_by_trl(trainer, seen["scored"])
    metrics = trainer._metrics["train"]
    assert metrics["sampling/masked_tokens"] == [pytest.approx((masked.sum() / mask.sum()).item())]
    assert metrics["sampling/masked_completions"] == [masked.any(1).float().mean().item()]
    assert 0 < masked.sum() < mask.sum()
    if (low, high) == (None, LIMIT):  # the limits that the tool compares modes with
        difference = seen["scored"]["old_per_token_logps"] - seen["scored"]["sampling_per_token_logps"]
        computed, _ = weights(difference.nan_to_num(), mask, mode)
        assert torch.allclose(computed[mask], seen["scored"]["importance_sampling_ratio"].expand_as(mask)[mask])


def test_masked_shares_are_logged_and_reported_with_their_mode(corrected):
    run, _ = corrected
    (step,) = (json.loads(line) for line in run.metrics.read_text().splitlines())
    assert 0 < step["sampling/masked_tokens"] < 1 and 0 < step["sampling/masked_completions"] < 1
    assert run.record["importance_sampling"] == {"mode": "token_truncate", "clip_min": None, "clip_max": 3.0}
    assert "not written" not in report_line(run.folder)
    page = (run.folder / "report" / "report.md").read_text()
    assert f"token_truncate; masked or truncated {100 * step['sampling/masked_tokens']:.2g}% of the tokens" in page


def test_the_alarms_know_the_mode(corrected):
    _, seen = corrected
    assert seen["trainer"].monitor.alarms.importance_sampling == "token_truncate"


TWO_RANKS = """
import os, sys
from collections import defaultdict
from pathlib import Path
import torch
from accelerate import Accelerator
from lora_grpo.training import StepMetrics

rank = int(os.environ["RANK"])
trainer = StepMetrics()
trainer.accelerator, trainer._metrics = Accelerator(cpu=True), {"train": defaultdict(list)}
trainer.vllm_importance_sampling_mode = "token_truncate"
trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = None, 3.0
# Rank 0 has 2 of 4 tokens above the limit, in 1 of 2 completions; rank 1, with other padding, 1 of 6, in 1 of 3.
differences = [[[2.0, 2.0], [0.0, 0.0]], [[2.0, 0.0, 0.0], [0.0, 0.0, 9.0], [0.0, 9.0, 9.0]]][rank]
mask = [[[1, 1], [1, 1]], [[1, 1, 1], [1, 1, 0], [1, 0, 0]]][rank]
scored = {"completion_mask": torch.tensor(mask), "old_per_token_logps": torch.tensor(differences)}
scored["sampling_per_token_logps"] = torch.zeros_like(scored["old_per_token_logps"])
trainer._log_masked(scored)
Path(sys.argv[1], f"metrics.{rank}").write_text(repr(dict(trainer._metrics["train"])))
torch.distributed.destroy_process_group()
"""


def test_masked_shares_count_the_rollouts_of_all_processes(warm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    done = warm.start(Path(__file__).parents[1] / "helpers" / "rank_forks.py", 2, script, tmp_path).end()
    assert done.returncode == 0, done.stderr
    expected = {"sampling/masked_tokens": [0.3], "sampling/masked_completions": [0.4]}
    assert [(tmp_path / f"metrics.{rank}").read_text() for rank in (0, 1)] == [repr(expected)] * 2


def test_a_sampler_that_is_not_corrected_masks_nothing(tmp_path):
    run, _ = run_tiny(tmp_path / "run", train={"max_steps": 1})
    assert not any("masked" in name for name in json.loads(run.metrics.read_text()))
    assert "importance_sampling" not in run.record


def test_logprobs_are_compared_in_the_columns_of_the_completion():
    """Unsloth moves a prompt's padding behind its completion and returns the columns from the first completion on."""
    prompt_mask = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]])
    completion_mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    trl = torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]])
    moved = torch.tensor([[1.0, 2.0, 0.0, 0.0], [9.0, 3.0, 0.0, 0.0], [9.0, 9.0, 5.0, 6.0]])
    for logprobs in (trl, moved):
        scored = {"old_per_token_logps": logprobs, "completion_mask": completion_mask, "prompt_mask": prompt_mask}
        assert torch.equal(_completion_columns(scored) * completion_mask, trl * completion_mask)
