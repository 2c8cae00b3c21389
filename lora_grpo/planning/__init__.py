"""Plans a run before it starts: GPU memory, micro-batch size, work and time, from the model's config.json alone.

    config, plan = make_plan(config, invocation)      # sets micro-batch size and vLLM's memory share
    show_plan(plan)                                   # --plan; exit 2 if the run does not fit

plan.py          builds the plan
fit.py           plans a device's memory: micro-batch size, parallel completions, vLLM's memory share, largest settings
suggestions.py   suggests cheaper settings for a run that does not fit
disk_space.py    estimates what a run writes to its folder
duration.py      computes the work of a run and estimates its duration
roofline.py      limits of a GPU (measured or published), and the resulting bounds for a GRPO step
text.py          prints the plan
"""

from lora_grpo.planning.plan import make_plan
from lora_grpo.planning.roofline import Limits, StepWork
from lora_grpo.planning.suggestions import as_flags, cheaper_settings
from lora_grpo.planning.text import show_plan, summary

__all__ = ["Limits", "StepWork", "as_flags", "cheaper_settings", "make_plan", "show_plan", "summary"]
