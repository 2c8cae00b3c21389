"""A loaded teacher: another adapter on the trained model, the model without an adapter, or a second model."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.models import base_model, model_files
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
        UserError: files are missing or damaged, or the adapter does not fit its base or another commit of it.
    """
    if teacher.base:
        return _load_second_model(teacher, teacher.base)
    commit = policy.record["revision"]
    if teacher.commit_of_base and commit not in (None, teacher.commit_of_base):
        raise UserError(
            f"--teacher {teacher.name} was trained on commit {teacher.commit_of_base} of its base, and this run loads "
            f"{commit}; pass --model.revision {teacher.commit_of_base}"
        )
    if teacher.adapter:
        _load_adapter(teacher, policy.model)
        policy.model.set_adapter(_TRAINED)
    return TeacherModel(teacher, policy.model)


def _load_second_model(teacher: Teacher, base: ModelConfig) -> TeacherModel:
    """Load the base of a teacher, and its adapter if it has one. The result names the commit of a base of the Hub."""
    from peft import LoraConfig, PeftModel

    folder = model_files.locate(base.name, base.revision)
    model: Any = base_model.load_base(dataclasses.replace(base, name=str(folder.path), revision=None))
    disable_dropout(model)
    if teacher.adapter:
        with _loading(teacher):
            model = PeftModel(model, LoraConfig.from_pretrained(str(teacher.adapter)), _ADAPTER_NAME)
        _load_adapter(teacher, model)
    model.eval().requires_grad_(False)
    base_model.keep_frozen(model)
    located = dataclasses.replace(base, revision=folder.commit or base.revision)
    return TeacherModel(dataclasses.replace(teacher, base=located), model)


def _load_adapter(teacher: Teacher, model: Any) -> None:
    """Load the teacher's adapter into a PEFT model, frozen and without dropout."""
    device = str(next(model.parameters()).device)
    with _loading(teacher):
        mismatches = model.load_adapter(str(teacher.adapter), _ADAPTER_NAME, is_trainable=False, torch_device=device)
    missing = [name for name in mismatches.missing_keys if f".{_ADAPTER_NAME}." in f"{name}."]
    problems = [*missing, *mismatches.unexpected_keys]
    if problems:
        raise UserError(f"the adapter of --teacher {teacher.name} does not fit its base or is damaged: {problems[0]}")
    for name, module in model.named_modules():
        if name.endswith(f".lora_dropout.{_ADAPTER_NAME}") and hasattr(module, "p"):
            module.p = 0.0


def _loading(teacher: Teacher) -> contextlib.AbstractContextManager[None]:
    return base_model.loading(f"the adapter of --teacher {teacher.name}")
