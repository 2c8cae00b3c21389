"""Estimate the memory of each part of a GRPO step in bytes, from the model configuration only (no weights, no torch).

Notation: T tokens of a micro-batch (prompts and completions), Tc completion tokens, h hidden size, L layers, q and kv
total widths of the query heads and of the key heads, i inner size of the feed-forward block, V vocabulary size.
Activations have 16 bits on a GPU and 32 on a CPU. docs/before-you-train.md shows which terms were compared.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lora_grpo.config import RunConfig, batch_shape, prompts_to_read
from lora_grpo.errors import UserError
from lora_grpo.memory import unsloth
from lora_grpo.memory.lengths import RowLengths
from lora_grpo.memory.shape import Layer, Shape

GIB = 1024**3

CONTEXT, WORKSPACE = int(0.5 * GIB), int(0.4 * GIB)
"""CUDA context of one process, and cuBLAS workspace with the fragmentation of torch's allocator. Both are estimates,
because they differ between GPUs and drivers."""
VLLM_WORKSPACE, CUDA_GRAPHS = int(0.5 * GIB), int(0.5 * GIB)
"""Activations of a vLLM engine, which are part of its `gpu_memory_utilization`, and its CUDA graphs, which come on top:
vLLM 0.27 runs dense models with `v1/worker/gpu/model_runner.py`, whose `profile_cudagraph_memory` returns 0. Both are
estimates."""
LIBRARIES = int(0.5 * GIB)
"""Resident memory of a CPU process with torch, transformers, TRL and PEFT loaded; measured once."""
FRAGMENTATION = 0.9
"""Bytes that the allocator of glibc 2.36 holds in gaps, for each byte of activations and logits on a CPU; measured in
docs/before-you-train.md. It cannot reuse a freed block for an aligned one of the same size."""

SamplerKind = Literal["transformers", "vllm", "shared", "merged"]

_SCORE_BYTES = 8
"""Of an attention score that is kept for the backward pass: after the cap, and twice after the softmax."""
SELECTION_BYTES = 64
"""Bytes per sequence and vocabulary entry that token selection needs: the logits twice, probabilities, their sort with
its workspace, and two sums in double precision."""
_TOKEN_CHUNK, _VOCABULARY_CHUNK, _SFT_CHUNK = 2048, 8192, 256
"""Tokens and vocabulary entries per tile in TRL 1.14's chunked logprobs, and tokens per chunk in its loss for SFT."""


@dataclass(frozen=True)
class Step:
    """The settings that determine the memory of a GRPO step, in addition to the model's shape."""

    config: RunConfig
    micro_batch_size: int
    sequences: int
    """Number of completions that are decoded at once."""
    sampler: SamplerKind = "transformers"
    """`transformers` (the trained model itself), `vllm` (an engine with its own copy of the base), `shared` (Unsloth's
    engine, which shares the base with the trainer) or `merged` (on a CPU: a dequantized copy with the adapter)."""
    fused: bool = False
    """Layers use Unsloth's kernels."""
    on_cpu: bool = False
    """Everything except the 4-bit weights is float32, without autocast."""
    packed: bool = False
    """Each prompt of a micro-batch is read once for its group."""
    free: int = 0
    """Bytes of the GPU that are free before the run, by which Unsloth chooses the rows that it scores at once."""
    row_lengths: RowLengths | None = None
    """The longest of the run's rows; None if every row has the maximum length."""

    @property
    def offloads(self) -> bool:
        """Whether the inputs of the layers wait for the backward pass in host memory."""
        offers = self.config.model.max_sequence_tokens >= unsloth.LEAST_OFFLOADED
        return self.fused and self.config.train.gradient_checkpointing and offers

    @property
    def length(self) -> int:
        """Longest prompt plus completion, in tokens."""
        limit = self.config.model.max_sequence_tokens
        return (
            min(limit, self.row_lengths.longest_prompt + self.config.sampling.max_completion_tokens)
            if self.row_lengths
            else limit
        )

    @property
    def trained_length(self) -> int:
        """Longest row in a micro-batch, in tokens: in SFT, a prompt with its reference answer."""
        return min(self.length, self.row_lengths.longest_answered or self.length) if self.row_lengths else self.length

    @property
    def tokens(self) -> int:
        """Tokens that the layers read in a micro-batch."""
        rows, completion = self.micro_batch_size, self.config.sampling.max_completion_tokens
        prompts = prompts_to_read(rows, self.config.sampling.num_generations) if self.packed else rows
        return prompts * (self.trained_length - completion) + rows * completion


def memory_by_part(shape: Shape, step: Step) -> dict[str, int]:
    """Return the peak memory of each part of a GRPO step in bytes. They do not all exist at once; see `phases`."""
    model, lora = step.config.model, step.config.lora
    tensors = shape.adapter_tensors(lora.rank, lora.targets, dora=lora.dora)
    adapter = sum(tensors)
    engine, merged = step.sampler in ("vllm", "shared"), step.sampler == "merged"
    # The built-in sampler copies the cache of a conversation between turns.
    caches = 2 if step.row_lengths and step.row_lengths.has_conversations and not engine else 1
    activations, layer = _activations(shape, step, adapter)
    width, logits = 4 if step.on_cpu else 2, _logit_bytes(shape, step)
    sizes = {
        # vLLM dequantizes the scales on load, and Unsloth's trainer shares vLLM's weights.
        "weights": weight_bytes(shape, model.bits, double_quantized=step.sampler != "shared", width=width),
        # float32, see `trl_compat.use_float32_adapter`. The KL reference copies the adapter that the run starts from.
        "adapter": 4 * adapter * (2 if lora.from_ and step.config.train.beta else 1),
        "gradients": 4 * adapter,
        "optimizer": sum(optimizer_bytes(size, step.config.train.optimizer) for size in tensors),
        "activations": activations,
        "one_layer": layer,
        "logits": logits,
        "fragmentation": int(FRAGMENTATION * (activations + layer + logits)) if step.on_cpu else 0,
        "kv_cache": sum(count * _cache_bytes(layer, step, caches) for layer, count in shape.kinds.items()),
        "token_selection": 0 if engine else step.sequences * shape.vocabulary * SELECTION_BYTES,
        # The copy, plus the base weights of layers with an adapter.
        "merged_copy": merged * 4 * (shape.parameters + shape.adapted_parameters(lora.targets)),
        "vllm_weights": weight_bytes(shape, model.bits, double_quantized=False) if step.sampler == "vllm" else 0,
        # vLLM reserves memory for an adapter on all linear layers, whatever the targets are.
        "vllm_adapter": 2 * sum(shape.adapter_tensors(reserved_rank(lora.rank))) if engine else 0,
        "vllm_workspace": VLLM_WORKSPACE if engine else 0,
        "cuda_graphs": CUDA_GRAPHS if engine else 0,
        "context": 0 if step.on_cpu else CONTEXT,
        "workspace": 0 if step.on_cpu else WORKSPACE,
        "libraries": LIBRARIES if step.on_cpu else 0,
    }
    fixed = ("weights", "adapter", "gradients", "optimizer", "cuda_graphs", "context", "workspace")
    # The old logprobs correct for vLLM's, and those of the reference are in the KL penalty.
    is_scored = step.fused and step.config.method == "grpo" and (engine or step.config.train.beta)
    rows, free = batch_shape(step.config).parallel_samples, step.free - sum(sizes[name] for name in fixed)
    scoring = unsloth.scoring_bytes(shape, rows, step.length, free)
    return sizes | {"scoring": scoring if is_scored else 0}


def host_bytes(shape: Shape, step: Step, sizes: Mapping[str, int]) -> int:
    """Return the bytes of host memory that hold data of the GPU. `sizes` is the result of `memory_by_part`.

    A vLLM engine with its own weights copies them when it sleeps; those that Unsloth's engine shares with the trainer
    stay on the GPU.
    """
    inputs = unsloth.host_bytes(shape, step.tokens) if step.offloads else 0
    return inputs + (sizes["vllm_weights"] + sizes["vllm_adapter"] if step.sampler == "vllm" else 0)


def phases(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the parts that are allocated in each phase of a step, from the result of `memory_by_part`.

    The phases are those that need the most memory: `sampling` (generating completions), `loss` (which needs the
    logits), `backward` (the backward pass through the layers) and, with Unsloth, `scoring` (logprobs of all completions
    of the step, without gradients). The sampler frees its cache after sampling. A vLLM engine sleeps during training
    (level 1 in vLLM, standby mode in Unsloth): only its CUDA graphs remain on the GPU.
    """
    of_sampling = {"kv_cache", "token_selection", "vllm_weights", "vllm_adapter", "vllm_workspace"}
    of_training = {"gradients", "activations", "fragmentation"}
    absent = {
        "sampling": of_training | {"logits", "one_layer", "scoring"},
        "scoring": of_sampling | {"logits", "one_layer"},
        "loss": of_sampling | {"one_layer", "scoring"},
        "backward": of_sampling | {"logits", "scoring"},
    }
    if not sizes["scoring"]:
        del absent["scoring"]
    return {
        phase: {name: size for name, size in sizes.items() if name not in names and size}
        for phase, names in absent.items()
    }


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM (0.27) can reserve memory for. An adapter uses the next larger one."""


def reserved_rank(rank: int) -> int:
    """Return the rank that vLLM must reserve memory for, or raise a UserError if it does not serve this rank."""
    if rank > _RANKS[-1]:
        raise UserError(f"vLLM serves ranks up to {_RANKS[-1]}, not rank {rank}; select the transformers backend")
    return min(served for served in _RANKS if served >= rank)


def weight_bytes(shape: Shape, bits: int, *, double_quantized: bool = True, width: int = 2) -> int:
    """Return the size of the base model in bytes, with `width` bytes per parameter that is not quantized.

    NF4 uses half a byte per parameter and one scale per 64 parameters. Double quantization stores each scale in one
    byte, plus one float32 per 256 scales; vLLM dequantizes the scales to float32. Each matrix also has a table of 16
    levels and, if its scales are quantized, one of their 256 levels and an offset.
    """
    if bits == 16:
        return width * shape.parameters
    matrices = 0
    for size, count in shape.matrices.items():
        scales = math.ceil(size / 64)
        levels = scales + 4 * math.ceil(scales / 256) + 4 * (256 + 1) if double_quantized else 4 * scales
        matrices += count * (math.ceil(size / 2) + levels + 4 * 16)
    return matrices + width * shape.other_parameters


def _cache_bytes(layer: Layer, step: Step, caches: int) -> int:
    """Return the bytes that a layer keeps of all sequences while they are sampled: keys and values, or a state."""
    width, sequences = 4 if step.on_cpu else 2, caches * step.sequences
    if layer.shares_keys:
        return 0
    if delta := layer.delta:  # the state has 32 bits
        return sequences * (4 * delta.value_heads * delta.key * delta.value + width * delta.kernel * delta.convolved)
    engine = step.sampler in ("vllm", "shared")  # needs room for a sequence of the maximum length
    return max(sequences * step.length, engine * step.config.model.max_sequence_tokens) * 2 * width * layer.keys


def optimizer_bytes(size: int, name: str) -> int:
    """Return the size of the optimizer state of one tensor, in bytes: two moments, or none for SGD.

    The 8-bit optimizers of bitsandbytes use 32-bit states for tensors of fewer than 4096 elements, and one float32
    scale per 256 elements of larger ones.
    """
    if name == "sgd":
        return 0
    if "8bit" not in name or size < 4096:
        return 8 * size
    return 2 * (size + 4 * math.ceil(size / 256))


def _kept_by_layer(layer: Layer, step: Step) -> int:
    """Return the bytes per token that the forward pass of a layer saves for its backward pass.

    In 16 bits, an RMS norm saves its input and output in float32. The feed-forward block saves four T x i matrices.
    Attention saves its queries, its outputs, and its keys and values repeated to the width of the queries. Each adapter
    saves its intermediate result. In float32, a tensor that is both an output and the next input is saved only once.

    In layers of Unsloth, norms and the layers after them save their inputs (kernels/rms_layernorm.py), attention saves
    its outputs twice, and the feed-forward block also saves its two products (kernels/fast_lora.py). Keys and values
    are repeated only on GPUs before compute capability 8.0.

    The delta net is that of transformers, which computes chunks of 64 tokens in float32: matrices of queries, keys and
    values, those of a chunk's tokens, and a state for each chunk. Their number was fitted to what torch allocates.
    """
    h, q, kv, i = layer.hidden, layer.queries, layer.keys, layer.inner
    statistics = 4 * q // layer.head + 8  # attention's log-sum-exp and the RMS of the norms
    heads = q + kv if layer.head_norms else 0
    ranks = step.config.lora.rank * len(layer.linears)
    scores = _SCORE_BYTES * _scores(layer, step)
    if step.fused:
        return 8 * h + 10 * q + 4 * i + 2 * heads + 4 * heads // layer.head + statistics
    if delta := layer.delta:
        keys, values = delta.key_heads * delta.key, delta.value_heads * delta.value
        chunks = delta.value_heads * (16 * 64 + 7 * delta.key * delta.value // 64)
        kept = 10 * keys + 37 * delta.value_heads * delta.key + 33 * values + chunks
        if step.on_cpu:
            return 16 * (h + i) + 4 * ranks + kept + 19 * keys + 7 * values
        return 18 * h + 8 * i + 2 * ranks + kept
    norms = 4 * h * (layer.norms - 2) + 4 * heads + 4 * heads // layer.head
    gate = layer.gated * (4 * q + h) + 12 * layer.layer_input
    if step.on_cpu:
        return 16 * (h + q) + 16 * i + 4 * ranks + norms + statistics + 2 * gate + scores
    return 18 * h + 10 * q + 8 * i + 2 * ranks + norms + statistics + gate + scores


def _scores(layer: Layer, step: Step) -> int:
    """Return the number of attention scores per token that a layer computes outside of a fused kernel."""
    return layer.queries // layer.head * step.trained_length if layer.capped else 0


def _activations(shape: Shape, step: Step, adapter: int) -> tuple[int, int]:
    """Return the bytes that the forward pass saves, and the bytes that the backward pass of one layer adds.

    With checkpointing, the forward pass saves only the input of each layer, and one layer at a time is recomputed.
    Without checkpointing, every layer saves all activations, and autocast keeps a 16-bit copy of the adapter. If
    Unsloth moves the inputs to host memory, the last one stays on the GPU, with two buffers for the others.
    """
    h, width, layers = shape.hidden, 4 if step.on_cpu else 2, len(shape.layers)
    inner, queries = (max(getattr(layer, name) for layer in shape.kinds) for name in ("inner", "queries"))
    checkpointing = step.config.train.gradient_checkpointing
    # The maximum is in the backward pass of the feed-forward block or, if its inner size is small, of a norm.
    if step.fused:
        added = 4 * h + 2 * inner
    elif step.on_cpu:
        added = max(20 * h, 8 * h + 8 * inner) if checkpointing else max(28 * h, 8 * h + 8 * inner)
    else:
        added = 14 * h + 6 * inner if checkpointing else max(24 * h, 10 * h + 6 * inner)
    unpacked = width * max(shape.matrices)
    added = step.tokens * added + unpacked
    kept = {layer: step.tokens * _kept_by_layer(layer, step) for layer in shape.kinds}
    rows = step.micro_batch_size * step.trained_length
    copies = 0
    if step.packed:
        # The keys and values that a completion reads are copies, and so are the outputs. The backward pass adds the
        # gradients of these copies when the tensors of the feed-forward block are gone.
        copies = width * queries * (2 * (rows - step.tokens) + step.tokens)
        added = max(added, width * (queries * (2 * rows + step.tokens) - 4 * inner * step.tokens))
        mask, layer_mask = (1 + width) * rows * step.config.sampling.max_completion_tokens, 0
    elif step.fused:  # Unsloth needs no mask, and has one buffer for the matrices that forward passes dequantize
        mask, layer_mask = unpacked, 0
    else:  # a padded batch has its mask as booleans and, for each layer, as numbers
        mask = rows * step.trained_length
        layer_mask = width * mask
    copy = 0 if step.on_cpu else 2 * adapter
    if checkpointing:
        gates = sum(
            count * (2 * h + 12 * layer.layer_input) for layer, count in shape.kinds.items() if layer.layer_input
        )
        left = step.tokens * (width * h * (3 if step.offloads else layers) + gates) + mask + layer_mask
        return left, max(kept.values()) + copies + added + copy // layers
    saved = sum(count * (kept[layer] + copies + layer_mask) for layer, count in shape.kinds.items())
    return saved + mask + copy, added


def _logit_bytes(shape: Shape, step: Step) -> int:
    """Return the bytes used between the last layer and the logprobs, forward and backward.

    Logits are computed in tiles of tokens and vocabulary entries (training/token_logprobs.py), by Unsloth and in SFT in
    chunks of tokens.
    """
    width = 4 if step.on_cpu else 2
    completions = step.micro_batch_size * step.config.sampling.max_completion_tokens
    last_norm = (8 + width) * step.tokens * shape.hidden
    if step.config.method == "sft":
        # The hidden states are sorted, and a chunk needs four tensors of the size of its logits in float32.
        return last_norm + 2 * width * step.tokens * shape.hidden + 16 * _SFT_CHUNK * shape.vocabulary
    if step.fused:
        return unsloth.loss_bytes(shape, step.micro_batch_size, step.length, completions)
    hidden_gradient = 4 * completions * shape.hidden
    rows, entries = min(completions, _TOKEN_CHUNK), min(shape.vocabulary, _VOCABULARY_CHUNK)
    single = (rows, entries) == (completions, shape.vocabulary)
    tiles = (4 + width) * rows * _VOCABULARY_CHUNK  # two, one of them in the dtype of the activations
    # The float32 intermediate results of this and the previous tile, or half of them and a part of the head.
    between = (12 if single else 16) * rows * entries
    head = 8 * rows * entries + 4 * shape.hidden * (rows + entries)
    return last_norm + hidden_gradient + tiles + max(between, head)
