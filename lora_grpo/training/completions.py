"""Measure, score and write completions: those of training steps, and those of validation passes.

The validation set is taken out of the training rows and sampled during training. It is not the evaluation set, because
rows that select the best adapter or trigger early stopping must not also be used to evaluate the run.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import console, distributed
from lora_grpo.files import atomic, json_files
from lora_grpo.grading import Row
from lora_grpo.rewards import ScoredBatch, Scorer
from lora_grpo.rollouts import Episode, play_all
from lora_grpo.runs import Run
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed
from lora_grpo.training.trl_compat import TrlHooks, gather_rewards, reward_arguments, sampled_tokens, step_values

LOGPROB_MISMATCH = "sampling/sampling_logp_difference/mean"
"""TRL's name for the mean absolute logprob difference between sampler and trainer, in nats per token."""


class StepMetrics(TrlHooks):
    """Mixin that adds metrics to each step. List it before the GRPOTrainer class in the bases.

    - `time/rollouts` and `time/rewards`, in seconds, and `rollouts/tokens_per_second`, for the completions of this
      process.
    - `entropy`, if the loss does not log it (Unsloth's): the mean of -logprob over the sampled tokens, an estimate.
      (Otherwise that estimate is used for completions that the loss pass leaves out, see SkipZeroAdvantage.)
    - `LOGPROB_MISMATCH`. TRL computes it only for vLLM, with another forward pass over all completions. This class
      computes it from the logprobs of the loss when rollouts are used for the first time.
    """

    _inputs: dict[str, Any] | None = None
    _surprisals: Sequence[float] = ()
    """-logprob of each token sampled in this step, in nats."""

    def generate_rollouts(self, prompts: list[Any]) -> Any:
        if not self.model.training:  # TRL's `evaluate`
            return super().generate_rollouts(prompts)
        with self._timed("rollouts") as seconds:
            generated = super().generate_rollouts(prompts)
        token_ids, logprobs = sampled_tokens(generated)
        tokens_per_second = sum(map(len, token_ids)) / seconds[-1]
        step_values(self).setdefault("rollouts/tokens_per_second", []).append(tokens_per_second)
        self._surprisals = [-logprob for row in logprobs for logprob in row if logprob is not None]
        return generated

    def reward_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("rewards"):
            return super().reward_rollouts(*args, **kwargs)

    def compute_grpo_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        is_known = self.is_corrected_by_trl or "sampling_per_token_logps" not in inputs
        measure = self.model.training and not self.reuses_rollouts and not is_known
        self._inputs = inputs if measure else None
        return super().compute_grpo_loss(model, inputs)

    def token_logprobs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().token_logprobs(model, *args, **kwargs)
        if self._inputs is not None:
            rows = self._inputs.get("kept_rows", slice(None))
            # As in the loss, tokens that the model did not write do not count.
            mask = self._inputs["completion_mask"] * self._inputs.get("tool_mask", 1)
            difference = (result[0].detach() - self._inputs["sampling_per_token_logps"][rows]).abs()[mask[rows].bool()]
            sums = difference.new_tensor([difference.sum(), difference.numel()])
            total, tokens = self.accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()
            if tokens:  # zero when the whole micro-batch is masked
                step_values(self)[LOGPROB_MISMATCH].append(total / tokens)
            self._inputs = None
        return result

    def log(self, *args: Any, **kwargs: Any) -> None:
        metrics = step_values(self)
        if self._surprisals and not metrics.get("entropy"):
            metrics["entropy"].append(statistics.fmean(self._surprisals))
        self._surprisals = ()
        super().log(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[list[float]]:
        """Add the time inside the block to the metrics, and yield the list that it is appended to."""
        seconds = step_values(self).setdefault(f"time/{phase}", []) if self.model.training else []
        started = time.perf_counter()
        yield seconds
        seconds.append(time.perf_counter() - started)


class ScoredRollouts(StepMetrics):
    """Mixin that scores the rollouts of a step instead of TRL. List it before the GRPOTrainer class in the bases."""

    run: Run
    scorer: Scorer
    eos_token_ids: Sequence[int]
    episodes: Sequence[Episode] | None = None
    """The episodes of the step; None if TRL's own code sampled."""
    _has_reported_ungraded = False

    def reward_rollouts(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
        with self._timed("rewards"):
            episodes, self.episodes = self.episodes, None
            if episodes:
                batch = self.scorer.score_episodes(episodes, **reward_arguments(self))
                for name, value in conversation_metrics(episodes).items():
                    step_values(self)[f"conversations/{name}"].append(value)
            else:
                ids = [row["id"] for row in inputs]
                texts = self.scorer.texts(ids, completion_ids)  # TRL's lack markers of thoughts
                batch = self.scorer.score(ids, texts, completion_ids, **reward_arguments(self))
            step = self.state.global_step + 1
            if distributed.is_main() and (step == 1 or step % self.run.config.train.completions_steps == 0):
                write_completions(self.run.completions, step, completion_lines(batch, self.eos_token_ids))
            gathered = gather_rewards(self, [[*each.values()] for each in batch.values])
            self._report_ungraded(step, gathered.isnan().all(dim=1).tolist())
            return gathered

    def _report_ungraded(self, step: int, is_ungraded: Sequence[bool]) -> None:
        """Log the fraction of completions that no reward can grade, and print a line in the first step with any.

        Their advantage is zero, so that they have no gradient; the means and baselines of TRL leave them out.
        """
        count = sum(is_ungraded)
        if not count:
            return
        step_values(self)["completions/ungraded_ratio"].append(count / len(is_ungraded))
        if distributed.is_main() and not self._has_reported_ungraded:
            console.note(
                f"warning: in step {step} every reward returned None for {count} of {len(is_ungraded)} completions, so "
                "they have no gradient; their fraction is completions/ungraded_ratio in the metrics"
            )
        self._has_reported_ungraded = True


def conversation_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means per conversation, and fractions of conversations; {} without an environment."""
    sessions = [episode.session for episode in episodes if episode.session]
    if not sessions:
        return {}
    means: dict[str, list[int]] = {
        "turns": [episode.turns for episode in episodes],
        "tool_calls": [session.calls for session in sessions],
        "failed_calls": [session.failed_calls for session in sessions],
        **{f"ended_by_{end}": [each.ended_by == end for each in episodes] for end in ("reply", "limit", "budget")},
    }
    return {name: statistics.fmean(values) for name, values in means.items()}


def write_completions(folder: Path, step: int, lines: Sequence[dict[str, Any]]) -> None:
    """Write the lines of one step in a file such as `step-00010.jsonl`."""
    text = json_files.dump_lines({"step": step, **line} for line in lines)
    atomic.write_text(folder / f"step-{step:05d}.jsonl", text)


def completion_lines(batch: ScoredBatch, eos_token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return one line for each completion."""
    return [
        {
            "id": row["id"],
            "question": row["question"],
            "answer": row.get("answer"),
            "completion": text,
            "extracted": verdict.extracted,
            "passed": verdict.passed,
            "status": "passed" if verdict.passed else verdict.reason,
            "num_tokens": len(ids),
            "truncated": episode.truncated if episode else not ids or ids[-1] not in eos_token_ids,
            "rewards": values,
            "reward": reward,
            **({"messages": episode.messages, "ended_by": episode.ended_by} if episode and episode.session else {}),
        }
        for row, text, ids, verdict, values, reward, episode in zip(
            *(batch.rows, batch.texts, batch.token_ids, batch.verdicts, batch.values, batch.rewards),
            batch.episodes or itertools.repeat(None, len(batch.rows)),
            strict=True,
        )
    ]


@dataclass(frozen=True)
class Validation:
    """Samples one completion for each validation row with training's sampling settings.

    A row has the same seed in every pass, so passes differ only in the policy.
    """

    run: Run
    rows: Sequence[Row]
    scorer: Scorer
    sampler: Sampler

    def sample(self, step: int, trainer_state: Any) -> list[dict[str, Any]]:
        """Sample, score and write the completions after a step, and return their R lines on every rank."""
        import torch

        config = self.run.config
        rows = self.rows[distributed.rank() :: distributed.world_size()]
        params = SamplingParams.of(config.sampling, 1)
        seeds = [completion_seed(config.seed, f"held out {row['id']}", 0) for row in rows]
        lines = []
        # Some engines sample from torch's global generator. Training depends on its state.
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            groups = play_all(self.sampler, rows, params, seeds)  # even without rows: processes wake up together
            if rows:
                batch = self.scorer.score_episodes([each for [each] in groups], trainer_state=trainer_state)
                lines = completion_lines(batch, self.sampler.eos_token_ids)
        by_turns = itertools.zip_longest(*distributed.gather(lines))
        lines = [line for turn in by_turns for line in turn if line]
        if distributed.is_main():
            self.run.validation.mkdir(exist_ok=True)
            write_completions(self.run.validation, step, lines)
        return lines

    def earlier(self) -> dict[int, list[dict[str, Any]]]:
        """Return the lines of earlier passes, by step."""
        return distributed.broadcast_from_main(
            lambda: {
                int(path.stem.removeprefix("step-")): json_files.read_finished_lines(path)
                for path in sorted(self.run.validation.glob("step-*.jsonl"))
            }
        )
