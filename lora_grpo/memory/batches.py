"""Limits of the batch of the built-in sampler, which the plan and the sampler share."""

MAX_BATCH_SIZE = 256
"""The default of vLLM, and the number of completions per unit of an evaluation."""
CPU_FRACTION = 0.25
"""Fraction of total memory to use. Free memory differs between runs, and weights and other programs need memory."""
