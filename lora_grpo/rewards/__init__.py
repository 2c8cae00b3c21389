"""Rewards: parse specs such as `--rewards correct_answer=2.0` and score completions with the reward functions.

    specs = parse_reward_specs(["correct_answer=2.0", "my_rewards.py:brief"])   # validates; no heavy imports
    scorer = Scorer(resolve(specs), tokenizer, rows)                            # imports and guards the functions
    batch = scorer.score([row["id"]], [completion], [token_ids])                # grades once, calls them as TRL does

functions.py    built-in rewards with values from 0 to 1
specs.py        parses `NAME=WEIGHT`, loads the functions, and stops the run if one fails
scoring.py      grades and scores the completions of a batch; builds the dataset for TRL's trainer
"""

from lora_grpo.rewards.functions import TEST_REWARDS
from lora_grpo.rewards.scoring import ScoredBatch, Scorer, graded, training_set
from lora_grpo.rewards.specs import (
    RIGHT_REWARDS,
    Reward,
    RewardError,
    beside,
    is_format_reward,
    parse_reward_specs,
    resolve,
)
