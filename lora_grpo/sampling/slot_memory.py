"""How many completions a machine's memory can decode at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_grpo.models import PICK_BYTES
from lora_grpo.sampling.decoding_slots import BEGUN_SHARE, can_join

MOST_ON_GPU = 256
"""Chosen, not measured: vLLM's default for such cards."""
MOST_ON_CPU = 256
"""As many as a unit of an evaluation has; 64 at once took half as long again on two cores."""
_GPU_SHARE = 0.8
"""Of the memory that is free; the rest is for the allocator's gaps and for work space of the libraries."""
_CPU_SHARE = 0.25
"""Of all memory: what is free differs between two runs, and weights and other programs are there too."""


def rows_that_fit(model: Any, longest_prompt: int, max_tokens: int) -> int:
    """Return how many completions the memory that is there can decode at once, a power of two.

    On a CPU it depends on the machine alone, so that a command that goes on decodes in the same composition.

    Args:
        model: a transformers model, or a PEFT model around one.
        longest_prompt: tokens.
        max_tokens: longest completion, in tokens.
    """
    import torch

    each = bytes_a_row(model, longest_prompt, max_tokens)
    device = next(model.parameters()).device
    if device.type == "cuda":
        # Torch keeps what it freed; the driver does not count it as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        memory, most = _GPU_SHARE * (torch.cuda.mem_get_info(device)[0] + unused), MOST_ON_GPU
    else:
        memory, most = _CPU_SHARE * _total_memory(), MOST_ON_CPU
    fit = int(min(memory // each, most))
    return 1 << max(0, fit.bit_length() - 1)


def bytes_a_row(model: Any, longest_prompt: int, max_tokens: int) -> int:
    """Estimate the memory in bytes, rather too high, of one completion while it is decoded.

    Args:
        model: a transformers model, or a PEFT model around one.
        longest_prompt: tokens.
        max_tokens: longest completion, in tokens.
    """
    config = getattr(model.config, "text_config", None) or model.config
    width: int = config.hidden_size
    heads: int = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_width = getattr(config, "head_dim", None) or width // heads
    inner = getattr(config, "intermediate_size", None) or 4 * width
    size = model.get_input_embeddings().weight.element_size()  # a 4-bit layer's own weights are bytes

    # One layer more, and half as much: the cache is copied layer by layer when it grows.
    cached = (longest_prompt + max_tokens) * (config.num_hidden_layers + 2) * 2 * key_heads * head_width * size
    picking = config.vocab_size * PICK_BYTES
    # In a layer: the residual, its norm, queries to outputs; the feed-forward part's gate, inner values and product.
    reading = longest_prompt * ((8 * width + 6 * inner) * size + 4 * longest_prompt)
    begun = BEGUN_SHARE if can_join(model.config) else 1
    return int(cached + max(picking, reading * begun))


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a failed step failed for want of memory; the CPU's allocator has no error class of its own."""
    import torch

    told = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in told)


def _total_memory() -> int:
    """Return the machine's memory in bytes."""
    first = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()[0]  # MemTotal:  24684092 kB
    return int(first.split()[1]) * 1024
