"""GRPO: TRL's trainer, and everything that looks at it while it runs."""

from lora_grpo.training.difficulty import keep_middling
from lora_grpo.training.memory_probe import made_up_inputs
from lora_grpo.training.run import make_trainer, train
from lora_grpo.training.step_phases import StepPhases

__all__ = ["StepPhases", "keep_middling", "made_up_inputs", "make_trainer", "train"]
