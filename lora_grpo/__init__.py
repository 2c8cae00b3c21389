"""LoRA + GRPO on one GPU: the data flow, one room per arrow.

task rows -> prompts -> rollouts (G per prompt) -> rewards -> GRPO update -> adapter + run.json
 tasks/      prompts     rollouts                  rewards     train          policy, run_record

evaluate (base, adapter) -> passk -> report

Importing this package loads none of torch, transformers, trl, peft, unsloth, vllm or datasets: they are imported by
the functions that use them, so that `--help` and argument errors answer at once.
"""

__version__ = "0.1.0"
