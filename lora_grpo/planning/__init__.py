"""Before training: plan a run, preview the model's completions, audit the grader, check the GPU.

    show_plan(make_plan(config, invocation)[1])       # --plan; exit 2 if the run does not fit
    draft = draft_plan(config, invocation)            # a run: chooses the engine and the sampling backend
    config, plan = complete_plan(draft, data.longest) # sets micro-batch size and vLLM's memory share
    preview(config, data)                             # --preview: sample 8 groups from the base model; can GRPO learn?
    dry_run(config, data, tokenizer)                  # --dry-run: one prompt and the rewards of its reference answer
    audit(config, data)                               # --audit: can a completion cheat the grader?
    check_gpu(Options(minutes=30), recipe)            # a few steps of the recipe on this GPU with every engine

`make_plan` reads the model's config.json alone; a run also plans with the lengths of its rows. The GPU check runs each
engine and backend in a separate process, with random weights and generated problems.

plan.py              builds and prints the plan
fit.py               plans a device's memory: micro-batch size, parallel completions, vLLM's fraction, longest context;
                     finds the cheapest change for a run that does not fit
work.py              counts the steps, completions and tokens of a run, and the bytes of its checkpoints and adapters
dry_run.py           prints the settings, one prompt and the rewards of its reference answer, without weights
preview.py           samples groups from the base model with the prompts of the first training steps, and prints them
diagnosis.py         the summary of all groups with 95% intervals, the verdict, its reason, and suggested changes
audit_run.py         tries what a model could use to cheat, and reports what passes
audit_attacks.py     the attacks on a `check`: the texts of each for a row, and whether they must pass
audit_environment.py the attacks on an `Environment`: policies that play conversations
audit_calls.py       makes the calls of an audit in a process that can be killed
gpu_check.py         runs the recipe on a random model with each engine and backend, and measures time and memory
gpu_findings.py      the table of the GPU check, its conclusions, and the choice of the fastest engine
random_model.py      builds a model with a published shape and random weights
"""

from lora_grpo.planning.audit_run import audit
from lora_grpo.planning.dry_run import dry_run, show_settings
from lora_grpo.planning.gpu_check import Options, check_gpu
from lora_grpo.planning.plan import complete_plan, draft_plan, make_plan, show_plan, summary
from lora_grpo.planning.preview import preview
