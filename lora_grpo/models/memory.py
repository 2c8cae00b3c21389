"""The memory of a GRPO step by part, in bytes, from a model's configuration alone: no weights, no torch.

Notation: T tokens of a micro-batch (prompts and completions), Tc its completion tokens, h hidden size, L layers, q and
kv widths of all query and key heads, i inner size of the feed-forward part, V vocabulary. Activations have 16 bits, on
a CPU 32. docs/memory.md shows which terms were measured against torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lora_grpo.models.shape import Shape

GIB = 1024**3

CONTEXT = int(0.5 * GIB)
"""CUDA's own memory for one process. A guess: it differs between GPUs and drivers."""
WORKSPACE = int(0.4 * GIB)
"""cuBLAS workspace and gaps of torch's allocator. A guess."""
VLLM_WORKSPACE = int(0.5 * GIB)
"""CUDA graphs and activations of a vLLM engine. A guess."""

LIBRARIES = int(0.6 * GIB)
"""Resident memory of a CPU process with torch, transformers, TRL and PEFT loaded; measured, docs/memory.md."""

SamplerKind = Literal["transformers", "vllm", "shared", "merged"]

PICK_BYTES = 64
"""Per sequence and vocabulary entry, of the kit's own sampler: the logits twice, probabilities, their sort with its
workspace, and two sums in double precision."""
_TOKEN_CHUNK, _VOCABULARY_CHUNK = 2048, 8192
"""Tokens and vocabulary entries that TRL 1.14's chunked log-probabilities hold at a time."""


@dataclass(frozen=True)
class Step:
    """The settings of a GRPO step that its memory depends on, added the model's shape."""

    micro_batch_size: int
    """Completions in one forward and backward pass."""
    prompt_tokens: int
    """Longest prompt."""
    completion_tokens: int
    """Longest completion."""
    sequences: int
    """Completions that are decoded at once."""
    sampler: SamplerKind = "transformers"
    """`transformers` (the trained model itself), `vllm` (an engine with its own copy of the base), `shared` (Unsloth's
    engine, which shares the base with the trainer) or `merged` (an unpacked copy, on a CPU)."""
    bits: int = 4
    """Of the base model: 4 (NF4 with double quantization) or 16."""
    rank: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    dora: bool = False
    optimizer: str = "adamw_torch"
    """Name of a transformers optimizer."""
    checkpointing: bool = True
    """Gradient checkpointing: activations are recomputed in the backward pass."""
    fused: bool = False
    """Layers run Unsloth's kernels."""
    on_cpu: bool = False
    """Everything but the 4-bit weights is float32, without autocast."""

    @property
    def tokens(self) -> int:
        """T."""
        return self.micro_batch_size * (self.prompt_tokens + self.completion_tokens)


def parts(shape: Shape, step: Step) -> dict[str, int]:
    """Return the peak memory of each part of a GRPO step in bytes.

    Not all parts exist at the same time; see `phases`. `context`, `workspace` and `vllm_workspace` are guesses.
    """
    tensors = shape.adapter_tensors(step.rank, step.targets, dora=step.dora)
    adapter = sum(tensors)
    engine, merged = step.sampler in ("vllm", "shared"), step.sampler == "merged"
    activations, layer = _activations(shape, step, adapter)
    width = 4 if step.on_cpu else 2
    cached_tokens = step.sequences * (step.prompt_tokens + step.completion_tokens)
    return {
        # vLLM dequantizes the scales at load; Unsloth's trainer shares vLLM's weights.
        "weights": weight_bytes(shape, step.bits, double_quantized=step.sampler != "shared", width=width),
        "adapter": 4 * adapter,  # float32; see training.make_trainer
        "gradients": 4 * adapter,
        "optimizer": sum(optimizer_bytes(size, step.optimizer) for size in tensors),
        "activations": activations,
        "one_layer": layer,
        "logits": _logit_bytes(shape, step),
        "kv_cache": cached_tokens * kv_bytes_per_token(shape.layers, shape.keys, width),
        "picking": 0 if engine else step.sequences * shape.vocabulary * PICK_BYTES,
        # The copy, and the base weights of the layers that have an adapter.
        "merged_copy": merged * 4 * (shape.parameters + shape.adapted_parameters(step.targets)),
        "vllm_weights": weight_bytes(shape, step.bits, double_quantized=False) if step.sampler == "vllm" else 0,
        "vllm_adapter": 2 * adapter if engine else 0,
        "vllm_workspace": VLLM_WORKSPACE if engine else 0,
        "context": 0 if step.on_cpu else CONTEXT,
        "workspace": 0 if step.on_cpu else WORKSPACE,
        "libraries": LIBRARIES if step.on_cpu else 0,
    }


def phases(sizes: Mapping[str, int], *, sleeps: bool = True) -> dict[str, dict[str, int]]:
    """Return the parts that are allocated in each of the three phases of a step that need most memory.

    `sampling` of completions; the `loss`, which needs the logits; the `backward` pass through the layers.

    Args:
        sizes: what `parts` returned.
        sleeps: a vLLM engine sleeps during training: its KV cache is discarded, and its weights and adapter move to
            host memory (vLLM's level 1; Unsloth's standby mode). Its CUDA graphs stay.
    """
    always = {"weights", "adapter", "optimizer", "merged_copy", "context", "workspace", "libraries", "vllm_workspace"}
    vllm = {"kv_cache", "vllm_weights", "vllm_adapter"}
    # The kit's own sampler frees its cache after sampling.
    awake = vllm if sizes["vllm_workspace"] and not sleeps else set()
    training = always | awake | {"gradients", "activations"}
    names_by_phase = {
        "sampling": always | vllm | {"picking"},
        "loss": training | {"logits"},
        "backward": training | {"one_layer"},
    }
    return {
        phase: {name: size for name, size in sizes.items() if name in names and size}
        for phase, names in names_by_phase.items()
    }


def weight_bytes(shape: Shape, bits: int, *, double_quantized: bool = True, width: int = 2) -> int:
    """Return the bytes of the base model.

    NF4 takes half a byte per parameter and one scale per 64 parameters. Double quantization stores a scale in a byte,
    with one float32 per 256 scales. Each matrix also has a few tables.

    Args:
        shape: the model's.
        bits: 4 or 16.
        double_quantized: False for vLLM, which dequantizes the scales to float32 at load.
        width: bytes of an unquantized parameter.
    """
    if bits == 16:
        return width * shape.parameters
    matrices = 0
    for inputs, outputs in shape.linears().values():
        scales = math.ceil(inputs * outputs / 64)
        matrices += math.ceil(inputs * outputs / 2)
        matrices += scales + 4 * math.ceil(scales / 256) + _NESTED_TABLES if double_quantized else 4 * scales + _TABLES
    return shape.layers * matrices + width * shape.other_parameters


_TABLES, _NESTED_TABLES = 4 * 16, 4 * (16 + 256 + 1)
"""Bytes per 4-bit matrix: its 16 levels; with double quantization also the 256 levels and the offset of its scales."""


def kv_bytes_per_token(layers: int, key_width: int, width: int = 2) -> int:
    """Return the bytes of one token's keys and values over all layers.

    Args:
        layers: of the model.
        key_width: of all key heads together.
        width: bytes per number.
    """
    return 2 * width * layers * key_width


def optimizer_bytes(size: int, name: str) -> int:
    """Return the bytes of the optimizer state of one tensor; an unknown optimizer counts two float32 per parameter.

    8-bit optimizers of bitsandbytes keep tensors of fewer than 4096 elements in 32 bits, and otherwise one float32
    scale per 256 elements.
    """
    if name == "sgd":
        return 0
    states = 1 if "lion" in name or name.startswith("rmsprop") else 2
    if "8bit" not in name or size < 4096:
        return 4 * states * size
    return states * (size + 4 * math.ceil(size / 256))


def _kept_by_layer(shape: Shape, step: Step) -> int:
    """Return the bytes per token that a layer's forward pass saves for its backward pass.

    In 16 bits an RMS norm saves its input and output in float32, the feed-forward part four T x i matrices, attention
    its queries, outputs, and keys and values repeated to the width of the queries, and each adapter its intermediate
    result. In float32 a tensor that is both an output and the next input is saved once.
    """
    h, q, kv, i = shape.hidden, shape.queries, shape.keys, shape.inner
    heads = 4 * q // shape.head + 8  # attention's sums and the norms' roots
    if shape.head_norms:
        heads += 4 * (q + kv) + 4 * (q + kv) // shape.head
    ranks = step.rank * len(shape.linears())
    if step.on_cpu:
        return 16 * (h + q + i) + 4 * ranks + heads
    return 18 * h + 10 * q + 8 * i + 2 * ranks + heads


def _kept_by_fused_layer(shape: Shape) -> int:
    """Return the same for Unsloth's layers, as read in its source; not measured.

    Norms and the layers after them save their inputs (kernels/rms_layernorm.py), the feed-forward part also its two
    products (kernels/fast_lora.py), attention the same as above, with contiguous outputs (utils/attention_dispatch.py).
    """
    h, q, kv, i = shape.hidden, shape.queries, shape.keys, shape.inner
    norms = 2 * (q + kv) + 4 * (q + kv) // shape.head if shape.head_norms else 0
    return 8 * h + 10 * q + 4 * i + norms + 4 * q // shape.head + 8


def _activations(shape: Shape, step: Step, adapter: int) -> tuple[int, int]:
    """Return the bytes that the forward pass saves, and those that the backward pass of one layer adds.

    With checkpointing the forward pass saves each layer's input, and one layer at a time is recomputed. Without it,
    every layer saves everything, and autocast a 16-bit copy of the adapter. The mask of a padded batch exists as
    booleans and, per layer, as numbers.
    """
    h, i, width = shape.hidden, shape.inner, 4 if step.on_cpu else 2
    mask = step.micro_batch_size * (step.prompt_tokens + step.completion_tokens) ** 2
    unpacked = width * max(inputs * outputs for inputs, outputs in shape.linears().values())
    kept = step.tokens * (_kept_by_fused_layer(shape) if step.fused else _kept_by_layer(shape, step))
    # The backward pass of the feed-forward part or, if its inner width is small, of a norm.
    if step.fused:
        added = 6 * h + 2 * i
    elif step.on_cpu:
        added = max(20 * h, 8 * h + 8 * i) if step.checkpointing else max(28 * h, 8 * h + 8 * i)
    else:
        added = 14 * h + 6 * i if step.checkpointing else max(24 * h, 10 * h + 6 * i)
    added = step.tokens * added + unpacked
    copy = 0 if step.on_cpu else 2 * adapter
    if step.checkpointing:
        left = width * step.tokens * h * shape.layers + mask * (1 + width)
        return left, kept + added + copy // shape.layers
    return shape.layers * (kept + mask * width) + mask + copy, added


def _logit_bytes(shape: Shape, step: Step) -> int:
    """Return the bytes between the last layer and the logprobs, forward and backward.

    Logits are computed in chunks (lora_grpo.training.chunked_logprobs): two tiles of up to 2048 tokens and 8192
    vocabulary entries, one of them in the activations' dtype; intermediate results of this and the previous tile in
    float32, or half of them and a part of the head; the gradient of the hidden states; the last norm.
    """
    width = 4 if step.on_cpu else 2
    completions = step.micro_batch_size * step.completion_tokens
    norm = (8 + width) * step.tokens * shape.hidden
    rows = min(completions, _TOKEN_CHUNK)
    entries = min(shape.vocabulary, _VOCABULARY_CHUNK)
    single = completions <= _TOKEN_CHUNK and shape.vocabulary <= _VOCABULARY_CHUNK
    tiles = (4 + width) * rows * _VOCABULARY_CHUNK
    between = (12 if single else 16) * rows * entries
    head = 8 * rows * entries + 4 * shape.hidden * (rows + entries)
    return norm + tiles + max(between, head) + 4 * completions * shape.hidden
