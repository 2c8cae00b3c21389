"""The loss with a teacher: its gradient is that of the per-token objective, and of TRL's divergence."""

import re

import pytest
import torch
from helpers.loss_passes import distance, loss_and_gradients, micro_batch
from helpers.teachers import logits_of_teacher, plain_logits, trainer_with_teacher, with_kernel
from trl import GRPOTrainer
from trl.trainer.utils import use_adapter

from lora_grpo.config import TeacherConfig
from lora_grpo.errors import UserError
from lora_grpo.rollouts import ROOT
from lora_grpo.training import trl_compat

GROUPS = (3, 2, 3)
TRL_PASS = "TRL's own pass"


def rows_of(inputs):
    """Return the token ids, the mask and the completion width of a micro-batch."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return ids, mask, inputs["completion_ids"].shape[1]


def logprobs_of(logits, inputs):
    return logits.log_softmax(-1).gather(2, inputs["completion_ids"][:, :, None]).squeeze(2)


def gradients_of_trl(trainer, inputs, advantages):
    """Return the gradients of TRL's own `_compute_loss` with advantages of tokens, from its own pass."""
    trainer.model.zero_grad()
    teacher, trainer.teacher = trainer.teacher, None
    without_packing = trainer.loss_pass
    trainer.loss_pass = type("TrlPass", (), {"logprobs": staticmethod(_trl_logprobs(trainer))})()
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, {**inputs, "advantages": advantages})
    loss.backward()
    trainer.teacher = teacher
    trainer.loss_pass = without_packing
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def _trl_logprobs(trainer):
    def logprobs(model, *args, predecessors=None, **kwargs):
        return GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, *args, **kwargs)

    return logprobs


@pytest.mark.parametrize("reason", ["", TRL_PASS], ids=["packed", "TRL's pass"])
@pytest.mark.parametrize(("kind", "temperature"), [("adapter", 0.7), ("base", 1.0), ("model", 0.7)])
@pytest.mark.parametrize("reward_weight", [0.0, 1.0])
def test_the_gradient_is_that_of_trls_loss_with_advantages_of_tokens(
    tmp_path, kind, temperature, reason, reward_weight
):
    settings = TeacherConfig(name="other", weight=0.7, reward_weight=reward_weight)
    trainer = trainer_with_teacher(tmp_path, kind, reason, settings, temperature=temperature)
    assert bool(trainer.packing_disabled_reason) == bool(reason)
    inputs = micro_batch(GROUPS)
    inputs["advantages"][:3] = 0.0  # a group whose rewards are equal

    loss, gradients, metrics = loss_and_gradients(trainer, inputs)

    ids, mask, width = rows_of(inputs)
    with torch.no_grad():
        logprobs = logprobs_of(plain_logits(trainer.model, ids, mask, width) / temperature, inputs)
        teacher_logprobs = logprobs_of(logits_of_teacher(trainer, ids, mask, width), inputs)
    advantages = reward_weight * inputs["advantages"][:, None] + 0.7 * (teacher_logprobs - logprobs)
    expected_loss, expected = gradients_of_trl(trainer, inputs, advantages)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert distance(gradients, expected) < 1e-5

    is_token = inputs["completion_mask"].bool()
    differences = (logprobs - teacher_logprobs)[is_token]
    assert metrics["teacher/kl"] == pytest.approx(differences.mean().item(), abs=1e-5)
    disagreement = (differences > torch.log(torch.tensor(2.0))).float().mean().item()
    assert metrics["teacher/disagreement"] == pytest.approx(disagreement, abs=1e-6)


def test_only_the_models_tokens_have_a_gradient(tmp_path):
    """The tool's tokens of a conversation neither count in the loss nor in the metrics."""
    settings = TeacherConfig(name="other", reward_weight=0.0)
    trainer = trainer_with_teacher(tmp_path, settings=settings)
    inputs = micro_batch(GROUPS)
    generator = torch.Generator().manual_seed(3)
    inputs["tool_mask"] = torch.randint(0, 2, inputs["completion_mask"].shape, generator=generator)
    loss_mask = inputs["completion_mask"] * inputs["tool_mask"]
    inputs["num_items_in_batch"] = loss_mask.sum().float()

    _, gradients, metrics = loss_and_gradients(trainer, inputs)

    ids, mask, width = rows_of(inputs)
    with torch.no_grad():
        teacher_logprobs = logprobs_of(logits_of_teacher(trainer, ids, mask, width), inputs)
    trainer.model.zero_grad()
    logprobs = logprobs_of(plain_logits(trainer.model, ids, mask, width), inputs)
    advantages = (teacher_logprobs - logprobs).detach()
    (-(advantages * logprobs * loss_mask).sum() / loss_mask.sum()).backward()
    expected = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert distance(gradients, expected) < 1e-5
    assert metrics["teacher/kl"] == pytest.approx(-advantages[loss_mask.bool()].mean().item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_rollouts_that_are_used_again_have_advantages_from_the_first_use(tmp_path, kind):
    """With `num_iterations`, the logprobs before the first update stay those of the policy that sampled."""
    trainer = trainer_with_teacher(tmp_path, kind)
    inputs = micro_batch(GROUPS)
    ids, mask, width = rows_of(inputs)
    with torch.no_grad():
        old = logprobs_of(plain_logits(trainer.model, ids, mask, width), inputs)
        teacher_logprobs = logprobs_of(logits_of_teacher(trainer, ids, mask, width), inputs)
    inputs["old_per_token_logps"] = old - 0.05
    group_advantages = inputs["advantages"].clone()

    advantages = group_advantages[:, None] + teacher_logprobs - (old - 0.05)
    _, expected = gradients_of_trl(trainer, inputs, advantages)
    for _ in range(2):  # TRL buffers the inputs, so the loss must not change them
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, inputs).backward()
        gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
        assert distance(gradients, expected) < 1e-5


@with_kernel
@pytest.mark.parametrize("kind", ["adapter", "base", "model"])
@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "jsd"])
def test_a_divergence_is_that_of_trl(tmp_path, kind, loss):
    settings = TeacherConfig(name="other", weight=0.7, reward_weight=0.0, loss=loss)
    trainer = trainer_with_teacher(tmp_path, kind, settings=settings)
    inputs = micro_batch(GROUPS)

    value, gradients, metrics = loss_and_gradients(trainer, inputs)

    # TRL's function on hidden states of plain passes over padded rows
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    ids, mask, width = rows_of(inputs)
    model = trainer.model.get_base_model()
    teacher = trainer.teacher._teacher
    teacher_base = model if teacher.shares_base else teacher.model
    trainer.model.zero_grad()
    active_adapter = {"adapter": "teacher", "base": None, "model": "default"}[kind]
    with torch.no_grad(), use_adapter(trainer.model, active_adapter):
        teacher_states = teacher_base.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -(width + 1) : -1]
    states = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -(width + 1) : -1]
    expected_loss, _, _ = _chunked_divergence_loss(
        states,
        teacher_states,
        model.get_output_embeddings().weight,
        teacher_base.get_output_embeddings().weight,
        inputs["completion_mask"],
        trl_compat.DIVERGENCES[loss],
        num_items_in_batch=inputs["num_items_in_batch"],
    )
    (0.7 * expected_loss).backward()
    expected = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert value == pytest.approx(0.7 * expected_loss.item(), rel=1e-5)
    assert metrics["teacher/divergence"] == pytest.approx(expected_loss.item(), rel=1e-5)
    assert distance(gradients, expected) < 1e-5


@with_kernel
@pytest.mark.parametrize(
    ("loss", "temperature"),
    # At 0.7, the JSD of these models is a small difference, which float32 has to 4e-5 only.
    [("reverse_kl", 1.0), ("forward_kl", 1.0), ("jsd", 1.0), ("reverse_kl", 0.7), ("forward_kl", 0.7)],
)
def test_a_divergence_is_the_formula_on_whole_logits(tmp_path, loss, temperature):
    settings = TeacherConfig(name="other", reward_weight=0.0, loss=loss)
    trainer = trainer_with_teacher(tmp_path, settings=settings, temperature=temperature)
    inputs = micro_batch(GROUPS)
    _, gradients, _ = loss_and_gradients(trainer, inputs)

    ids, mask, width = rows_of(inputs)
    teacher = logits_of_teacher(trainer, ids, mask, width).log_softmax(-1)
    trainer.model.zero_grad()
    student = (plain_logits(trainer.model, ids, mask, width) / temperature).log_softmax(-1)
    mixture = torch.logsumexp(torch.stack([student, teacher]), 0) - torch.log(torch.tensor(2.0))
    divergence = {
        "reverse_kl": student.exp() * (student - teacher),
        "forward_kl": teacher.exp() * (teacher - student),
        "jsd": 0.5 * student.exp() * (student - mixture) + 0.5 * teacher.exp() * (teacher - mixture),
    }[loss].sum(-1)
    ((divergence * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()).backward()
    expected = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert distance(gradients, expected) < 1e-5


@with_kernel
def test_rewards_have_their_part_beside_a_divergence(tmp_path):
    """With a teacher that hardly counts, the gradient is that of GRPO."""
    settings = TeacherConfig(name="other", weight=1e-9, reward_weight=1.0, loss="reverse_kl")
    trainer = trainer_with_teacher(tmp_path, settings=settings)
    inputs = micro_batch(GROUPS)
    _, gradients, _ = loss_and_gradients(trainer, inputs)
    trainer.teacher = None
    _, expected, _ = loss_and_gradients(trainer, inputs)
    assert distance(gradients, expected) < 1e-5


def test_the_trained_adapter_alone_is_trained(tmp_path):
    trainer = trainer_with_teacher(tmp_path, lora_dropout=0.5)
    _, gradients, _ = loss_and_gradients(trainer, micro_batch(GROUPS))
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trainable == gradients.keys()
    assert all(".default." in name for name in trainable)
    assert trainer.model.active_adapter == "default"


@pytest.mark.parametrize("loss", ["sampled", pytest.param("jsd", marks=with_kernel)])
def test_a_micro_batch_of_truncated_completions_teaches_nothing(tmp_path, loss):
    """With `mask_truncated_completions`, TRL masks all of their tokens."""
    trainer = trainer_with_teacher(tmp_path, settings=TeacherConfig(name="other", loss=loss))
    inputs = micro_batch(GROUPS)
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    value, gradients, metrics = loss_and_gradients(trainer, inputs)
    assert value == 0.0
    assert all(not gradient.any() for gradient in gradients.values())
    assert not any(name.startswith("teacher/") for name in metrics)


def test_distributions_are_not_compared_without_tiles(tmp_path):
    with pytest.raises(UserError, match=re.escape("--teacher.loss sampled")):
        trainer_with_teacher(tmp_path, reason=TRL_PASS, settings=TeacherConfig(name="other", loss="jsd"))


@pytest.mark.parametrize("loss", ["sampled", pytest.param("jsd", marks=with_kernel)])
def test_a_teacher_reads_the_calls_of_an_agent_as_a_tree(tmp_path, loss):
    """Packed, and with each path of the tree as a row of its own, the gradients are the same."""
    settings = TeacherConfig(name="other", loss=loss)
    inputs = micro_batch(GROUPS)
    width = inputs["completion_mask"].shape[1]
    predecessors = torch.arange(-1, width - 1).repeat(len(inputs["completion_mask"]), 1)
    predecessors[:, 4] = 1  # the fifth token is another continuation of the second
    predecessors[:, 8] = ROOT  # another call begins, with a history of its own
    inputs["predecessors"] = predecessors.where(inputs["completion_mask"].bool(), -1)
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:, 8] = 0  # a token that begins a sequence is not sampled

    packed = trainer_with_teacher(tmp_path / "packed", settings=settings)
    _, gradients, metrics = loss_and_gradients(packed, inputs)
    padded = trainer_with_teacher(tmp_path / "padded", settings=settings)
    padded.loss_pass.packing_disabled_reason = "a test"
    _, expected, expected_metrics = loss_and_gradients(padded, inputs)
    assert distance(gradients, expected) < 1e-5
    for name in ("teacher/kl", "teacher/disagreement"):
        assert metrics[name] == pytest.approx(expected_metrics[name], abs=1e-5)

    # The first completion is as long as the others may be. Its fifth token follows the second one.
    scores = packed.teacher.read(inputs, inputs["predecessors"])
    is_prompt = inputs["prompt_mask"][0].bool()
    ids = torch.cat([inputs["prompt_ids"][0][is_prompt], inputs["completion_ids"][0][[0, 1, 4]]])[None]
    [[logits]] = logits_of_teacher(packed, ids, torch.ones_like(ids), 1)
    assert scores.logprobs[0, 4].item() == pytest.approx(logits.log_softmax(-1)[ids[0, -1]].item(), abs=1e-5)
