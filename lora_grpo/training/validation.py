"""The validation set: rows taken out of the training rows and sampled periodically during training.

It is separate from the evaluation set, because the rows that select the best adapter or trigger early stopping must
not also be used to evaluate the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import RunConfig
from lora_grpo.files import json_files
from lora_grpo.rewards import Scorer
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed
from lora_grpo.tasks import Row, chat
from lora_grpo.training.completion_log import completion_lines, write_completions


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
