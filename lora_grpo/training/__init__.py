"""Train with TRL's GRPOTrainer and this package's sampler and loss pass, or with TRL's SFTTrainer.

trainer = FastGRPOTrainer(model, reward_funcs, ...)   # in a script: the arguments of TRL's GRPOTrainer

In a recipe, where runs on a CPU resume bit for bit:

training = prepare_training(run, policy, rows, sampler, validation_rows)   # TRL and the logprob check refuse settings
train(training)                                                            # resumes, trains, saves run.adapter

sampler ──► rewards ──► loss and update ──► callbacks ──► monitoring/: metrics.jsonl, alarms, validation, best/
   ▲                          │
   └──────── adapter ─────────┘

TRL owns the loop, advantages, the loss and the update. In a run with the method `sft`, the task's reference answers
replace samples and rewards.

fast_trainer.py   FastGRPOTrainer: overrides of TRL's methods, each of which calls a part; RecipeTrainer of a run
step_sampling.py  samples the completions of a step, with seeds; TRL samples if it fails
teacher_pass.py   the teacher of a run reads the completions before the loss
fallback.py       arguments and models that only TRL's own code supports
trl_compat.py     code that depends on private attributes of TRL
unsloth_compat.py code that depends on the trainer that Unsloth generates
logprob_check.py  before training: checks that the sampler samples from the policy being trained
prepare.py        prepare_training: the trainer of a run, its monitor and its trackers
run.py            train: from the newest checkpoint to the saved adapter
callbacks.py      which event of transformers' Trainer calls which part of monitoring/
stop_signal.py    Ctrl-C and SIGTERM end a run after a step
sft.py            the trainer of the method `sft`: tokens and labels of reference answers
sft_trainer.py    its class
trl_config.py     all GRPOConfig and SFTConfig arguments of a run: loss type, clipping, KL weight, batch sizes
difficulty.py     --data.filter-by-difficulty: keeps rows that the base model sometimes, but not always, solves

Checkpoints are in runs/checkpoints.py, the loss pass is in loss/.
"""

from typing import TYPE_CHECKING, Any

from lora_grpo.training.difficulty import filter_by_difficulty
from lora_grpo.training.prepare import Training, prepare_training
from lora_grpo.training.run import train
from lora_grpo.training.teacher_pass import check_teacher_loss

if TYPE_CHECKING:
    from lora_grpo.training.fast_trainer import FastGRPOTrainer


def __getattr__(name: str) -> Any:
    """Import FastGRPOTrainer when it is used, because its module imports TRL."""
    if name != "FastGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lora_grpo.training.fast_trainer import FastGRPOTrainer

    return FastGRPOTrainer
