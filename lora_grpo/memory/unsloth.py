"""The memory of what Unsloth does differently: its loss pass, its pass without gradients, and inputs in host memory.

Read in unsloth_zoo 2026.10.9 and compared with the bytes that it allocates by tests/gpu_rig/test_unsloth_memory.py.
Tensors have 16 bits unless noted.
"""

import math

from lora_grpo.memory.shape import Shape

LEAST_OFFLOADED = 512
"""Context in tokens from which gradient checkpointing uses host memory (unsloth/models/_utils.py)."""
_TILE_TOKENS = 4096
"""Tokens of a tile of logits."""
_TILE_VOCABULARY = 16384
"""Vocabulary entries of a tile of logits."""
_CHUNK_TOKENS = 512
"""Tokens whose logits of a whole vocabulary are computed at once."""
_HOST_BUFFERS = 200
"""Host buffers that the gradient checkpointing allocates at the start."""
_HOST_BUFFER_BYTES = 2 * 128 * 1024
"""Size of a host buffer before it grows."""


def host_bytes(shape: Shape, tokens: int) -> int:
    """Return the pinned host memory for the inputs of all layers, in bytes.

    PyTorch rounds each buffer up to a power of two, because it is pinned.

    Args:
        tokens: tokens of a micro-batch.
    """
    layers = len(shape.layers)
    input_bytes = 2 ** math.ceil(math.log2(2 * tokens * shape.hidden))
    unused_buffers = max(0, _HOST_BUFFERS - layers)
    return layers * input_bytes + unused_buffers * _HOST_BUFFER_BYTES


def loss_bytes(shape: Shape, rows: int, length: int, completion_tokens: int) -> int:
    """Return the bytes between the last layer and the logprobs, forward and backward.

    Unsloth's fused kernel computes a part of the logits, in 32 bits, and at once the gradient of the hidden states,
    which it keeps for the backward pass (fused_losses/fused_linear.py). In float16 it keeps 32 bits of that gradient,
    which are not counted.

    Args:
        rows: completions of the micro-batch.
        length: longest prompt plus completion, in tokens.
        completion_tokens: tokens of these completions.
    """
    tokens = rows * length
    states = (4 * tokens + 2 * completion_tokens) * shape.hidden
    kept_gradient = 2 * completion_tokens * shape.hidden
    # The logits of a tile of tokens and vocabulary, and the sum over the vocabulary.
    tile = 4 * min(completion_tokens, _TILE_TOKENS) * (min(shape.vocabulary, _TILE_VOCABULARY) + shape.hidden)
    # Until Unsloth trusts its packing, it scores every row alone. On GPUs with more than 24.5 GiB, fewer than 4,096
    # tokens are scored with the whole vocabulary.
    one_row = 4 * min(length, _CHUNK_TOKENS) * shape.vocabulary
    # The gradient of the hidden states of completions, padded with zeros for the prompts.
    padded_gradient = 4 * tokens * shape.hidden
    return states + kept_gradient + max(tile, one_row, padded_gradient)


def scoring_bytes(shape: Shape, rows: int, length: int, free: int) -> int:
    """Return the bytes of a forward pass without gradients over as many of the step's rows as Unsloth takes at once.

    Unsloth takes the largest number of rows for which its own estimate is at most 0.8 of the free memory
    (`autotune_batch_and_chunks`), and cuts the step into equal parts. With long contexts, Unsloth's estimate is below
    what the pass needs.

    Args:
        rows: completions of the step.
        length: longest prompt plus completion, in tokens.
        free: bytes of the GPU that are free before the pass.
    """

    def unsloth_estimate(count: int) -> float:
        """Return the bytes that Unsloth expects of `count` rows: 16 for each hidden state and each logit of a chunk."""
        chunks = max(4, length // 4096)
        logits_per_token = count / rows * shape.vocabulary / chunks
        return 16 * count * length * (shape.hidden + logits_per_token)

    at_once = min(4, rows)  # Unsloth's choice if not even one row is below the limit
    for count in range(rows, 0, -1):
        if unsloth_estimate(count) <= 0.8 * free:
            at_once = count
            break
    num_parts = rows // at_once
    rows_of_part = math.ceil(rows / num_parts)
    return rows_of_part * length * (10 * shape.hidden + 6 * shape.layers[0].inner)
