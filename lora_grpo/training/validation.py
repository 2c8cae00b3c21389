"""Rows that are kept out of training and asked again and again while it goes on.

They are taken from the training rows, not from those of the evaluation: what chooses the best adapter, or the moment to
stop, must not also be what the run is measured by at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import RunConfig
from lora_grpo.files import atomic, json_files
from lora_grpo.rewards import Reward, score
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed
from lora_grpo.tasks import Row, chat
from lora_grpo.training.completion_log import completion_lines


class Validation:
    """Asks the validation_rows rows, one completion each, as training asks its own.

    The random numbers of a row's completion are the same every time: what differs between two passes is the policy.

    Args:
        folder: gets `step-00020.jsonl`, one line a row.
        config: of the run; its sampling settings are used.
        rows: R rows with `prompt`.
        asked: the same as rewards are given them, with the columns of all rows of the run; see `trl_rows`.
        rewards: of the run.
        sampler: draws from the policy as it is.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        rows: Sequence[Row],
        asked: Sequence[Row],
        rewards: Sequence[Reward],
        sampler: Sampler,
    ) -> None:
        self.folder, self.config, self.rows, self.asked = folder, config, rows, asked
        self.rewards, self.sampler = rewards, sampler

    def ask(self, step: int, trainer_state: Any) -> list[dict[str, Any]]:
        """Draw, score and write the completions after a step, and return their R lines on every rank.

        Args:
            step: number of the step; 0 before the first.
            trainer_state: what rewards may look at.

        Raises:
            RewardError: a reward function failed.
        """
        import torch

        sampling = self.config.sampling
        mine, asked = (rows[distributed.rank() :: distributed.world_size()] for rows in (self.rows, self.asked))
        prompts = [chat.render_row(self.sampler.tokenizer, row) for row in mine]
        on_gpu = torch.cuda.is_available()
        lines = []
        # Some engines draw from torch's own generator, whose numbers belong to training.
        with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
            params = SamplingParams(1, sampling.temperature, sampling.top_p, sampling.max_completion_tokens)
            seeds = [completion_seed(self.config.seed, f"held out {row['id']}", 0) for row in mine]
            groups = self.sampler.sample(prompts, params, seeds)  # without prompts, too: processes wake up together
            if prompts:
                texts, ids = [each.text for [each] in groups], [each.token_ids for [each] in groups]
                earned = score(self.rewards, asked, texts, ids, trainer_state)
                weights = {reward.name: reward.weight for reward in self.rewards}
                lines = completion_lines(mine, texts, ids, earned, weights, self.sampler.eos_token_ids)
        shares = distributed.gather(lines)
        places = {row["id"]: place for place, row in enumerate(self.rows)}
        lines = sorted((line for share in shares for line in share), key=lambda line: places[line["id"]])
        if distributed.is_main():
            self.folder.mkdir(exist_ok=True)
            text = json_files.dump_lines({"step": step, **line} for line in lines)
            atomic.write_text(self.folder / f"step-{step:05d}.jsonl", text)
        return lines

    def earlier(self) -> dict[int, list[dict[str, Any]]]:
        """Return the lines of the passes that are there already, by step."""

        def read() -> dict[int, list[dict[str, Any]]]:
            paths = sorted(self.folder.glob("step-*.jsonl"))
            return {int(path.stem.removeprefix("step-")): json_files.read_finished_lines(path) for path in paths}

        return distributed.broadcast_from_main(read)
