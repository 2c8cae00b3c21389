"""`--grpo KEY=VALUE`: what is refused at once, and what only TRL's GRPOConfig can tell."""

import dataclasses
import inspect
from typing import get_args

import pytest
from helpers.flags import flag_names

from lora_grpo.config import parse_grpo_overrides, typed_grpo_overrides
from lora_grpo.config.schema import LrScheduler, Optimizer
from lora_grpo.config.trl_fields import CHOICES, owner_of
from lora_grpo.errors import UserError


def test_every_owned_field_exists_and_so_does_its_flag():
    import trl

    owners = {owner_of(field.name) for field in dataclasses.fields(trl.GRPOConfig)} - {None}
    flags = {word.strip(",") for owner in owners for word in owner.split() if word.startswith("--")}
    assert len(owners) == 28 and flags <= {*flag_names()}


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("epsilon_high=0.28", 0.28),
        ("epsilon=1e-5", 1e-5),
        ("epsilon = 0.3", 0.3),
        ("weight_decay=1", 1.0),
        ("num_iterations=2", 2),
        ("top_k=-1", -1),
        ("epsilon_high=null", None),
        ("mask_truncated_completions=true", True),
        ("scale_rewards=none", "none"),
        ("run_name=a=b", "a=b"),
        ("run_name=42", "42"),
        ("run_name=2026-11-21", "2026-11-21"),
        ("label_names=[a, b]", ["a", "b"]),
        ("generation_kwargs={min_tokens: 3}", {"min_tokens": 3}),
    ],
)
def test_a_value_has_the_type_of_its_field(item, value):
    (typed_value,) = typed_grpo_overrides([item]).values()
    assert typed_value == value and type(typed_value) is type(value)


def test_grpoconfig_takes_what_was_read(tmp_path):
    import trl

    overrides = typed_grpo_overrides(["epsilon=1e-1", "scale_rewards=batch", "num_iterations=2", "run_name=7"])
    arguments = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, **overrides)
    assert (arguments.epsilon, arguments.scale_rewards) == (0.1, "batch")
    assert (arguments.num_iterations, arguments.run_name) == (2, "7")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["epsilon"], "is not KEY=VALUE"),
        (["=3"], "is not KEY=VALUE"),
        (["epsilon=0.1", "epsilon=0.2"], "--grpo epsilon is repeated"),
        (["epsilon=[1"], "--grpo epsilon=[1 cannot be read"),
        (["seed=3"], "--grpo seed is set by --seed"),
        (["beta=0.1"], "--grpo beta is set by --train.beta"),
        (["use_vllm=true"], "--sampling.backend"),
        (["log_completions=true"], "--grpo log_completions is set by --train.completions-steps"),
        (["num_completions_to_print=2"], "is set by --train.completions-steps"),
        (["log_completions_hub_repo=me/x"], "is set by --train.completions-steps"),
        (["loss_type=drgrpo"], "is unknown to TRL"),
        (["multi_objective_aggregation=sum"], "is unknown to TRL"),
        (["vllm_importance_sampling_mode=mask"], "is unknown to TRL"),
    ],
)
def test_a_mistake_is_refused_without_trl(items, message):
    with pytest.raises(UserError) as error:
        parse_grpo_overrides(items)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("epsilon_hihg=0.3", "did you mean 'epsilon_high'?"),
        ("zzzzzz=1", "see TRL's GRPOConfig for its fields"),
        ("epsilon=high", "--grpo epsilon=high: "),
        ("num_iterations=1.5", "integer"),
        ("mask_truncated_completions=maybe", "boolean"),
    ],
)
def test_a_field_that_grpoconfig_lacks_or_that_has_another_type_is_refused(item, message):
    with pytest.raises(UserError) as error:
        typed_grpo_overrides([item])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_names_offered_are_those_of_the_installed_packages():
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames
    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer)
    for field, names in CHOICES.items():
        assert all(f'"{name}"' in source for name in names), field
    assert set(get_args(LrScheduler)) <= {*SchedulerType}
    assert set(get_args(Optimizer)) <= {*OptimizerNames}


@pytest.mark.parametrize("name", ["push_to_hub", "hub_token", "hub_model_id"])
def test_nothing_is_pushed_while_training(name):
    with pytest.raises(UserError) as error:
        parse_grpo_overrides([f"{name}=hf_secret"])
    assert "push" in str(error.value) and "hf_secret" not in str(error.value)
