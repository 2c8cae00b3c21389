"""Memory: how much a run needs on a device, and the settings that make it fit. Reads config.json alone, no weights.

    show_plan(make_plan(config, invocation)[1])       # --plan; exit 2 if the run does not fit
    draft = draft_plan(config, invocation)            # a run: chooses the engine and the sampling backend
    config, plan = complete_plan(draft, data.longest) # sets micro-batch size and vLLM's memory share

    shape ── estimate ──► bytes of each part ── fit ──► micro-batch size, parallel completions ── plan ──► the plan

shape.py     the dimensions of a transformer, read from its config.json, or from known_models.json
lengths.py   the lengths of the rows of a run
batches.py   limits of the batch of the built-in sampler
estimate.py  the memory of each part of a GRPO step
unsloth.py   the terms of Unsloth's loss pass and gradient checkpointing
fit.py       micro-batch size, parallel completions, vLLM's fraction, longest context; the cheapest change if a run
             does not fit
work.py      the steps, completions and tokens of a run, and the bytes of its checkpoints and adapters
plan.py      builds and prints the plan
"""

from lora_grpo.memory import estimate
from lora_grpo.memory.batches import CPU_FRACTION, MAX_BATCH_SIZE
from lora_grpo.memory.estimate import GIB
from lora_grpo.memory.lengths import RowLengths
from lora_grpo.memory.plan import Plan, complete_plan, draft_plan, make_plan, show_plan, summary
from lora_grpo.memory.shape import KNOWN_MODELS, Shape, UnknownFamily
