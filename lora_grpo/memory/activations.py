"""The memory of a forward and backward pass through one micro-batch: the layers, and the logits after them.

Notation, as in `estimate.py`: T tokens of the micro-batch, h hidden size, q and kv total widths of the query heads and
of the key heads, i inner size of the feed-forward block, V vocabulary size, r rank of the adapter. Activations have 16
bits on a GPU and 32 on a CPU.

The factors of the formulas count bytes per token. tests/memory/test_estimate.py compares their sums with the tensors
that torch allocates for models of every kind, tests/gpu_rig/test_unsloth_memory.py those of Unsloth.
"""

import functools
import importlib.metadata
from dataclasses import dataclass

from lora_grpo.memory import unsloth
from lora_grpo.memory.shape import DeltaNet, Layer, Shape
from lora_grpo.memory.step import Step

_SCORE_BYTES = 8
"""Bytes of an attention score that is saved for the backward pass: after the cap, and twice after the softmax."""
_DELTA_CHUNK = 64
"""Tokens of a chunk of the delta net (transformers)."""
_LOGPROB_TOKENS = 2048
"""Tokens of a tile of the logits (TRL 1.14, chunked logprobs)."""
_LOGPROB_ENTRIES = 8192
"""Vocabulary entries of such a tile."""
_SFT_TOKENS = 256
"""Tokens of a chunk of the logits in SFT (TRL 1.14, chunked loss)."""
_FUSED_TOKENS = 4096
"""Tokens of a tile of the logits in TRL 1.16."""
_FUSED_ENTRIES = 32_768
"""Vocabulary entries of such a tile."""
_CPU_TOKENS = 1024
"""Tokens of a tile on a CPU, see `CPU_TILE` of training/trl_compat.py."""
_CPU_ENTRIES = 8192
"""Vocabulary entries of such a tile."""


@dataclass(frozen=True)
class Activations:
    """The memory of the layers."""

    saved: int
    """Bytes that the forward pass leaves for the backward pass."""
    one_layer: int
    """Bytes that the backward pass of one layer adds to them."""


def activation_bytes(shape: Shape, step: Step, adapter_parameters: int) -> Activations:
    """Return the memory of the layers in a forward and backward pass.

    With checkpointing, the forward pass saves only the input of each layer, and one layer at a time is recomputed.
    Without checkpointing, every layer saves all activations, and autocast keeps a 16-bit copy of the adapter. If
    Unsloth moves the inputs to host memory, the last one stays on the GPU, with two buffers for the others.
    """
    layer_count = len(shape.layers)
    saved_by_kind = {layer: step.tokens * _saved_per_token(layer, step) for layer in shape.kinds}
    copies = _copies_of_packed_layer(shape, step)
    adapter_copy = 0 if step.on_cpu else 2 * adapter_parameters
    dequantized_matrix = step.float_bytes * shape.largest_matrix
    backward = _added_by_backward(shape, step, dequantized_matrix)

    # All layers share one attention mask. In a padded batch, each layer makes another one of it.
    layer_mask = 0
    if step.packed:
        # Which context each token of a completion sees, as booleans and as numbers.
        shared = (1 + step.float_bytes) * step.padded_tokens * step.completion
    elif step.unsloth_kernels:
        # No mask, but one buffer for the matrices that forward passes dequantize.
        shared = dequantized_matrix
    else:
        # Rows x length x length: as booleans and, in each layer, as numbers.
        shared = step.padded_tokens * step.trained_length
        layer_mask = step.float_bytes * shared

    if step.config.train.gradient_checkpointing:
        # All layers save their inputs and gates. The other activations exist in one layer at a time.
        inputs_on_gpu = 3 if step.offloads else layer_count
        inputs = step.tokens * step.float_bytes * shape.hidden * inputs_on_gpu
        saved = inputs + step.tokens * _gates_per_token(shape) + shared + layer_mask
        recomputed = max(saved_by_kind.values()) + copies
        return Activations(saved, one_layer=recomputed + backward + adapter_copy // layer_count)

    saved = shared + adapter_copy
    for layer, count in shape.kinds.items():
        saved += count * (saved_by_kind[layer] + copies + layer_mask)
    return Activations(saved, one_layer=backward)


def logit_bytes(shape: Shape, step: Step) -> int:
    """Return the bytes used between the last layer and the logprobs, forward and backward.

    Logits are computed in tiles of tokens and vocabulary entries (loss/tiles.py), by Unsloth and in SFT with TRL 1.14
    in chunks of tokens.
    """
    completion_tokens = step.micro_batch_size * step.completion
    last_norm = (8 + step.float_bytes) * step.tokens * shape.hidden
    if _has_fused_head() and not step.unsloth_kernels:
        return last_norm + _fused_head_bytes(shape, step, completion_tokens)
    if step.config.method == "sft":
        # The hidden states are sorted, and a chunk needs four tensors of the size of its logits in float32.
        sorted_states = 2 * step.float_bytes * step.tokens * shape.hidden
        return last_norm + sorted_states + 4 * 4 * _SFT_TOKENS * shape.vocabulary
    if step.unsloth_kernels:
        return unsloth.loss_bytes(shape, step.micro_batch_size, step.length, completion_tokens)

    hidden_gradient = 4 * completion_tokens * shape.hidden
    tile_tokens = min(completion_tokens, _LOGPROB_TOKENS)
    tile_entries = min(shape.vocabulary, _LOGPROB_ENTRIES)
    tile_size = tile_tokens * tile_entries
    # Two buffers for the logits of a tile, in float32 and in the dtype of the activations. With a smaller vocabulary,
    # they are as wide.
    buffers = (4 + step.float_bytes) * tile_tokens * _LOGPROB_ENTRIES
    # Besides the buffers, the peak is at one of two moments. While the gradient of a tile's logits is computed, three
    # float32 tensors of its size exist, and a fourth that is left of the previous tile.
    is_single_tile = tile_tokens == completion_tokens and tile_entries == shape.vocabulary
    during_gradient = (12 if is_single_tile else 16) * tile_size
    # While the gradient is multiplied by the head, two of them exist, with the tile's part of the head in float32 and
    # the product.
    during_product = 8 * tile_size + 4 * shape.hidden * (tile_tokens + tile_entries)
    return last_norm + hidden_gradient + buffers + max(during_gradient, during_product)


def pass_bytes(shape: Shape, step: Step) -> int:
    """Return the bytes of a teacher's pass without gradients over a micro-batch: at most what one layer would save.

    Args:
        shape: of the teacher's base, which may be another one than the model's.
    """
    step = step.with_teacher_prompts()
    one_layer = max(step.tokens * _saved_per_token(layer, step) for layer in shape.kinds)
    copies = _copies_of_packed_layer(shape, step)
    masked_tokens = step.completion if step.packed else step.trained_length
    mask = (1 + step.float_bytes) * step.padded_tokens * masked_tokens
    dequantized_matrix = step.float_bytes * shape.largest_matrix
    return one_layer + copies + mask + dequantized_matrix + logit_bytes(shape, step)


def divergence_bytes(shape: Shape, teacher_shape: Shape, step: Step) -> int:
    """Return the bytes of the divergence between the distributions of the model and its teacher.

    These are the hidden states of both models, those of the teacher twice, with the gradient of the model's in float32,
    and the logits of a tile of both models in float32. On a CPU, PyTorch needs nine more tensors of the tile's size,
    and ten for the Jensen-Shannon divergence.
    """
    tokens = step.micro_batch_size * step.completion
    states = tokens * (2 * step.float_bytes * teacher_shape.hidden + (step.float_bytes + 4) * shape.hidden)
    tile_tokens, tile_entries = _fused_tile(step, tokens)
    tiles = 2 * 4 * tile_tokens * tile_entries
    temporary = 0
    if step.on_cpu:
        num_tensors = 10 if step.config.teacher.loss == "jsd" else 9
        temporary = num_tensors * 4 * tile_tokens * min(shape.vocabulary, tile_entries)
    return states + tiles + temporary


@functools.cache
def _has_fused_head() -> bool:
    """Return whether TRL computes logprobs with a fused head, as from 1.15 on (training/trl_compat.py)."""
    major, minor = importlib.metadata.version("trl").split(".")[:2]
    return (int(major), int(minor)) >= (1, 15)


def _fused_tile(step: Step, tokens: int) -> tuple[int, int]:
    """Return the tokens and the vocabulary entries of a tile of TRL's fused head, for the logits of `tokens` tokens."""
    if step.on_cpu:
        return min(tokens, _CPU_TOKENS), _CPU_ENTRIES
    return min(tokens, _FUSED_TOKENS), _FUSED_ENTRIES


def _fused_head_bytes(shape: Shape, step: Step, tokens: int) -> int:
    """Return the bytes that TRL's fused head uses for the logprobs of `tokens` tokens, forward and backward.

    The backward pass needs most: the hidden states of these tokens and their gradient, in 16 bits also in float32, and
    the logits of a tile. On a GPU, a kernel replaces the logits with their gradient. On a CPU, PyTorch needs seven more
    float32 tensors of the tile's size and one of booleans. With a smaller vocabulary, the logits' buffer is as wide.
    """
    tile_tokens, tile_entries = _fused_tile(step, tokens)
    states = 8 * tokens * shape.hidden
    logits = step.float_bytes * tile_tokens * tile_entries
    temporary = 0
    if step.on_cpu:
        temporary = 29 * tile_tokens * min(shape.vocabulary, tile_entries)
    return states + logits + temporary


def _saved_per_token(layer: Layer, step: Step) -> int:
    """Return the bytes per token that the forward pass of a layer saves for its backward pass."""
    if step.unsloth_kernels:
        return _saved_by_unsloth(layer)
    if layer.delta:
        return _saved_by_delta_net(layer, layer.delta, step)
    return _saved_by_attention(layer, step)


def _saved_by_attention(layer: Layer, step: Step) -> int:
    """Return what a layer of transformers with attention saves, in bytes per token.

    In 16 bits, an RMS norm saves its input and output in float32. The feed-forward block saves four T x i matrices.
    Attention saves its queries, its outputs, and its keys and values repeated to the width of the queries. Each adapter
    saves its intermediate result. In float32, a tensor that is both an output and the next input is saved only once.
    """
    normed_heads = _num_normed_heads(layer)
    head_norms = 4 * normed_heads * layer.head_width + 4 * normed_heads
    more_norms = 4 * layer.hidden * (layer.norms - 2) + head_norms
    gates = 12 * layer.layer_input
    if layer.gated:
        gates += 4 * layer.total_query_width + layer.hidden
    scores = _SCORE_BYTES * _scores_per_token(layer, step)

    if step.on_cpu:
        norms = 16 * layer.hidden
        attention = 16 * layer.total_query_width
        feed_forward = 16 * layer.inner
        gates = 2 * gates
    else:
        norms = 18 * layer.hidden
        attention = 10 * layer.total_query_width
        feed_forward = 8 * layer.inner
    adapters = step.float_bytes * _adapter_results(layer, step)
    return norms + attention + feed_forward + adapters + more_norms + _statistics(layer) + gates + scores


def _saved_by_delta_net(layer: Layer, delta: DeltaNet, step: Step) -> int:
    """Return what a layer with a gated delta net saves, in bytes per token.

    The delta net is that of transformers, which computes chunks of 64 tokens in float32: matrices of queries, keys and
    values, those of a chunk's tokens, and a state for each chunk. Their number was fitted to what torch allocates.
    """
    keys = delta.key_heads * delta.key_width  # total widths
    values = delta.value_heads * delta.value_width
    repeated_keys = delta.value_heads * delta.key_width
    chunk_tokens = 16 * _DELTA_CHUNK * delta.value_heads
    chunk_states = delta.value_heads * (7 * delta.key_width * delta.value_width // _DELTA_CHUNK)
    delta_net = 10 * keys + 37 * repeated_keys + 33 * values + chunk_tokens + chunk_states
    adapters = step.float_bytes * _adapter_results(layer, step)

    if step.on_cpu:
        return 16 * layer.hidden + 16 * layer.inner + adapters + delta_net + 19 * keys + 7 * values
    return 18 * layer.hidden + 8 * layer.inner + adapters + delta_net


def _saved_by_unsloth(layer: Layer) -> int:
    """Return what a layer with Unsloth's kernels saves, in bytes per token.

    Norms and the layers after them save their inputs (kernels/rms_layernorm.py), attention saves its outputs twice, and
    the feed-forward block also saves its two products (kernels/fast_lora.py). Keys and values are repeated only on GPUs
    before compute capability 8.0.
    """
    normed_heads = _num_normed_heads(layer)
    head_norms = 2 * normed_heads * layer.head_width + 4 * normed_heads
    return 8 * layer.hidden + 10 * layer.total_query_width + 4 * layer.inner + head_norms + _statistics(layer)


def _num_normed_heads(layer: Layer) -> int:
    """Return the number of query and key heads that have norms."""
    if not layer.head_norms:
        return 0
    return (layer.total_query_width + layer.total_key_width) // layer.head_width


def _statistics(layer: Layer) -> int:
    """Return the bytes per token of attention's log-sum-exp, one float32 for each head, and of the RMS of two norms."""
    return 4 * layer.total_query_width // layer.head_width + 2 * 4


def _adapter_results(layer: Layer, step: Step) -> int:
    """Return how many intermediate results per token a layer's adapters have, between their two matrices."""
    return step.config.lora.rank * len(layer.linears)


def _scores_per_token(layer: Layer, step: Step) -> int:
    """Return the number of attention scores per token that a layer computes outside of a fused kernel."""
    heads = layer.total_query_width // layer.head_width
    return heads * step.trained_length if layer.capped else 0


def _gates_per_token(shape: Shape) -> int:
    """Return the bytes per token that stay despite checkpointing: the embeddings that layers of Gemma 4 add."""
    gates = 0
    for layer, count in shape.kinds.items():
        if layer.layer_input:
            gates += count * (2 * shape.hidden + 12 * layer.layer_input)
    return gates


def _copies_of_packed_layer(shape: Shape, step: Step) -> int:
    """Return the bytes that a layer of a packed micro-batch saves in addition.

    Each completion reads its own copy of the prompt's keys and values. The outputs of attention are copied too.
    """
    if not step.packed:
        return 0
    queries = max(layer.total_query_width for layer in shape.kinds)
    copied_keys_and_values = 2 * (step.padded_tokens - step.tokens)
    copied_outputs = step.tokens
    return step.float_bytes * queries * (copied_keys_and_values + copied_outputs)


def _added_by_backward(shape: Shape, step: Step, dequantized_matrix: int) -> int:
    """Return the bytes that the backward pass of a layer adds to what its forward pass saved.

    The maximum is in the backward pass of the feed-forward block or, if its inner size is small, of a norm.
    """
    hidden = shape.hidden
    inner = max(layer.inner for layer in shape.kinds)
    checkpointing = step.config.train.gradient_checkpointing
    if step.unsloth_kernels:
        per_token = 4 * hidden + 2 * inner
    elif step.on_cpu:
        norm = 20 * hidden if checkpointing else 28 * hidden
        per_token = max(norm, 8 * hidden + 8 * inner)
    elif checkpointing:
        per_token = 14 * hidden + 6 * inner
    else:
        per_token = max(24 * hidden, 10 * hidden + 6 * inner)
    added = step.tokens * per_token + dequantized_matrix
    if not step.packed:
        return added
    # Attention's backward pass adds the gradients of the copies of keys and values when the four tensors of the
    # feed-forward block are gone.
    queries = max(layer.total_query_width for layer in shape.kinds)
    gradients = queries * (2 * step.padded_tokens + step.tokens)
    released = 4 * inner * step.tokens
    return max(added, step.float_bytes * (gradients - released))
