"""Log of completions: one line of JSON for each, with its verdict and rewards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.evaluation import has_failed
from lora_grpo.files import atomic, json_files
from lora_grpo.rewards import ScoredBatch
from lora_grpo.rollouts import Episode


def completion_lines(batch: ScoredBatch, eos_token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return one line for each completion. If its agent failed, `failure` says why.

    Args:
        eos_token_ids: without an episode, a completion that ends with none of them is truncated.
    """
    lines = []
    for index, row in enumerate(batch.rows):
        token_ids = batch.token_ids[index]
        verdict = batch.verdicts[index]
        episode: Episode | None = batch.episodes[index] if batch.episodes else None

        ends_with_eos = bool(token_ids) and token_ids[-1] in eos_token_ids
        is_truncated = episode.truncated if episode else not ends_with_eos

        line = {
            "id": row["id"],
            "question": row["question"],
            "answer": row.get("answer"),
            "completion": batch.texts[index],
            "extracted": verdict.extracted,
            "passed": verdict.passed,
            "status": "passed" if verdict.passed else verdict.reason,
            "num_tokens": len(token_ids),
            "truncated": is_truncated,
            "rewards": batch.values[index],
            "reward": batch.rewards[index],
        }
        if episode and (episode.session or episode.agent):
            line["messages"] = episode.messages
            line["ended_by"] = episode.ended_by
        if episode and episode.failure:
            line["failure"] = episode.failure
        lines.append(line)
    return lines


def passed_by_id(lines: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return whether each completion is correct, by the id of its row, without those whose agent failed."""
    return {line["id"]: line["passed"] for line in lines if not has_failed(line)}


def write_completions(folder: Path, step: int, lines: Sequence[dict[str, Any]]) -> None:
    """Write the lines of one step in a file such as `step-00010.jsonl`."""
    text = json_files.dump_lines({"step": step, **line} for line in lines)
    atomic.write_text(folder / f"step-{step:05d}.jsonl", text)
