"""A model learns to put commas, in an environment of verifiers (https://github.com/PrimeIntellect-ai/verifiers).

Method. GRPO on the rollouts of `vf.load_environment(ENVIRONMENT)`. The score is the reward of the environment's rubric.

    lora-grpo train task.py --preset laptop

ENVIRONMENT is commas.py in this folder. Another one works the same way: add its package to pyproject.toml, and
write its name and its numbers of rows below. Its rewards must be from 0 to 1.

What cannot be trained so: rubrics that compare the rollouts of a row, because each episode is scored alone; clients
other than that of chat completions, such as verifiers' `renderer`, which needs vLLM's own API.
"""

from lora_grpo.config import laptop_preset
from lora_grpo.pipeline import run_recipe

ENVIRONMENT = "commas"
TRAIN_ROWS = 600
EVAL_ROWS = 200

AGENT = ["uv", "run", "agent.py", ENVIRONMENT]  # in the folder of this file
PROCESSES = 1
EPISODES_PER_PROCESS = 64
PROMPT_TOKENS = 96


def load(split):
    """Return the numbers of the environment's rows, which agent.py has."""
    num_rows = TRAIN_ROWS if split == "train" else EVAL_ROWS
    return [{"split": split, "index": index} for index in range(num_rows)]


PRESETS = {
    "laptop": laptop_preset(
        model={"max_sequence_tokens": 112},
        data={"task": __file__, "eval_limit": 200},
        sampling={"max_completion_tokens": 16, "max_turn_tokens": 16},
        train={"max_steps": 12, "learning_rate": 1e-4},
        eval={"num_samples": 1},
    ),
}

if __name__ == "__main__":
    run_recipe("verifiers_env", __doc__, PRESETS)
