"""Checks whether this GPU can run the recipe, how fast it is, and whether the memory plan is accurate.

    check_gpu(Options(minutes=8), Path("recipes/gsm8k_lora.py"))

A row is a combination of model size, training engine and sampling backend. Each row runs the real recipe in a separate
process for a few steps, with random weights and generated problems, so nothing is downloaded:

    measure the GPU's memory bandwidth and matmul throughput
    for each row:  random model ──► recipe, with a time limit ──► run.json, metrics.jsonl ──► one line of the table

check.py              measures the GPU, runs all rows within the time limit, and writes results.json and results.md
row.py                runs the command of one row, and reads its measurements
random_model.py       builds models with Qwen2.5's shapes and random weights
measured_command.py   runs a command with a time limit and a log, and measures its peak GPU memory
"""

from lora_grpo.gpu_check.check import Options, check_gpu

__all__ = ["Options", "check_gpu"]
