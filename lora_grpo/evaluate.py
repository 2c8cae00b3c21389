"""Samples and verdicts of held-out rows, kept as they come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import json_lines
from lora_grpo.config import EvalConfig, RunConfig
from lora_grpo.errors import RunError
from lora_grpo.progress import Progress
from lora_grpo.prompts import render_row
from lora_grpo.rollouts import Sampler
from lora_grpo.run_record import Run
from lora_grpo.tasks import Row, grade_all

Sample = dict[str, Any]
"""One graded completion: id, draw ("greedy" or the sample's number), completion, passed, reason, ..."""


BASE = "base"
"""The name under which the model without its adapter is evaluated."""


@dataclass(frozen=True)
class _Batch:
    rows: Sequence[Row]
    greedy: bool
    seed: int


def evaluate(run: Run, sampler: Sampler, rows: Sequence[Row], name: str) -> list[Sample]:
    """Sample and grade every row, `eval.num_samples` times and once greedily.

    Samples are appended to `evaluation/<name>.samples.jsonl` batch by batch; a killed evaluation goes on after its last
    whole batch. Every draw depends on the run's seed and the row's place alone, so two models are asked with the same
    random numbers.

    Args:
        run: the open run.
        sampler: draws from the model as it is now.
        rows: R held-out rows with `prompt`.
        name: what is evaluated: `base` (the adapter left out) or `trained`.

    Returns:
        R x (num_samples + 1) samples.

    Raises:
        RunError: the file of samples does not fit these rows.
    """
    config = run.config
    sampler.refresh(adapter=name != BASE)
    run.evaluation.mkdir(exist_ok=True)
    path = run.evaluation / f"{name}.samples.jsonl"
    batches = list(_batches(rows, config))
    kept: list[Sample] = json_lines.read_finished(path)
    done = _whole_batches(kept, batches, config.eval, path)
    samples = kept[: sum(_size(batch, config.eval) for batch in batches[:done])]
    json_lines.cut(path, len(samples))
    if done == len(batches):
        return samples
    if done:
        print(f"{path.name}: {len(samples)} samples are there already", file=sys.stderr)
    total = sum(_size(batch, config.eval) for batch in batches)
    progress = Progress(total, f"evaluating {name}")
    with contextlib.closing(progress), path.open("a", encoding="utf-8") as file:
        for batch in batches[done:]:
            drawn = sampler.rollouts(
                [render_row(sampler.tokenizer, row) for row in batch.rows],
                1 if batch.greedy else config.eval.num_samples,
                max_tokens=config.sampling.max_completion_tokens,
                temperature=0.0 if batch.greedy else config.eval.temperature,
                top_p=1.0 if batch.greedy else config.eval.top_p,
                seed=batch.seed,
            )
            pairs = [
                (row, place, rollout)
                for row, rollouts in zip(batch.rows, drawn, strict=True)
                for place, rollout in enumerate(rollouts)
            ]
            verdicts = grade_all(
                config.data.held_out_task, [rollout.text for _, _, rollout in pairs], [row for row, _, _ in pairs]
            )
            new: list[Sample] = [
                {
                    "id": row["id"],
                    "draw": "greedy" if batch.greedy else place,
                    "completion": rollout.text,
                    "passed": verdict.passed,
                    "reason": verdict.reason,
                    "detail": verdict.detail,
                    "extracted": verdict.extracted,
                    "rules": dict(verdict.rules),
                    "num_tokens": len(rollout.token_ids),
                    "truncated": rollout.truncated,
                }
                for (row, place, rollout), verdict in zip(pairs, verdicts, strict=True)
            ]
            json_lines.append(file, new)
            samples += new
            passed = sum(sample["passed"] for sample in samples)
            progress.show(len(samples), f"{passed / len(samples):.1%} pass")
    return samples


def _batches(rows: Sequence[Row], config: RunConfig) -> Iterator[_Batch]:
    """Cut the work up: greedy first, then the samples, `eval.batch_size` completions at most in each.

    Rows of like length go together, so that little of a batch is padding.
    """
    ordered = sorted(rows, key=lambda row: (len(row["question"]), row["id"]))
    for greedy, copies in ((True, 1), (False, config.eval.num_samples)):
        size = max(1, config.eval.batch_size // copies) if copies else 0
        for number, start in enumerate(range(0, len(ordered), size) if size else ()):
            seed = config.seed * 1_000_003 + 500_000 + number
            yield _Batch(ordered[start : start + size], greedy, seed)


def _size(batch: _Batch, settings: EvalConfig) -> int:
    return len(batch.rows) * (1 if batch.greedy else settings.num_samples)


def _whole_batches(kept: Sequence[Sample], batches: Sequence[_Batch], settings: EvalConfig, path: Path) -> int:
    done = used = 0
    for batch in batches:
        size = _size(batch, settings)
        if used + size > len(kept):
            break
        copies = size // len(batch.rows)
        expected = [row["id"] for row in batch.rows for _ in range(copies)]
        if [sample["id"] for sample in kept[used : used + size]] != expected:
            raise RunError(f"{path} holds samples of other rows; delete it and run the command again")
        used, done = used + size, done + 1
    return done
