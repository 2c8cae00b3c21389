"""Rewards: from `NAME=WEIGHT` to functions that score completions."""

from lora_grpo.rewards.functions import TEST_REWARDS, RewardFunction, completion_text
from lora_grpo.rewards.scoring import score, training_set, trl_rows
from lora_grpo.rewards.specs import Reward, parse_reward_specs, resolve

__all__ = [
    "TEST_REWARDS",
    "Reward",
    "RewardFunction",
    "completion_text",
    "parse_reward_specs",
    "resolve",
    "score",
    "training_set",
    "trl_rows",
]
