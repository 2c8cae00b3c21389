"""The work of a run: its steps, completions and tokens, with every prompt and completion at its maximum length."""

from __future__ import annotations

from dataclasses import dataclass

from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.files import json_files
from lora_grpo.runs import Run, duration, newest_step


@dataclass(frozen=True)
class Work:
    """The remaining work of a run."""

    steps: int | None
    """None if only `--hours` limits the number of steps."""
    completions_per_step: int
    prompt_tokens: int
    """Longest prompt that fits in the context."""
    completion_tokens: int
    trained_on: str
    """`completions`, or `gold solutions` in SFT."""
    evaluated: int | None
    """Completions of each evaluation, before and after training; None if the number of rows is not known yet."""
    hours: float | None = None
    """Hours that are left for a run with `--hours`."""

    @classmethod
    def of(cls, config: RunConfig, *, resumed: bool = False) -> Work:
        """Return the work of a run, or what remains of a resumed one."""
        path = config.folder / "run.json"
        record = json_files.read_object(path) if resumed and path.is_file() else {}
        steps, hours = config.step_limit, config.hours
        if steps is not None and resumed:
            steps = max(0, steps - newest_step(config.folder / "checkpoints"))
        if hours is not None:
            hours = max(0.0, hours - record.get("seconds_worked", 0.0) / 3600)
        if Run(config, record).seems_trained() or hours == 0:
            steps = 0
        rows, completion = config.data.eval_limit, config.sampling.max_completion_tokens
        samples = config.eval.num_samples + 1  # 1 for greedy decoding
        return cls(
            steps=steps,
            completions_per_step=batch_shape(config, world_size=1).completions_per_step,
            prompt_tokens=config.model.max_sequence_tokens - completion,
            completion_tokens=completion,
            trained_on="gold solutions" if config.method == "sft" else "completions",
            evaluated=None if rows is None else rows * samples,
            hours=hours,
        )

    def text(self) -> str:
        """Return the work as one line."""
        each = f"{self.completions_per_step} {self.trained_on}"
        if self.steps == 0:
            line = "no steps are left"
        elif self.steps is None:
            line = f"as many steps x {each} as fit in {duration(3600 * (self.hours or 0.0))}"
        else:
            completions = self.steps * self.completions_per_step
            tokens = completions * (self.prompt_tokens + self.completion_tokens)
            line = f"{self.steps:,} steps x {self.completions_per_step} = {completions:,} {self.trained_on}"
            line += f", at most {count(tokens)} tokens"
            if self.hours is not None:
                line += f", or as many as fit in {duration(3600 * self.hours)}"
        return line + (f"; {self.evaluated:,} completions in each evaluation" if self.evaluated else "")


def count(number: float) -> str:
    """Format a count with three significant digits: 16.4 million."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {word}"
    return f"{number:,.0f}"
