"""The teacher of a run reads the completions of each micro-batch before the trained model does.

It reads them as the trained model does: each prompt once for its group, no padding, logits in tiles (loss/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_grpo.config import TeacherConfig
from lora_grpo.data import teacher_prompt_text
from lora_grpo.errors import UserError
from lora_grpo.grading import Row
from lora_grpo.loss import Distillation, ExactLossPass
from lora_grpo.models import TeacherModel, base_of
from lora_grpo.training import trl_compat

if TYPE_CHECKING:
    import torch

_TEACHER_PROMPT_IDS = "teacher_prompt_ids"
_TEACHER_PROMPT_MASK = "teacher_prompt_mask"
"""What the teacher reads in place of the prompts: inputs of the loss, left-padded, shape (R, teacher's width)."""


@dataclass(frozen=True)
class TeacherScores:
    """What a teacher says about R completions, without gradients."""

    logprobs: torch.Tensor
    """Logprobs of their tokens in nats, shape (R, completion width)."""
    hidden_states: torch.Tensor | None
    """From which the teacher's head computes logits, shape (R, completion width, hidden size); None if the loss does
    not compare distributions."""


def check_teacher_loss(settings: TeacherConfig) -> None:
    """Raise a UserError if the installed TRL cannot compare whole distributions and the loss does."""
    if settings.name and settings.loss != "sampled" and not trl_compat.has_divergence_kernel():
        raise UserError(f"--teacher.loss {settings.loss} needs TRL 1.16 or newer; pass --teacher.loss sampled")


class TeacherPass:
    """Scores completions with the teacher.

    Args:
        teacher: the loaded teacher.
        settings: how it is used.
        trainer: the trainer of the student, whose temperature and tiles it shares.
        loss_pass: reads rows with the teacher's model. That of the student if they share a base.
        rows: the rows by id, if the teacher reads other prompts than the model (`teacher_prompt`).
        tokenizer: of the student.
    """

    def __init__(
        self,
        teacher: TeacherModel,
        settings: TeacherConfig,
        trainer: Any,
        loss_pass: ExactLossPass,
        rows: Mapping[str, Row] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._teacher = teacher
        self._loss = settings.loss
        self._trainer = trainer
        self._loss_pass = loss_pass
        self._rows = rows
        self._tokenizer = tokenizer
        self._prompt_ids: dict[str, list[int]] = {}  # by the id of the row
        self.compares_distributions = settings.loss != "sampled"
        self.distillation = Distillation(
            weight=settings.weight,
            reward_weight=settings.reward_weight,
            has_token_advantages=not self.compares_distributions,
        )
        if self.compares_distributions:
            self._check_distributions(settings)

    def prompts(self, row_ids: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the teacher's own prompts for R completions as inputs of the loss; {} if it reads those of the model.

        Args:
            row_ids: the id of each completion's row.
        """
        import torch
        from trl.trainer.utils import pad

        if self._rows is None:
            return {}
        device = self._trainer.accelerator.device
        prompt_ids = [torch.tensor(self._prompt_ids_of(row_id)) for row_id in row_ids]
        masks = [torch.ones_like(ids) for ids in prompt_ids]
        padding = self._tokenizer.pad_token_id
        return {
            _TEACHER_PROMPT_IDS: pad(prompt_ids, padding_value=padding, padding_side="left").to(device),
            _TEACHER_PROMPT_MASK: pad(masks, padding_value=0, padding_side="left").to(device),
        }

    def read(self, inputs: Mapping[str, Any], predecessors: torch.Tensor | None) -> TeacherScores:
        """Return what the teacher says about the completions of a micro-batch.

        Args:
            inputs: tensors of TRL's loss.
            predecessors: the column before each token, if completions are trees; see `ExactLossPass.logprobs`.
        """
        import torch

        prompt_ids = inputs.get(_TEACHER_PROMPT_IDS, inputs["prompt_ids"])
        prompt_mask = inputs.get(_TEACHER_PROMPT_MASK, inputs["prompt_mask"])
        input_ids = torch.cat([prompt_ids, inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([prompt_mask, inputs["completion_mask"]], dim=1)
        completion_width = inputs["completion_ids"].shape[1]

        keeping: Any = contextlib.nullcontext([None])
        if self.compares_distributions:
            keeping = self._loss_pass.keeping_hidden_states()
        with (
            torch.no_grad(),
            self._trainer.accelerator.autocast(),
            trl_compat.no_gradient_checkpointing(self._trainer),
            self._teacher.active(),
            keeping as hidden_states,
        ):
            logprobs, _, _ = self._loss_pass.logprobs(
                self._teacher.model, input_ids, attention_mask, completion_width, predecessors=predecessors
            )
        return TeacherScores(logprobs, hidden_states[-1])

    def divergences(
        self, student_states: torch.Tensor, teacher_states: torch.Tensor, loss_mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the divergence from the teacher of each token that has a loss, 0 for the others, in nats.

        Args:
            student_states: from which the student's head computes logits, (R, completion width, hidden size).
            teacher_states: the same of the teacher, with its own hidden size.
            loss_mask: 1 for tokens that have a loss, shape (R, completion width).

        Returns:
            Shape (R, completion width), with a gradient for the student.
        """
        mask = loss_mask.bool()
        with self._trainer.accelerator.autocast():
            token_divergences = trl_compat.token_divergences(
                trl_compat.Logits.of(base_of(self._trainer.model), student_states[mask]),
                trl_compat.Logits.of(base_of(self._teacher.model), teacher_states[mask]),
                trl_compat.DIVERGENCES[self._loss],
                self._trainer.temperature,
            )
        zeros = token_divergences.new_zeros(mask.shape)
        return zeros.masked_scatter(mask, token_divergences)

    def _prompt_ids_of(self, row_id: str) -> list[int]:
        """Return the token ids of the teacher's own prompt for a row."""
        assert self._rows is not None
        if row_id not in self._prompt_ids:
            text = teacher_prompt_text(self._tokenizer, self._rows[row_id])
            self._prompt_ids[row_id] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._prompt_ids[row_id]

    def _check_distributions(self, settings: TeacherConfig) -> None:
        """Raise a UserError if whole distributions cannot be compared."""
        reason = ""
        if not self._trainer.loss_pass.uses_tiles:
            reason = "computes the model's logits in tiles, which this model does not allow"
        elif not self._loss_pass.uses_tiles:
            reason = "computes the teacher's logits in tiles, which the teacher does not allow"
        if reason:
            raise UserError(f"--teacher.loss {settings.loss} {reason}; pass --teacher.loss sampled")
