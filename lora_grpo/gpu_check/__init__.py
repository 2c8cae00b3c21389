"""Does a GPU run the recipe, how fast, and in how much memory."""

from lora_grpo.gpu_check.check import Options, check_gpu

__all__ = ["Options", "check_gpu"]
