"""Memory: how much a run needs on a device, and the settings that make it fit. Reads config.json alone, no weights.

    show_plan(make_plan(config, invocation)[1])            # --plan; exit 2 if the run does not fit
    draft = draft_plan(config, invocation)                 # a run: chooses the engine and the sampling backend
    config, plan = complete_plan(draft, data.row_lengths)  # sets bits, micro-batch size, vLLM's memory fraction

    shape, step ──► estimate ──► bytes of each part ──► fit ──► micro-batch size, parallel completions ──► plan ──► show

To learn what a GRPO step costs, read `memory_by_part` and `phases` in estimate.py, then activations.py.

shape.py       the dimensions of a transformer, read from its config.json, or from known_models.json
lengths.py     the lengths of the rows of a run
step.py        the settings of a step that its memory depends on
estimate.py    the memory of each part of a GRPO step, and the phases in which it exists
parameters.py  the bytes of the base model and of the optimizer's state
activations.py the bytes of a micro-batch's activations and logits
teacher.py     the size of a teacher: an adapter, or a second model
unsloth.py     the terms of Unsloth's loss pass and gradient checkpointing
batches.py     limits of the batch of the built-in sampler
fit.py         searches the micro-batch size, parallel completions and vLLM's fraction; the longest context
faster.py      chooses 16 bits and no gradient checkpointing where they fit with room
advice.py      the error message if a run does not fit, with the cheapest change that makes it fit
work.py        the steps and completions of a run, and the bytes of its checkpoints and adapters
plan.py        the plan of a run: device, engine, model, memory
show.py        prints the plan
"""

from lora_grpo.memory import estimate
from lora_grpo.memory.batches import CPU_FRACTION, MAX_BATCH_SIZE
from lora_grpo.memory.estimate import GIB
from lora_grpo.memory.lengths import RowLengths
from lora_grpo.memory.plan import Plan, complete_plan, draft_plan, make_plan
from lora_grpo.memory.shape import KNOWN_MODELS, Shape, UnknownFamily
from lora_grpo.memory.show import engine_line, show_plan, summary
