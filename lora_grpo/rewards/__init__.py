"""Rewards: parse specs such as `--rewards correct_answer=2.0` and score completions with the reward functions.

    specs = parse_reward_specs(["correct_answer=2.0", "my_rewards.py:brief"])   # validates; no heavy imports
    rewards = resolve(specs)                                                    # imports and guards the functions
    values = score(rewards, trl_rows(tokenizer, rows), texts, token_ids)        # calls them the way TRL does

functions.py    built-in rewards with values from 0 to 1
specs.py        parses `NAME=WEIGHT` for built-in, TRL, and user-defined rewards, and loads the functions
guard.py        stops the run if a reward raises or returns an invalid value
scoring.py      builds the dataset for TRL's trainer; calls rewards the way TRL does
"""

from lora_grpo.rewards.functions import TEST_REWARDS, RewardFunction, completion_text
from lora_grpo.rewards.guard import RewardError
from lora_grpo.rewards.scoring import score, training_set, trl_rows
from lora_grpo.rewards.specs import RIGHT_REWARDS, Reward, is_format_reward, parse_reward_specs, resolve
