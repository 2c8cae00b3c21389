"""Watch a run: metrics, alarms, validation, the best adapter, its time, trackers. It does not need TRL.

    rollouts, rewards, loss ──► StepMetrics ──► the trainer's log ──► Monitor ──► metrics.jsonl, alarms, best/
                                                                        ▲
                                                        Validation ─────┘──► validation/

The trainer hands values of all processes to these parts; `training/callbacks.py` calls them between steps. Rank 0
writes and prints.

step_metrics.py    metrics of a step that TRL does not log: times, tokens per second, logprob mismatch, conversations
phase_peaks.py     the highest GPU memory in each phase of a step, and a warning if it exceeds the plan's
completion_log.py  one line for each completion: text, verdict, rewards
validation.py      samples and grades the validation rows after some steps
alarms.py          detects a run that goes wrong, and suggests a fix
monitor.py         after each step: metrics, alarms, validation passes, the best adapter, early stopping
time_budget.py     --hours: ends training in time for the final evaluation
trackers.py        --train.report-to: metrics, final table and report
"""

from lora_grpo.monitoring.alarms import Alarms
from lora_grpo.monitoring.completion_log import completion_lines, write_completions
from lora_grpo.monitoring.monitor import Monitor
from lora_grpo.monitoring.phase_peaks import START_OVER, PhasePeaks, peaks_of_run
from lora_grpo.monitoring.step_metrics import (
    IMPORTANCE_WEIGHT,
    LARGEST_LOGPROB_MISMATCH,
    LOGPROB_MISMATCH,
    TEACHER_DISAGREEMENT,
    TEACHER_KL,
    StepMetrics,
    clock,
    conversation_metrics,
)
from lora_grpo.monitoring.time_budget import TimeBudget
from lora_grpo.monitoring.trackers import Trackers
from lora_grpo.monitoring.validation import Validation
