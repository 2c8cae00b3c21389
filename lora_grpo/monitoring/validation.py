"""Validation passes: completions of rows that are never trained on.

The validation set is taken out of the training rows and sampled during training. It is not the evaluation set, because
rows that select the best adapter or trigger early stopping must not also be used to evaluate the run.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo import distributed
from lora_grpo.files import json_files
from lora_grpo.grading import Row
from lora_grpo.monitoring.completion_log import completion_lines, write_completions
from lora_grpo.rewards import Scorer
from lora_grpo.rollouts import play_all
from lora_grpo.runs import Run
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed


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
        """Sample, score and write the completions after a step, and return the lines of all R rows on every rank."""
        import torch

        config = self.run.config
        # Rank 0 takes the first row, rank 1 the second, and so on.
        rows = self.rows[distributed.rank() :: distributed.world_size()]
        params = SamplingParams.of(config.sampling, 1)
        seeds = [completion_seed(config.seed, f"held out {row['id']}", 0) for row in rows]

        # Some engines sample from torch's global generator. Training depends on its state.
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(gpus):
            # A rank without rows calls it too, because the samplers of all ranks wake up together.
            groups = play_all(self.sampler, rows, params, seeds)
            lines = []
            if rows:
                episodes = [episode for [episode] in groups]
                batch = self.scorer.score_episodes(episodes, trainer_state=trainer_state)
                lines = completion_lines(batch, self.sampler.eos_token_ids)

        # Put the lines of all ranks in the order of the rows: the first line of each rank, the second of each, ...
        all_lines = []
        for lines_of_ranks in itertools.zip_longest(*distributed.gather(lines)):
            all_lines += [line for line in lines_of_ranks if line is not None]
        if distributed.is_main():
            self.run.validation.mkdir(exist_ok=True)
            write_completions(self.run.validation, step, all_lines)
        return all_lines

    def read_passes(self) -> dict[int, list[dict[str, Any]]]:
        """Return the lines of earlier passes, by step, as this process sees the run folder."""
        passes: dict[int, list[dict[str, Any]]] = {}
        for path in sorted(self.run.validation.glob("step-*.jsonl")):
            step = int(path.stem.removeprefix("step-"))
            passes[step] = json_files.read_finished_lines(path)
        return passes
