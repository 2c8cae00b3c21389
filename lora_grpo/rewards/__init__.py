"""Rewards: parse specs such as `--rewards correct_answer=2.0` and score completions with the reward functions.

    specs = parse_reward_specs(["correct_answer=2.0", "my_rewards.py:brief"])   # validates; no heavy imports
    scorer = Scorer(resolve(specs), tokenizer, rows)                            # imports and guards the functions
    batch = scorer.score([row["id"]], [completion], [token_ids])                # grades once, calls them as TRL does

functions.py    built-in rewards, and the table `REWARDS` of their names: add a reward here
arithmetic.py   the equations of numbers in a text, and whether they hold
specs.py        parses `NAME=WEIGHT`, and loads the functions
guard.py        checks what a reward function returns, and stops the run if one fails
scoring.py      grades and scores the completions of a batch
trl_data.py     prompts, completions and the dataset as TRL's trainer has them
"""

from lora_grpo.rewards.functions import RIGHT_REWARDS, TEST_REWARDS, is_format_reward
from lora_grpo.rewards.guard import RewardError
from lora_grpo.rewards.scoring import ScoredBatch, Scorer, graded
from lora_grpo.rewards.specs import Reward, beside, parse_reward_specs, resolve
from lora_grpo.rewards.trl_data import training_set
