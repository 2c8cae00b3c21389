"""A model learns to find its way through rooms, in an environment of OpenEnv (https://github.com/huggingface/OpenEnv).

Method. GRPO on whole episodes. doors.py has the environment, made of OpenEnv's classes: two rooms with three doors
each, and a sign that names the right one. The score is the fraction of rooms in which the model names that door and no
other.

    lora-grpo train task.py --preset laptop

agent.py plays in its own process, or, with SERVER, against OpenEnv's server, which it starts on 127.0.0.1.
"""

from lora_grpo.config import laptop_preset
from lora_grpo.pipeline import run_recipe

SERVER = False
AGENT = ["uv", "run", "agent.py"]  # in the folder of this file
if SERVER:
    AGENT.append("--server")
PROCESSES = 1
EPISODES_PER_PROCESS = 64
PROMPT_TOKENS = 96


def load(split):
    """Return the seeds of the rooms."""
    seeds = range(2000) if split == "train" else range(2000, 2400)
    return [{"seed": seed} for seed in seeds]


PRESETS = {
    "laptop": laptop_preset(
        model={"max_sequence_tokens": 176},
        data={"task": __file__, "eval_limit": 200},
        sampling={"max_completion_tokens": 80, "max_turn_tokens": 8},
        train={"max_steps": 12, "learning_rate": 1e-4},
        eval={"num_samples": 1},
    ),
}

if __name__ == "__main__":
    run_recipe("openenv_env", __doc__, PRESETS)
