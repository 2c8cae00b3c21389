"""Does it fit, and how long does it take: the plan before a run."""

from lora_grpo.planning.plan import make_plan
from lora_grpo.planning.plan_report import show_plan
from lora_grpo.planning.roofline import Limits, StepWork
from lora_grpo.planning.suggestions import as_flags, cheaper_settings

__all__ = ["Limits", "StepWork", "as_flags", "cheaper_settings", "make_plan", "show_plan"]
