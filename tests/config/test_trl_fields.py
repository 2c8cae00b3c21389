import dataclasses
from typing import get_args

import pytest

from lora_grpo.config.schema import LrScheduler, Optimizer
from lora_grpo.config.trl_fields import CHOICES, OWNED_FIELDS, grpo_fields, parse_grpo_overrides
from lora_grpo.errors import UserError


def refusal(*items):
    with pytest.raises(UserError) as error:
        parse_grpo_overrides(items)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_fields_read_from_source_are_the_real_ones():
    import trl

    real = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert set(grpo_fields()) == real
    assert set(OWNED_FIELDS) <= real


def test_every_owned_field_names_a_flag_that_exists():
    from helpers.flags import flag_names

    for flag in OWNED_FIELDS.values():
        if flag.startswith("--"):
            assert flag.split(",")[0] in flag_names()


def test_whatever_the_trainer_is_given_outright_is_owned():
    """A field of GRPOConfig that a setting of the kit decides is refused, or the two would disagree."""
    for item in ("beta=0.1", "learning_rate=1", "max_steps=5", "use_vllm=true", "optim=sgd"):
        key = item.split("=")[0]
        assert refusal(item) == f"--grpo {key} is set by {OWNED_FIELDS[key]}"


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("epsilon_high=0.28", 0.28),
        ("epsilon=1e-5", 1e-5),
        ("epsilon = 0.3", 0.3),
        ("weight_decay=1", 1),
        ("num_iterations=2", 2),
        ("top_k=-1", -1),
        ("epsilon_high=null", None),
        ("epsilon_high=", None),
        ("mask_truncated_completions=true", True),
        ("scale_rewards=none", "none"),
        ("run_name=first try", "first try"),
        ("run_name=a=b", "a=b"),
        ("run_name=42", "42"),
        ("run_name=2026-11-21", "2026-11-21"),
        ("run_name=null", None),
        ("label_names=[a, b]", ["a", "b"]),
        ("generation_kwargs={min_tokens: 3}", {"min_tokens": 3}),
        ('generation_kwargs={"do_sample": false}', {"do_sample": False}),
    ],
)
def test_values_are_read_as_people_write_them(item, value):
    (read,) = parse_grpo_overrides([item]).values()
    assert read == value
    assert type(read) is type(value)


def test_several_overrides_and_none():
    assert parse_grpo_overrides(["epsilon=0.1", "top_k=5"]) == {"epsilon": 0.1, "top_k": 5}
    assert parse_grpo_overrides([]) == {}


def test_grpoconfig_takes_what_was_read(tmp_path):
    import trl

    overrides = parse_grpo_overrides(["epsilon=1e-1", "scale_rewards=batch", "num_iterations=2", "run_name=7"])
    made = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, **overrides)
    assert (made.epsilon, made.scale_rewards, made.num_iterations, made.run_name) == (0.1, "batch", 2, "7")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["epsilon"], "--grpo 'epsilon' is not KEY=VALUE, e.g. --grpo loss_type=dr_grpo"),
        (["=3"], "is not KEY=VALUE"),
        ([""], "is not KEY=VALUE"),
        (["epsilon_hihg=0.3"], "did you mean 'epsilon_high'?"),
        (["zzzzzz=1"], "see TRL's GRPOConfig for its fields"),
        (["epsilon=0.1", "epsilon=0.2"], "--grpo epsilon is repeated"),
        (["epsilon=high"], "--grpo epsilon=high is str; GRPOConfig expects float"),
        (["epsilon=true"], "is bool; GRPOConfig expects float"),
        (["epsilon=[1]"], "is list"),
        (["epsilon=nan"], "is not a finite number"),
        (["epsilon=.inf"], "is not a finite number"),
        (["epsilon=-1"], "--grpo epsilon=-1 is too small; expected 0 or more"),
        (["num_iterations=0"], "expected 1 or more"),
        (["num_iterations=1.5"], "is float; GRPOConfig expects int"),
        (["num_iterations=null"], "is NoneType; GRPOConfig expects int"),
        (["mask_truncated_completions=1"], "is int; GRPOConfig expects bool"),
        (["mask_truncated_completions=maybe"], "is str; GRPOConfig expects bool"),
        (["epsilon=[1"], "--grpo epsilon=[1 cannot be read"),
        (["seed=3"], "--grpo seed is set by --seed"),
    ],
)
def test_a_wrong_override_says_what_is_expected(items, message):
    assert message in refusal(*items)


@pytest.mark.parametrize(
    "item",
    [
        "loss_type=drgrpo",
        "scale_rewards=nonsense",
        "importance_sampling_level=word",
        "vllm_importance_sampling_mode=mask",
    ],
)
def test_a_name_that_trl_would_refuse_after_sampling_is_refused_at_once(item):
    with pytest.raises(UserError, match="is unknown to TRL"):
        parse_grpo_overrides([item])


def test_the_names_offered_are_those_of_the_installed_trl():
    import inspect

    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer)
    for field, names in CHOICES.items():
        assert all(f'"{name}"' in source for name in names), field


def test_transformers_has_the_schedulers_and_optimizers():
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    assert set(get_args(LrScheduler)) <= {*SchedulerType}
    assert set(get_args(Optimizer)) <= {*OptimizerNames}


@pytest.mark.parametrize("name", [name for name in grpo_fields() if name.startswith(("hub_", "push_to_hub"))])
def test_nothing_is_pushed_while_training(name):
    said = refusal(f"{name}=hf_secret")
    assert "push" in said and "hf_secret" not in said
