"""Train with TRL's GRPOTrainer and this package's sampler, or its SFTTrainer. On a CPU, runs resume bit for bit.

trainer = FastGRPOTrainer(model, reward_funcs, ...)   # in a script: the arguments of TRL's GRPOTrainer

In a recipe:

trainer = make_trainer(run, policy, rows, sampler, validation_rows)   # TRL and the logprob check reject bad settings
train(run, policy, trainer)                                           # resumes, trains, saves run.adapter

sampler ──► rewards ──► GRPO update ──► monitor: metrics.jsonl, alarms, validation, best/
   ▲                          │
   └──────── adapter ─────────┘

The loss is TRL's own. FastGRPOTrainer computes its logprobs in less time; mixins record metrics before and after it.
In a run with the method `sft`, the task's reference answers replace samples and rewards.

fast_trainer.py      FastGRPOTrainer: GRPOTrainer with this package's sampler and loss pass; RecipeTrainer of a run
trainer.py           make_trainer: GRPOConfig, RecipeTrainer, monitor
sft.py               the SFTTrainer of make_trainer: tokens and labels of reference answers, its mixin
run.py               train: from the newest checkpoint to the saved adapter; handles Ctrl-C and SIGTERM
trl_compat.py        code that depends on private methods of TRL: hooks for the mixins, and attributes of its trainers
trl_config.py        all GRPOConfig and SFTConfig arguments of a run: loss type, clipping, KL weight, batch sizes
logprob_check.py     before training: checks that the sampler samples from the policy being trained
monitor.py           callback between steps: metrics, alarms, validation passes, the best adapter, early stopping
trackers.py          callback of --train.report-to: metrics, final table and report
time_budget.py       --hours: ends training in time for the final evaluation
alarms.py            detects a run that goes wrong and suggests a fix
completions.py       mixins: time per phase, logprob mismatch, and scores of every step; the validation set
token_logprobs.py    mixins: logprobs without the full logits, and without completions whose group has equal rewards
shared_prompts.py    mixin: packs the rows before the backbone, so that the layers read each prompt once for its group
packing.py           layout of a packed micro-batch: the position of each token, what it attends to, and its attention
difficulty.py        --data.filter-by-difficulty: keeps rows that the base model sometimes, but not always, solves
"""

from typing import TYPE_CHECKING, Any

from lora_grpo.training.completions import ScoredRollouts, StepMetrics
from lora_grpo.training.difficulty import filter_by_difficulty
from lora_grpo.training.run import train
from lora_grpo.training.shared_prompts import SharedPrompts
from lora_grpo.training.time_budget import TimeBudget
from lora_grpo.training.token_logprobs import ChunkedLogProbs, SkipZeroAdvantage
from lora_grpo.training.trainer import make_trainer
from lora_grpo.training.trl_compat import TrlHooks

if TYPE_CHECKING:
    from lora_grpo.training.fast_trainer import FastGRPOTrainer


def __getattr__(name: str) -> Any:
    """Import FastGRPOTrainer when it is used, because its module imports TRL."""
    if name != "FastGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lora_grpo.training.fast_trainer import FastGRPOTrainer

    return FastGRPOTrainer
