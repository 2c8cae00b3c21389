"""The memory of a GRPO step by part, in bytes, from a model's configuration alone: no weights, no torch.

Notation: T tokens of a micro-batch (prompts and completions), Tc its completion tokens, h hidden size, L layers, q and
kv widths of queries and of keys, i inner size of the feed-forward part, V vocabulary. Activations have 16 bits, on a
CPU 32.
docs/memory.md says which terms were measured against torch, and on what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lora_grpo.models.shape import Shape

GIB = 1024**3

CONTEXT = int(0.5 * GIB)
"""What CUDA itself takes of a GPU for one process. A guess: it differs between cards and drivers."""
WORKSPACE = int(0.4 * GIB)
"""Work space of cuBLAS and gaps that torch's allocator leaves. A guess."""
VLLM_WORKSPACE = int(0.5 * GIB)
"""CUDA graphs and activations of a vLLM engine. A guess; with the two above 1.4 GiB."""

LIBRARIES = int(0.6 * GIB)
"""What a process on a CPU has resident once torch, transformers, TRL and PEFT are loaded: measured, docs/memory.md."""

Sampler = Literal["transformers", "vllm", "shared", "merged"]

PICK_BYTES = 64
"""Per sequence and vocabulary entry, that the kit's own sampler needs: the logits twice, probabilities, their sort with
its work space, two sums in double."""
_TOKEN_CHUNK, _VOCABULARY_CHUNK = 2048, 8192
"""Tokens and vocabulary entries that TRL 1.14's chunked log-probabilities hold at a time."""


@dataclass(frozen=True)
class Step:
    """What a GRPO step asks of the memory besides the model's shape."""

    micro_batch_size: int
    """Completions in one forward and backward pass."""
    prompt_tokens: int
    """Longest prompt."""
    completion_tokens: int
    """Longest completion."""
    sequences: int
    """Completions that are decoded at once."""
    sampler: Sampler = "transformers"
    """What draws the completions: `transformers` (the training model itself), `vllm` (an engine with a copy of the
    base), `shared` (Unsloth's, an engine whose weights the trainer trains on) or `merged` (on a CPU, an unpacked
    copy)."""
    bits: int = 4
    """Of the frozen base: 4 (NF4, double-quantised) or 16."""
    rank: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    dora: bool = False
    optimizer: str = "adamw_torch"
    """Name of a transformers optimizer."""
    checkpointing: bool = True
    """Activations are recomputed in the backward pass."""
    chunked: bool = True
    """Logits of the whole vocabulary are never held; see lora_grpo.chunked_log_probs."""
    fused: bool = False
    """Unsloth's kernels instead of transformers' layers."""
    on_cpu: bool = False
    """The machine's own memory: everything but the 4-bit weights in float32, no autocast."""

    @property
    def tokens(self) -> int:
        """T."""
        return self.micro_batch_size * (self.prompt_tokens + self.completion_tokens)


def parts(shape: Shape, step: Step) -> dict[str, int]:
    """Return the memory of each part of a GRPO step in bytes, all at their largest.

    Not all are there at the same time: `phases` has those that are. `context`, `workspace` and `vllm_workspace` are
    guesses.
    """
    tensors = shape.adapter_tensors(step.rank, step.targets, dora=step.dora)
    adapter = sum(tensors)
    engine = step.sampler in ("vllm", "shared")
    activations, layer = _activations(shape, step, adapter)
    width = 4 if step.on_cpu else 2
    return {
        # vLLM unpacks the scales of a doubly quantised base as it loads; Unsloth's trainer shares what vLLM holds.
        "weights": weight_bytes(shape, step.bits, double_quantised=step.sampler != "shared", width=width),
        "adapter": 4 * adapter,  # float32: train.make_trainer
        "gradients": 4 * adapter,
        "optimizer": sum(optimizer_bytes(size, step.optimizer) for size in tensors),
        "activations": activations,
        "one_layer": layer,
        "logits": _logit_bytes(shape, step),
        "kv_cache": step.sequences
        * (step.prompt_tokens + step.completion_tokens)
        * kv_bytes_per_token(shape.layers, shape.keys, width),
        # The kit's own sampler picks tokens in the whole vocabulary; see lora_grpo.sampling.batch_memory.
        "picking": 0 if engine else step.sequences * shape.vocabulary * PICK_BYTES,
        # The copy, and the bare weights of what the adapter is merged into; see merged_copy.
        "merged_copy": 4 * (shape.parameters + shape.adapted_parameters(step.targets))
        if step.sampler == "merged"
        else 0,
        "vllm_weights": weight_bytes(shape, step.bits, double_quantised=False) if step.sampler == "vllm" else 0,
        "vllm_adapter": 2 * adapter if engine else 0,
        "vllm_workspace": VLLM_WORKSPACE if engine else 0,
        "context": 0 if step.on_cpu else CONTEXT,
        "workspace": 0 if step.on_cpu else WORKSPACE,
        "libraries": LIBRARIES if step.on_cpu else 0,
    }


def phases(sizes: Mapping[str, int], *, sleeps: bool = True) -> dict[str, dict[str, int]]:
    """Return the parts that are there at the three moments of a step that need most.

    `drawing` completions; the `loss`, where logits are made and go again; the `backward` pass through the layers.

    Args:
        sizes: what `parts` returned.
        sleeps: a vLLM engine sleeps while the trainer trains: its KV cache is discarded and its weights and adapter
            wait in the host's memory (vLLM's level 1; Unsloth's standby mode). What its CUDA graphs hold stays.
    """
    always = {"weights", "adapter", "optimizer", "merged_copy", "context", "workspace", "libraries", "vllm_workspace"}
    vllm = {"kv_cache", "vllm_weights", "vllm_adapter"}
    # The cache of the kit's own sampler is gone when it has drawn.
    awake = vllm if sizes["vllm_workspace"] and not sleeps else set()
    training = always | awake | {"gradients", "activations"}
    moments = {
        "drawing": always | vllm | {"picking"},
        "loss": training | {"logits"},
        "backward": training | {"one_layer"},
    }
    return {
        moment: {name: size for name, size in sizes.items() if name in names and size}
        for moment, names in moments.items()
    }


def peak(sizes: Mapping[str, int], *, sleeps: bool = True) -> int:
    """Return the most memory of a step in bytes; arguments are those of `phases`."""
    return max(sum(phase.values()) for phase in phases(sizes, sleeps=sleeps).values())


def weight_bytes(shape: Shape, bits: int, *, double_quantised: bool = True, width: int = 2) -> int:
    """Return the bytes of the frozen base.

    NF4: half a byte a parameter; one scale for 64 parameters, which double quantisation stores in a byte, with a
    float32 for 256 of them; a few tables a matrix.

    Args:
        shape: the model's.
        bits: 4 or 16.
        double_quantised: False is how vLLM holds it, which unpacks the scales to float32 as it loads.
        width: bytes of a parameter that is not quantised.
    """
    if bits == 16:
        return width * shape.parameters
    matrices = 0
    for inputs, outputs in shape.linears().values():
        scales = math.ceil(inputs * outputs / 64)
        matrices += math.ceil(inputs * outputs / 2)
        matrices += scales + 4 * math.ceil(scales / 256) + _NESTED_TABLES if double_quantised else 4 * scales + _TABLES
    return shape.layers * matrices + width * shape.other_parameters


_TABLES, _NESTED_TABLES = 4 * 16, 4 * (16 + 256 + 1)
"""Bytes beside a 4-bit matrix: its 16 levels; doubly quantised also the 256 levels of its scales, and their offset."""


def kv_bytes_per_token(layers: int, key_width: int, width: int = 2) -> int:
    """Return the bytes of one token's keys and values over all layers.

    Args:
        layers: of the model.
        key_width: of all key heads together.
        width: bytes per number.
    """
    return 2 * width * layers * key_width


def optimizer_bytes(size: int, name: str) -> int:
    """Return the bytes of an optimiser's state of one tensor; two float32 numbers a parameter where it is not known.

    bitsandbytes keeps tensors of fewer than 4096 elements in 32 bits, and one float32 scale for 256 elements of others.
    """
    if name == "sgd":
        return 0
    states = 1 if "lion" in name or name.startswith("rmsprop") else 2
    if "8bit" not in name or size < 4096:
        return 4 * states * size
    return states * (size + 4 * math.ceil(size / 256))


def _kept_by_layer(shape: Shape, step: Step) -> int:
    """Return the bytes that a layer's forward pass keeps for its backward pass, a token.

    In 16 bits an RMS norm keeps its input and its result in float32, the feed-forward part four matrices of T x i,
    attention queries, outputs, and keys and values repeated to the queries' width, and every adapter what is between
    its matrices. In float32 what is both a result and the next one's input is kept once.
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
    """Return the same for Unsloth's layers.

    Read in its source, not run: the norms keep their inputs (kernels/rms_layernorm.py), the layers behind them theirs,
    the feed-forward part its two products besides (kernels/fast_lora.py); attention queries, outputs, keys and values
    repeated to the queries' width where a mask is given (utils/attention_dispatch.py), its outputs once more in a row.
    """
    h, q, kv, i = shape.hidden, shape.queries, shape.keys, shape.inner
    norms = 2 * (q + kv) + 4 * (q + kv) // shape.head if shape.head_norms else 0
    return 8 * h + 10 * q + 4 * i + norms + 4 * q // shape.head + 8


def _activations(shape: Shape, step: Step, adapter: int) -> tuple[int, int]:
    """Return the bytes that the forward pass leaves, and those that the backward pass of one layer adds.

    With checkpointing the forward pass leaves each layer's input, and one layer at a time is computed again. Without,
    it leaves all of every layer, and autocast's copy of the adapter in 16 bits. The mask of a batch with padding is
    made as truth values and, anew for every layer, as numbers.
    """
    h, i, width = shape.hidden, shape.inner, 4 if step.on_cpu else 2
    mask = step.micro_batch_size * (step.prompt_tokens + step.completion_tokens) ** 2
    unpacked = width * max(inputs * outputs for inputs, outputs in shape.linears().values())
    kept = step.tokens * (_kept_by_fused_layer(shape) if step.fused else _kept_by_layer(shape, step))
    # The feed-forward part's backward pass; or, where its inner width is small, a norm's.
    if step.fused:
        besides = 6 * h + 2 * i
    elif step.on_cpu:
        besides = max(20 * h, 8 * h + 8 * i) if step.checkpointing else max(28 * h, 8 * h + 8 * i)
    else:
        besides = 14 * h + 6 * i if step.checkpointing else max(24 * h, 10 * h + 6 * i)
    besides = step.tokens * besides + unpacked
    copy = 0 if step.on_cpu else 2 * adapter
    if step.checkpointing:
        left = width * step.tokens * h * shape.layers + mask * (1 + width)
        return left, kept + besides + copy // shape.layers
    return shape.layers * (kept + mask * width) + mask + copy, besides


def _logit_bytes(shape: Shape, step: Step) -> int:
    """Return the bytes between the last layer and the log-probabilities, forward and backward.

    Chunked: two tiles of up to 2048 tokens and 8192 vocabulary entries, one of them in activations' width; of the part
    that the vocabulary fills, what the tile before left and this one's, in float32, or half of it and a part of the
    head; the hidden states' gradient. Whole: the logits in float32, as accelerate hands them over, and three matrices
    more on the way back. Both: the last norm.
    """
    width = 4 if step.on_cpu else 2
    completions = step.micro_batch_size * step.completion_tokens
    norm = (8 + width) * step.tokens * shape.hidden
    if not step.chunked:
        return norm + 16 * completions * shape.vocabulary
    rows = min(completions, _TOKEN_CHUNK)
    entries = min(shape.vocabulary, _VOCABULARY_CHUNK)
    single = completions <= _TOKEN_CHUNK and shape.vocabulary <= _VOCABULARY_CHUNK
    tiles = (4 + width) * rows * _VOCABULARY_CHUNK
    between = (12 if single else 16) * rows * entries
    head = 8 * rows * entries + 4 * shape.hidden * (rows + entries)
    return norm + tiles + max(between, head) + 4 * completions * shape.hidden
