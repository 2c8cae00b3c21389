"""Evaluate a run, an adapter or a model on GSM8K, HumanEval, MBPP or generated problems, or grade a file of samples.

    python scripts/evaluate.py outputs/gsm8k_lora --compare base
    python scripts/evaluate.py Qwen/Qwen2.5-Coder-0.5B-Instruct --task humaneval --k 1 10 --temperature 0.8
    python scripts/evaluate.py outputs/gsm8k_lora/gguf/gsm8k_lora.Q4_0.gguf --compare outputs/gsm8k_lora/merged
    python scripts/evaluate.py samples.jsonl --task humaneval

Reports pass@k with 95% intervals and, for two models, a paired test. If the evaluation is interrupted, run the same
command to continue; for a finished evaluation, the command prints the stored results. A file of samples has
one JSON object per line with `task_id` and `completion`, the format of HumanEval's harness.
"""

import sys

from lora_grpo.cli import read_flags, run_command
from lora_grpo.evaluation import EvaluateOptions, evaluate_and_report


def main() -> None:
    evaluate_and_report(read_flags(EvaluateOptions, sys.argv[1:], prog="evaluate.py", description=str(__doc__)))


if __name__ == "__main__":
    sys.exit(run_command(main))
