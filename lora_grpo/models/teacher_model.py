"""A loaded teacher: another adapter on the trained model, the model without an adapter, or a second model."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.models import base_model
from lora_grpo.models.peft_policy import disable_dropout
from lora_grpo.models.policy import Policy
from lora_grpo.models.teacher import Teacher

_ADAPTER_NAME = "teacher"
"""PEFT's name of the teacher's adapter on the trained model."""
_TRAINED = "default"
"""PEFT's name of the trained adapter."""


@dataclass(frozen=True)
class TeacherModel:
    """A teacher that can compute logprobs."""

    teacher: Teacher
    model: Any
    """The trained PEFT model, or a second model in eval mode."""

    @property
    def shares_base(self) -> bool:
        """Whether the teacher is the trained model with another adapter or none."""
        return self.teacher.kind != "model"

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the model compute as the teacher inside the block. Call it without gradients.

        Both models may be in training mode: the base has no dropout, and `load_teacher` disables that of the adapter.
        """
        if not self.shares_base:
            yield
        elif self.teacher.kind == "base":
            with self.model.disable_adapter():
                yield
        else:
            self.model.set_adapter(_ADAPTER_NAME)
            try:
                yield
            finally:
                self.model.set_adapter(_TRAINED)


def load_teacher(teacher: Teacher, policy: Policy) -> TeacherModel:
    """Load a teacher. One with an adapter on the base of the policy adds that adapter to the policy's model.

    The trained adapter stays the active one, and the only one with gradients.

    Raises:
        UserError: files are missing or damaged, or the adapter does not fit its base.
    """
    if teacher.kind == "model":
        return TeacherModel(teacher, _load_second_model(teacher))
    if teacher.kind == "adapter":
        _add_adapter(teacher, policy.model)
    return TeacherModel(teacher, policy.model)


def _add_adapter(teacher: Teacher, model: Any) -> None:
    """Add the teacher's adapter to the trained model, frozen and without dropout."""
    device = str(next(model.parameters()).device)
    with base_model.loading(f"the adapter of --teacher {teacher.name}"):
        result = model.load_adapter(str(teacher.adapter), _ADAPTER_NAME, is_trainable=False, torch_device=device)
    missing = [key for key in result.missing_keys if f".{_ADAPTER_NAME}." in key]
    problems = [*missing, *result.unexpected_keys]
    if problems:
        raise UserError(f"the adapter of --teacher {teacher.name} does not fit its base or is damaged: {problems[0]}")
    model.set_adapter(_TRAINED)
    for name, module in model.named_modules():
        if name.endswith(f".lora_dropout.{_ADAPTER_NAME}") and hasattr(module, "p"):
            module.p = 0.0


def _load_second_model(teacher: Teacher) -> Any:
    """Load the base of a teacher, and its adapter if it has one."""
    from peft import PeftModel

    assert teacher.base is not None
    model = base_model.load_base(teacher.base)
    disable_dropout(model)
    if teacher.adapter:
        with base_model.loading(f"the adapter of --teacher {teacher.name}"):
            model = PeftModel.from_pretrained(model, str(teacher.adapter), is_trainable=False)
    model.eval().requires_grad_(False)
    base_model.keep_frozen(model)
    return model
