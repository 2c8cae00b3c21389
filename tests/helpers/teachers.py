"""Teachers for trainers of one loss pass: another adapter on the trained model, or a second model."""

import pytest
import torch
from helpers.loss_passes import make_trainer, random_model, with_adapter
from peft import LoraConfig
from trl.trainer.utils import use_adapter

from lora_grpo.config import TeacherConfig
from lora_grpo.models import Teacher, TeacherModel, base_of
from lora_grpo.training import trl_compat
from lora_grpo.training.teacher_pass import TeacherPass

with_kernel = pytest.mark.skipif(not trl_compat.has_divergence_kernel(), reason="TRL 1.14 has no divergence in tiles")
"""For tests that compare whole distributions."""


def add_teacher_adapter(model, rank=6):
    """Add an adapter `teacher` with random weights, which stays frozen and inactive."""
    torch.manual_seed(2)
    config = LoraConfig(r=rank, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    model.add_adapter("teacher", config)
    for name, parameter in model.named_parameters():
        if ".teacher." in name:
            parameter.data = parameter.data.float()
    model.set_adapter("default")


def second_model(trainer, **changes):
    """Return a frozen model with other weights and sizes, and the head of the trainer's model."""
    model = random_model(**{"hidden_size": 48, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    trl_compat.add_fused_head(trainer, model)
    return model.eval().requires_grad_(False)


def trainer_with_teacher(folder, kind="adapter", reason="", settings=None, rows=None, model=None, **arguments):
    """Return a trainer of a random model with an adapter, whose teacher is `adapter`, `base` or a second `model`.

    Args:
        reason: why TRL's own pass computes the loss; "" if this package's does.
    """
    student = model or with_adapter(random_model(), lora_dropout=arguments.pop("lora_dropout", 0.0))
    if kind == "adapter":
        add_teacher_adapter(student)
    trainer = make_trainer(student, folder, **arguments)
    if reason:
        trainer.fallback_reason = reason
        trainer.loss_pass = trainer.build_loss_pass(trainer.model)
        trainer.model.train()
    loss_pass = trainer.loss_pass
    teacher_model = trainer.model
    if kind == "model":
        teacher_model = second_model(trainer)
        loss_pass = trainer.build_loss_pass(teacher_model)
        teacher_model.eval()
    trainer.teacher = TeacherPass(
        TeacherModel(Teacher("other", kind), teacher_model),
        settings or TeacherConfig(name="other"),
        trainer,
        loss_pass,
        rows,
        trainer.processing_class,
    )
    return trainer


def plain_logits(model, ids, mask, width, adapter="default"):
    """Return the logits that predict the last `width` tokens of rows, from one plain pass over padded rows."""
    if adapter == "default":
        output = model(input_ids=ids, attention_mask=mask, use_cache=False)
    else:
        with use_adapter(model, adapter):
            output = model(input_ids=ids, attention_mask=mask, use_cache=False)
    return output.logits[:, -(width + 1) : -1].float()


def logits_of_teacher(trainer, ids, mask, width):
    """Return the teacher's logits of the same tokens, divided by the temperature."""
    teacher = trainer.teacher._teacher
    with torch.no_grad():
        if not teacher.shares_base:
            logits = plain_logits(base_of(teacher.model), ids, mask, width)
        else:
            adapter = None if teacher.teacher.kind == "base" else "teacher"
            logits = plain_logits(trainer.model, ids, mask, width, adapter)
    return logits / trainer.temperature
