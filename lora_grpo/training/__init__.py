"""GRPO: TRL's trainer, and everything that looks at it while it runs."""

from lora_grpo.training.difficulty import filter_by_difficulty
from lora_grpo.training.memory_probe import synthetic_inputs
from lora_grpo.training.run import train
from lora_grpo.training.step_metrics import StepMetrics
from lora_grpo.training.trainer import make_trainer

__all__ = ["StepMetrics", "filter_by_difficulty", "make_trainer", "synthetic_inputs", "train"]
