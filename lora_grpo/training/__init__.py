"""Training: TRL's GRPOTrainer with the kit's sampler, monitored and resumable bit for bit.

trainer = make_trainer(run, policy, rows, sampler, validation_rows)   # TRL and the logprob check reject mistakes
train(run, policy, trainer)                                           # resumes, trains, saves run.adapter

sampler ──► rewards ──► GRPO update ──► callback: metrics.jsonl, alarms, validation, best/, signals
   ▲                          │
   └──────── adapter ─────────┘

trainer           make_trainer: GRPOConfig, GRPOTrainer and its mixins, monitor, callback
run               train: from the newest checkpoint to the saved adapter
callback          what happens between steps; Ctrl-C and SIGTERM
trl_config        every GRPOConfig argument that a run relies on
chunked_logprobs  logprobs without logits of the whole vocabulary
step_metrics      time per phase, logprob mismatch of sampler and trainer
logprob_check     before a run: the sampler samples from the policy being trained
memory_probe      before the first step: the largest micro-batch fits
monitor           alarms, validation passes, the best adapter, early stopping
alarms            when a run goes wrong, and what to change
validation        rows that are sampled during training and never trained on
completion_log    completions of every n-th step with their rewards and verdicts
difficulty        --data.filter-by-difficulty: rows that the base solves sometimes
"""

from lora_grpo.training.difficulty import filter_by_difficulty
from lora_grpo.training.memory_probe import synthetic_inputs
from lora_grpo.training.run import train
from lora_grpo.training.step_metrics import StepMetrics
from lora_grpo.training.trainer import make_trainer

__all__ = ["StepMetrics", "filter_by_difficulty", "make_trainer", "synthetic_inputs", "train"]
