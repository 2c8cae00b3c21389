"""How many completions can be decoded at once in the available memory."""

from __future__ import annotations

from typing import Any

from lora_grpo import distributed
from lora_grpo.hardware import machine
from lora_grpo.memory import CPU_FRACTION, MAX_BATCH_SIZE, estimate
from lora_grpo.sampling.continuous_batching import START_FRACTION
from lora_grpo.sampling.growing_cache import SPARE_COLUMNS, cache_argument, has_full_attention

_GPU_FRACTION = 0.8
"""Fraction of free memory to use. The rest is for allocator fragmentation and library workspace."""


def max_batch_size(model: Any, longest_prompt: int, max_tokens: int) -> int:
    """Return how many completions can be decoded at once in the available memory, as a power of two.

    On a CPU, the result depends only on the machine and the number of processes, so that a resumed command decodes the
    same batches.
    """
    import torch

    device = next(model.parameters()).device
    if device.type == "cuda":
        # The driver counts memory that torch caches after freeing tensors as used.
        free_for_driver, _ = torch.cuda.mem_get_info(device)
        unused_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available = _GPU_FRACTION * (free_for_driver + unused_by_torch)
    else:
        total, _ = machine.machine_memory()
        available = CPU_FRACTION * total / distributed.world_size()
    completions = int(available // bytes_per_completion(model, longest_prompt, max_tokens))
    completions = min(completions, MAX_BATCH_SIZE)
    return 1 << max(0, completions.bit_length() - 1)


def bytes_per_completion(model: Any, longest_prompt: int, max_tokens: int) -> int:
    """Return an upper bound of the bytes per completion during decoding. Lengths are in tokens."""
    import torch

    config = model.config.get_text_config()
    bytes_per_value = model.get_input_embeddings().weight.element_size()  # a 4-bit layer's dtype is uint8

    # The cache: keys and values of each token, and recurrent states, which do not grow.
    bytes_by_layer = []  # of the keys and values of one token
    state_bytes = 0
    for layer in _cache_of_one_token(model):
        keys = layer.get("keys")
        layer_bytes = 0 if keys is None else 2 * keys.nbytes
        bytes_by_layer.append(layer_bytes)
        state_bytes += _tensor_bytes(layer) - layer_bytes
    # Two additional layers, because the cache is copied layer by layer when it grows. Recurrent states are copied all
    # at once.
    bytes_per_token = sum(bytes_by_layer) + 2 * max(bytes_by_layer)
    recurrent_states = 2 * state_bytes

    # Reading the prompt. In a layer, a token has at most eight values of the hidden size (the residual, its norm,
    # queries to outputs), six of the inner width (gate, inner values and product of the feed-forward block), and a row
    # of the attention mask.
    linears = [module for module in model.get_decoder().modules() if isinstance(module, torch.nn.Linear)]
    inner_width = max(linear.out_features for linear in linears)
    values_per_token = 8 * config.hidden_size + 6 * inner_width
    mask_bytes_per_token = 4 * longest_prompt
    prefill_bytes = longest_prompt * (values_per_token * bytes_per_value + mask_bytes_per_token)
    # At most this fraction of the batch reads its prompts at the same time.
    prefilled_at_once = START_FRACTION if has_full_attention(model.config) else 1

    # Reading prompts and selecting tokens take turns, so the larger of the two counts.
    selection_bytes = config.vocab_size * estimate.SELECTION_BYTES
    temporary_bytes = max(selection_bytes, prefill_bytes * prefilled_at_once)
    columns = longest_prompt + max_tokens + SPARE_COLUMNS
    return int(columns * bytes_per_token + recurrent_states + temporary_bytes)


def _cache_of_one_token(model: Any) -> list[dict[str, Any]]:
    """Run the model on one token, and return the attributes of its cache, layer by layer."""
    import torch
    from transformers import DynamicCache

    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    argument = cache_argument(model)
    empty_cache = {argument: DynamicCache(config=model.config)}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        output = model(input_ids=token, use_cache=True, **empty_cache)
    model.train(was_training)
    cache = getattr(output, argument)
    if getattr(cache, "layers", None):
        return [vars(layer) for layer in cache.layers]
    return [{"keys": keys, "values": values} for keys, values in cache]  # Unsloth's


def _tensor_bytes(attributes: dict[str, Any]) -> int:
    """Return the bytes of all tensors in the attributes of a layer, which may be in lists."""
    import torch
    from torch.utils._pytree import tree_leaves

    return sum(leaf.nbytes for leaf in tree_leaves(attributes) if isinstance(leaf, torch.Tensor))


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means out of memory. The CPU allocator has no error class of its own."""
    messages = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return any(message in str(error) for message in messages)
