"""Rewards: from `--rewards correct_answer=2.0` to functions that score completions.

    specs = parse_reward_specs(["correct_answer=2.0", "my_rewards.py:brief"])   # validated, nothing heavy imported
    rewards = resolve(specs)                                                    # imported and guarded
    values = score(rewards, trl_rows(tokenizer, rows), texts, token_ids)        # called as TRL calls them

functions.py    the built-in rewards, each from 0 to 1
specs.py        parse `NAME=WEIGHT`; built-in, TRL's and user-defined rewards
user_files.py   rewards from a user's Python file
guard.py        stops the run if a reward raises or returns an invalid value
scoring.py      the dataset for TRL's trainer; rewards called the way TRL calls them
"""

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
