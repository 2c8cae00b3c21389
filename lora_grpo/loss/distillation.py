"""On-policy distillation: what the loss learns from a teacher that scores the tokens which the model has sampled.

A teacher that is asked about the sampled tokens changes their advantages. For a token y after the context x,

    advantage(y) = reward_weight * A + weight * (log teacher(y | x) - log model(y | x))

with A, the advantage of its completion among its group, and the logprobs of the policy that sampled. The second term is
a sample of -KL(model || teacher): its expectation over y is the negative divergence at this token. It has no gradient
of its own; the loss of GRPO differentiates logprobs.

A teacher that is asked about the whole vocabulary adds a term to the loss, the mean over tokens of a divergence between
both distributions. Its gradient has no noise from sampling y. TRL's DistillationTrainer has the same loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TEACHER_LOGPROBS = "teacher_per_token_logps"
"""Logprobs of the teacher among the inputs of the loss, in nats, shape (R, completion width)."""
_HALF = 0.6931471805599453
"""log 2: a token that the teacher finds half as probable has a logprob that is lower by this."""


@dataclass(frozen=True)
class Distillation:
    """How the teacher and the rewards are weighted."""

    weight: float
    """Of the teacher."""
    reward_weight: float
    """Of the advantages that follow from the rewards."""
    has_token_advantages: bool
    """Whether the teacher's logprobs of the sampled tokens are a part of their advantages."""

    def advantages(
        self, group_advantages: torch.Tensor, logprobs: torch.Tensor, teacher_logprobs: torch.Tensor
    ) -> torch.Tensor:
        """Return the advantages of the tokens of R completions, without a gradient.

        Args:
            group_advantages: advantages of the completions, shape (R,).
            logprobs: of the policy that sampled, in nats, shape (R, completion width).
            teacher_logprobs: of the same shape.

        Returns:
            Shape (R, completion width) or, if the teacher has another part in the loss, (R, 1).
        """
        reward_advantages = self.reward_weight * group_advantages[:, None]  # (R, 1)
        if not self.has_token_advantages:
            return reward_advantages
        return reward_advantages + self.weight * (teacher_logprobs - logprobs).detach()


@dataclass(frozen=True)
class TeacherDifference:
    """How the model differs from its teacher, over the tokens of a step."""

    kl: float
    """Mean of logprob(model) - logprob(teacher) over the sampled tokens, in nats: an estimate of KL(model || teacher),
    which may be negative by chance."""
    disagreement: float
    """Fraction of the sampled tokens that the teacher finds less than half as probable as the model does."""
    divergence: float | None
    """Mean of the divergence in the loss, in nats; None without one."""


@dataclass
class TeacherComparison:
    """Collects what the micro-batches of a step say about the teacher."""

    _sums: list[torch.Tensor] = field(default_factory=list)
    """For each micro-batch the number of its tokens that have a loss, and the sums over them of: logprob(model) -
    logprob(teacher), disagreements, divergences. Shape (4,)."""

    def add(
        self,
        logprobs: torch.Tensor,
        teacher_logprobs: torch.Tensor,
        loss_mask: torch.Tensor,
        divergences: torch.Tensor | None,
    ) -> None:
        """Add a micro-batch.

        Args:
            logprobs: of the policy that sampled, in nats, shape (R, completion width). All values have this shape.
            teacher_logprobs: in nats.
            loss_mask: 1 for tokens that have a loss.
            divergences: in nats; None if the loss has no divergence.
        """
        import torch

        mask = loss_mask.bool()
        differences = (logprobs - teacher_logprobs).detach()[mask].double()
        sum_of_divergences = differences.new_zeros(())
        if divergences is not None:
            sum_of_divergences = divergences.detach()[mask].double().sum()
        disagreements = (differences > _HALF).sum().double()
        count = mask.sum().double()
        sums = torch.stack([count, differences.sum(), disagreements, sum_of_divergences])
        self._sums.append(sums)

    def difference(
        self, gather: Callable[[torch.Tensor], torch.Tensor], *, has_divergence: bool
    ) -> TeacherDifference | None:
        """Return the means over a step and all processes, and forget it. None without tokens.

        Args:
            gather: returns the tensors of all processes, concatenated.
            has_divergence: whether the micro-batches were added with divergences.
        """
        import torch

        if not self._sums:
            return None
        sums = torch.stack(self._sums).sum(0)
        self._sums.clear()
        count, sum_of_differences, disagreements, sum_of_divergences = gather(sums[None]).sum(0).tolist()
        if not count:
            return None
        divergence = None
        if has_divergence:
            divergence = sum_of_divergences / count
        return TeacherDifference(sum_of_differences / count, disagreements / count, divergence)
