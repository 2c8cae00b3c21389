"""Metrics of a training step that TRL does not log."""

import contextlib
import statistics
import time
from collections.abc import Iterator, MutableMapping, Sequence

from lora_grpo.monitoring.phase_peaks import PhasePeaks
from lora_grpo.rollouts import Episode, conversations_of

LOGPROB_MISMATCH = "sampling/sampling_logp_difference/mean"
"""TRL's name for the mean absolute logprob difference between sampler and trainer, in nats per token."""
LARGEST_LOGPROB_MISMATCH = "sampling/sampling_logp_difference/max"
"""TRL's name for the largest one, in nats."""
IMPORTANCE_WEIGHT = "sampling/importance_sampling_ratio"
"""TRL's name for the weights that correct the loss for this difference, with `/min`, `/mean` and `/max`."""

TEACHER_KL = "teacher/kl"
"""Mean of logprob(model) - logprob(teacher) over the sampled tokens, in nats: an estimate of KL(model || teacher)."""
TEACHER_DISAGREEMENT = "teacher/disagreement"
"""Fraction of the sampled tokens that the teacher finds less than half as probable as the model does."""


def clock() -> float:
    """Return the seconds of a monotonic clock when the GPU, if there is one, has done all that it was given.

    PyTorch only hands work to a GPU, and goes on. Without waiting, a pass would take the time of the work before it.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class StepMetrics:
    """Collects values of a step. The trainer logs the mean of each metric, and clears them.

    - `memory/PHASE`, in GiB, if `peaks` measures them.
    - `time/rollouts` and `time/rewards`, in seconds, and `rollouts/tokens_per_second`, for the completions of this
      process. With PEFT and vLLM, `time/rollouts` includes `time/engine_wake_up`, in which the engine takes its memory
      back, and `time/adapter_sync`, in which it gets the adapter.
    - With a teacher, `TEACHER_KL`, `TEACHER_DISAGREEMENT`, `teacher/divergence` if the loss compares distributions, and
      `time/teacher`, the seconds in which it reads the completions, which are a part of `time/training`.
    - `entropy`, if the loss does not log it (Unsloth's): the mean of -logprob over the sampled tokens, an estimate.
      (A loss that logs it has this estimate only for completions that it leaves out, see `loss/zero_advantage.py`.)
    - `LOGPROB_MISMATCH` and `LARGEST_LOGPROB_MISMATCH`, when rollouts are used for the first time, and with vLLM
      `IMPORTANCE_WEIGHT`. They compare the sampler's logprobs with those of the loss, over the completions that the
      loss pass reads: those with an advantage. TRL has them only for vLLM, from another pass over all completions.

    Args:
        values: the trainer's lists of values, by metric.
    """

    def __init__(self, values: MutableMapping[str, list[float]]) -> None:
        self._values = values
        self.peaks = PhasePeaks()
        """The GPU memory of the step's phases; a run replaces it."""
        self._surprisals: Sequence[float] = ()  # -logprob of each token sampled in this step, in nats

    def add(self, name: str, value: float) -> None:
        """Add a value of a metric."""
        self._values.setdefault(name, []).append(value)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds inside the block as `time/PHASE`."""
        started = time.perf_counter()
        yield
        self.add(f"time/{phase}", time.perf_counter() - started)

    def add_rollouts(self, token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float | None]]) -> None:
        """Add what the sampler returned in the block `timed("rollouts")` that has just ended.

        Args:
            token_ids: sampled tokens of each completion.
            logprobs: the sampler's logprobs of these tokens in nats, None where it returns none; or ().
        """
        seconds = self._values["time/rollouts"][-1]
        self.add("rollouts/tokens_per_second", sum(map(len, token_ids)) / seconds)
        self._surprisals = [-logprob for row in logprobs for logprob in row if logprob is not None]

    def complete(self) -> None:
        """Add the peaks of memory, and estimate the entropy if the loss has not logged it.

        Call it before the step is logged.
        """
        for name, value in self.peaks.end_step().items():
            self.add(name, value)
        if self._surprisals and not self._values.get("entropy"):
            self.add("entropy", statistics.fmean(self._surprisals))
        self._surprisals = ()


def conversation_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means per conversation, and fractions of conversations; {} without an environment or an agent."""
    played = [episode.agent for episode in episodes if episode.agent]
    if played:
        return {
            "agents/calls": statistics.fmean(len(result.calls) for result in played),
            "agents/conversations": statistics.fmean(len(conversations_of(result.calls)) for result in played),
            "agents/seconds": statistics.fmean(result.seconds for result in played),
            "agents/failed_ratio": statistics.fmean(bool(result.failure) for result in played),
            "agents/out_of_tokens_ratio": statistics.fmean(result.ran_out_of_tokens for result in played),
        }
    sessions = [episode.session for episode in episodes if episode.session]
    if not sessions:
        return {}
    means: dict[str, list[int]] = {
        "turns": [episode.turns for episode in episodes],
        "tool_calls": [session.calls for session in sessions],
        "failed_calls": [session.failed_calls for session in sessions],
    }
    for end in ("reply", "limit", "budget"):
        means[f"ended_by_{end}"] = [episode.ended_by == end for episode in episodes]
    return {f"conversations/{name}": statistics.fmean(values) for name, values in means.items()}
