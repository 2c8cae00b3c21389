"""The overrides of TRL's trainer take every call of the methods that they replace, and a run uses all of them.

The same is checked over Unsloth's generated trainer in tests/gpu_rig.
"""

import pytest
from helpers.overrides import MIXINS, count_calls, overrides, rejected_calls
from helpers.tiny_runs import run_tiny
from trl import GRPOTrainer

OVERRIDES = overrides(GRPOTrainer)


def test_every_mixin_overrides_something():
    assert {mixin for mixin, _ in OVERRIDES} == set(MIXINS)


@pytest.mark.parametrize(("mixin", "name"), OVERRIDES, ids=lambda each: getattr(each, "__name__", each))
def test_an_override_takes_every_call_of_the_method_it_replaces(mixin, name):
    assert rejected_calls(mixin, name, GRPOTrainer) == []


def test_a_run_calls_every_override(tmp_path, monkeypatch):
    calls = count_calls(monkeypatch.setattr)
    run_tiny(tmp_path / "out", train={"max_steps": 1, "checkpoint_steps": 1})
    assert calls.keys() == {f"{mixin.__name__}.{name}" for mixin, name in OVERRIDES}


def test_clipping_is_the_same_on_both_sides_unless_changed(tmp_path):
    """Unsloth's GRPOConfig sets `epsilon_high` to 0.28 if a run with the loss `dapo` leaves it out."""
    from lora_grpo.config import RunConfig
    from lora_grpo.training.trl_config import grpo_arguments

    def upper(*overrides):
        return grpo_arguments(RunConfig(output_dir="out", grpo=overrides), tmp_path, [1.0])["epsilon_high"]

    assert upper() == 0.2 and upper("epsilon=0.1") == 0.1 and upper("epsilon=0.1", "epsilon_high=0.28") == 0.28
