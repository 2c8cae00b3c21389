"""Validation passes: completions of rows that are never trained on.

The validation set is taken out of the training rows and sampled during training. It is not the evaluation set, because
rows that select the best adapter or trigger early stopping must not also be used to evaluate the run.
"""

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
        """Sample, score and write the completions after a step, and return the lines of all R rows."""
        import torch

        config = self.run.config
        rows = distributed.own_share(self.rows)
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

        all_lines = distributed.join_shares(lines)
        self.run.once(lambda: self._write(step, all_lines))
        return all_lines

    def _write(self, step: int, lines: Sequence[dict[str, Any]]) -> None:
        self.run.validation.mkdir(exist_ok=True)
        write_completions(self.run.validation, step, lines)

    def read_passes(self) -> dict[int, list[dict[str, Any]]]:
        """Return the lines of earlier passes, by step."""
        passes: dict[int, list[dict[str, Any]]] = {}
        for path in sorted(self.run.validation.glob("step-*.jsonl")):
            step = int(path.stem.removeprefix("step-"))
            passes[step] = json_files.read_finished_lines(path)
        return passes
