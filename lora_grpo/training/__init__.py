"""Train with TRL's GRPOTrainer and this package's sampler. Runs are monitored and resume bit for bit.

trainer = make_trainer(run, policy, rows, sampler, validation_rows)   # TRL and the logprob check reject bad settings
train(run, policy, trainer)                                           # resumes, trains, saves run.adapter

sampler ──► rewards ──► GRPO update ──► monitor: metrics.jsonl, alarms, validation, best/
   ▲                          │
   └──────── adapter ─────────┘

The loss is TRL's `GRPOTrainer._compute_loss`. Mixins compute its logprobs in chunks and record metrics around it.

trainer           make_trainer: GRPOConfig, GRPOTrainer and its mixins, monitor
run               train: from the newest checkpoint to the saved adapter; handles Ctrl-C and SIGTERM
trl_config        all GRPOConfig arguments of a run: loss type, clipping, KL weight, batch sizes
chunked_logprobs  the logprobs of the loss, without materializing the full logits
step_metrics      wraps `_compute_loss`: time per phase, logprob mismatch between sampler and trainer
logprob_check     before training: checks that the sampler samples from the policy being trained
memory_probe      before the first step: checks that the largest micro-batch fits in GPU memory
monitor           callback between steps: metrics, alarms, validation passes, the best adapter, early stopping
alarms            detects a run that goes wrong and suggests a fix
validation        the validation set: rows sampled during training but never trained on
completion_log    logs the completions of every n-th step with rewards and verdicts
difficulty        --data.filter-by-difficulty: keeps the rows that the base solves sometimes
"""

from lora_grpo.training.difficulty import filter_by_difficulty
from lora_grpo.training.memory_probe import synthetic_inputs
from lora_grpo.training.run import train
from lora_grpo.training.step_metrics import StepMetrics
from lora_grpo.training.trainer import make_trainer

__all__ = ["StepMetrics", "filter_by_difficulty", "make_trainer", "synthetic_inputs", "train"]
