"""Checks whether this GPU runs the recipe, how fast, and whether the memory plan was right.

    check_gpu(Options(minutes=8), Path("recipes/gsm8k_lora.py"))

A row is one model size, one training engine and one sampling backend. Each row runs the real recipe as a command of its
own, for a few steps, on random weights and generated problems, so nothing is downloaded:

    measure the GPU's bandwidth and matrix rate
    for each row:  random model ──► recipe, with a time limit ──► run.json, metrics.jsonl ──► one line of the table

check.py              the options, the order of the rows, the time limit
row.py                the command of one row, and its measurements
random_model.py       models with Qwen2.5's shapes and random weights
measured_command.py   a command with a time limit, a log and its peak GPU memory
table.py              results.json and results.md
"""

from lora_grpo.gpu_check.check import Options, check_gpu

__all__ = ["Options", "check_gpu"]
