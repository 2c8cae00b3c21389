"""Score the completions of every step, and log those of every n-th with their verdicts and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.files import atomic, json_files
from lora_grpo.rewards import ScoredBatch, Scorer
from lora_grpo.runs import Run
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
