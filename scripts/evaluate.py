"""Grade a file of samples on HumanEval, MBPP or GSM8K and report pass@k.

    python scripts/evaluate.py --task humaneval --samples samples.jsonl --output-dir outputs/humaneval

A sample is one JSON a line with `task_id` and `completion`, as HumanEval's own harness reads them. A humaneval
completion is what follows the prompt, an mbpp completion the whole program, a gsm8k completion the answer in words. The
same command goes on after a kill.
"""

import sys

from lora_grpo.command_line import run_command
from lora_grpo.sample_files import Options, evaluate_samples, print_report
from lora_grpo.script_flags import read_flags


def main() -> None:
    options = read_flags(Options, sys.argv[1:], prog="evaluate.py", description=str(__doc__))
    print_report(evaluate_samples(options), options.output_dir)


if __name__ == "__main__":
    sys.exit(run_command(main))
