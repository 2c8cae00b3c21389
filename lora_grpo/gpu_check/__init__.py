"""`lora-grpo check-gpu`: which engine and sampling backend is the fastest on this GPU?

    check_gpu(Options(minutes=30), recipe)    # a few steps of the recipe with every engine

Each engine and backend runs in a separate process, with random weights and generated problems.

measure.py       runs the recipe on a random model with each engine and backend, and measures time and memory
findings.py      the table, its conclusions, and the choice of the fastest engine
tune_kernels.py  finds the fastest launch settings of vLLM's LoRA kernel, and saves them for all runs on this GPU
random_model.py  builds a model with a published shape and random weights
"""

from lora_grpo.gpu_check.measure import Options, check_gpu
