"""The plan before a run: GPU memory, micro-batch size, work and time, from the model's config.json alone.

    config, plan = make_plan(config, invocation)      # resolves micro-batch size and vLLM's memory share
    show_plan(plan)                                   # --plan; exit 2 if the run does not fit

    config.json ──► Shape ──► Planner ──► Fit ──► Plan: memory, largest settings, work, time, assumptions
                                 │
                                 └─ nothing fits ──► suggestions ──► exit 2 with three settings to change

plan.py          puts the plan together, and the search for the largest settings that fit
fit.py           how a run uses a device's memory: micro-batch size, parallel completions, vLLM's share
suggestions.py   cheaper settings for a run that does not fit
duration.py      the work of a run, and how long it takes
roofline.py      the limits of a GPU, measured or published, and what they mean for a GRPO step
text.py          the plan as text
"""

from lora_grpo.planning.plan import make_plan
from lora_grpo.planning.roofline import Limits, StepWork
from lora_grpo.planning.suggestions import as_flags, cheaper_settings
from lora_grpo.planning.text import show_plan

__all__ = ["Limits", "StepWork", "as_flags", "cheaper_settings", "make_plan", "show_plan"]
