"""Compute how many completions can be decoded at once in the available memory."""

from __future__ import annotations

from typing import Any

from lora_grpo.config import hardware
from lora_grpo.models import memory
from lora_grpo.sampling.continuous_batching import SPARE_COLUMNS, START_SHARE, can_join

MAX_BATCH_SIZE = 256
"""The default of vLLM, and the number of completions per unit of an evaluation."""
_GPU_SHARE = 0.8
"""Share of free memory to use. The rest is for allocator fragmentation and library workspace."""
_CPU_SHARE = 0.25
"""Share of total memory to use. Free memory differs between runs, and weights and other programs also need memory."""


def max_batch_size(model: Any, longest_prompt: int, max_tokens: int) -> int:
    """Return how many completions can be decoded at once in the available memory, as a power of two.

    On a CPU, the result depends only on the machine, so that a resumed command decodes the same batches.
    """
    import torch

    device = next(model.parameters()).device
    if device.type == "cuda":
        # The driver counts memory that torch caches after freeing tensors as used.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available = _GPU_SHARE * (torch.cuda.mem_get_info(device)[0] + unused)
    else:
        available = _CPU_SHARE * hardware.machine_memory()[0]
    fit = int(min(available // bytes_per_completion(model, longest_prompt, max_tokens), MAX_BATCH_SIZE))
    return 1 << max(0, fit.bit_length() - 1)


def bytes_per_completion(model: Any, longest_prompt: int, max_tokens: int) -> int:
    """Return an upper bound of the bytes per completion during decoding. Lengths are in tokens."""
    config = getattr(model.config, "text_config", None) or model.config
    hidden: int = config.hidden_size
    heads: int = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_width = getattr(config, "head_dim", None) or hidden // heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    width = model.get_input_embeddings().weight.element_size()  # not from a 4-bit layer, whose dtype is uint8

    # Two additional layers, because the cache is copied layer by layer when it grows.
    token = 2 * width * (config.num_hidden_layers + 2) * key_heads * head_width
    selection = config.vocab_size * memory.SELECTION_BYTES
    # Per layer: the residual, its norm, queries to outputs; gate, inner values and product of the feed-forward block.
    prefill = longest_prompt * ((8 * hidden + 6 * inner) * width + 4 * longest_prompt)
    started = START_SHARE if can_join(model.config) else 1
    return int((longest_prompt + max_tokens + SPARE_COLUMNS) * token + max(selection, prefill * started))


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means out of memory. The CPU allocator has no error class of its own."""
    import torch

    messages = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in messages)
