"""The patch of Unsloth's loss, on a stand-in for the generated module. tests/gpu_rig runs Unsloth's own."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lora_grpo.errors import RunError
from lora_grpo.models.architectures import ONLY_PEFT, TRAINABLE
from lora_grpo.training.unsloth_compat import use_logprobs_of_loss_as_old

GENERATED = """
def grpo_compute_loss(ref, new, old, sampling_per_token_logps, input_ids, **options):
    return old

class UnslothGRPOTrainer:
    def compute_loss(self, new, old, sampled):
        return grpo_compute_loss(None, new, old, sampled, None, delta=None)
"""


def generated_trainer(source):
    namespace = {}
    exec(source, namespace)
    return namespace["UnslothGRPOTrainer"]


def test_old_logprobs_are_those_of_the_loss_if_there_are_none():
    trainer_class = generated_trainer(GENERATED)
    assert use_logprobs_of_loss_as_old(trainer_class)
    new = torch.tensor([-1.0], requires_grad=True)
    sampled = torch.tensor([-2.0])
    compute_loss = trainer_class().compute_loss
    old = compute_loss(new, None, sampled)
    assert old.equal(new) and not old.requires_grad
    assert compute_loss(new, sampled, sampled) is sampled
    assert compute_loss(new, None, None) is None  # nothing to correct: Unsloth's own case


def test_another_loss_than_that_of_the_tested_version_is_refused():
    for source in (GENERATED.replace("ref, new, old", "new, old, ref"), GENERATED.replace("grpo_compute", "compute")):
        with pytest.raises(RunError, match="install the versions"):
            use_logprobs_of_loss_as_old(generated_trainer(source))


def test_trls_own_trainer_is_left_alone():
    """Unsloth's CPU backend uses it."""
    from trl import GRPOTrainer

    assert not use_logprobs_of_loss_as_old(GRPOTrainer)


def test_no_model_that_unsloth_may_train_has_a_vision_config():
    """Unsloth ends vLLM's standby mode for those, and a plan would say that vLLM gives its memory back."""
    for model_type in set(TRAINABLE) - set(ONLY_PEFT):
        assert not hasattr(CONFIG_MAPPING[model_type](), "vision_config"), model_type
