"""Score, grade and write completions: those of training steps, and those of validation passes.

The validation set is taken out of the training rows and sampled during training. It is not the evaluation set, because
rows that select the best adapter or trigger early stopping must not also be used to evaluate the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import RunConfig
from lora_grpo.files import atomic, json_files
from lora_grpo.rewards import ScoredBatch, Scorer
from lora_grpo.runs import Run
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed
from lora_grpo.tasks import Row, chat
from lora_grpo.training.trl_compat import TrlHooks, gather_rewards, reward_arguments


class ScoredRollouts(TrlHooks):
    """Mixin that scores the rollouts of a step. List it after StepMetrics, which measures how long it takes."""

    run: Run
    scorer: Scorer
    eos_token_ids: Sequence[int]

    def reward_rollouts(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
        ids = [row["id"] for row in inputs]
        batch = self.scorer.score(ids, completions, completion_ids, **reward_arguments(self))
        step = self.state.global_step + 1
        if distributed.is_main() and (step == 1 or step % self.run.config.train.completions_steps == 0):
            write_completions(self.run.completions, step, completion_lines(batch, self.eos_token_ids))
        return gather_rewards(self, [[*each.values()] for each in batch.values])


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
            "truncated": not ids or ids[-1] not in eos_token_ids,
            "rewards": values,
            "reward": reward,
        }
        for row, text, ids, verdict, values, reward in zip(
            batch.rows, batch.texts, batch.token_ids, batch.verdicts, batch.values, batch.rewards, strict=True
        )
    ]


@dataclass(frozen=True)
class Validation:
    """Samples one completion for each validation row with training's sampling settings.

    A row has the same seed in every pass, so passes differ only in the policy.
    """

    folder: Path
    """Where files such as `step-00020.jsonl` are written, with one line per row."""
    config: RunConfig
    rows: Sequence[Row]
    scorer: Scorer
    sampler: Sampler

    def sample(self, step: int, trainer_state: Any) -> list[dict[str, Any]]:
        """Sample, score and write the completions after a step, and return their R lines on every rank."""
        import torch

        settings = self.config.sampling
        rows = self.rows[distributed.rank() :: distributed.world_size()]
        params = SamplingParams(1, settings.temperature, settings.top_p, settings.max_completion_tokens)
        seeds = [completion_seed(self.config.seed, f"held out {row['id']}", 0) for row in rows]
        prompts = [chat.render_row(self.sampler.tokenizer, row) for row in rows]
        lines = []
        # Some engines sample from torch's global generator. Training depends on its state.
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            groups = self.sampler.sample(prompts, params, seeds)  # even without prompts: processes wake up together
            if prompts:
                texts, token_ids = [each.text for [each] in groups], [each.token_ids for [each] in groups]
                ids = [row["id"] for row in rows]
                batch = self.scorer.score(ids, texts, token_ids, trainer_state=trainer_state)
                lines = completion_lines(batch, self.sampler.eos_token_ids)
        by_turns = itertools.zip_longest(*distributed.gather(lines))
        lines = [line for turn in by_turns for line in turn if line]
        if distributed.is_main():
            self.folder.mkdir(exist_ok=True)
            write_completions(self.folder, step, lines)
        return lines

    def earlier(self) -> dict[int, list[dict[str, Any]]]:
        """Return the lines of earlier passes, by step."""
        return distributed.broadcast_from_main(
            lambda: {
                int(path.stem.removeprefix("step-")): json_files.read_finished_lines(path)
                for path in sorted(self.folder.glob("step-*.jsonl"))
            }
        )
