"""What a GRPO step costs: the memory of each of its parts in bytes, from the model's configuration only.

Start with `memory_by_part`, which is the table of all parts, and `phases`, which says when each exists. Neither weights
nor torch are needed. docs/before-you-train.md shows which terms were compared with measurements.

Notation: T tokens of a micro-batch (prompts and completions), h hidden size, q and kv total widths of the query heads
and of the key heads, i inner size of the feed-forward block, V vocabulary size, r rank of the adapter. Activations have
16 bits on a GPU and 32 on a CPU.
"""

from collections.abc import Mapping

from lora_grpo.config import batch_shape, parse_grpo_overrides
from lora_grpo.errors import UserError
from lora_grpo.memory import unsloth
from lora_grpo.memory.activations import activation_bytes, divergence_bytes, logit_bytes, pass_bytes
from lora_grpo.memory.parameters import optimizer_bytes, weight_bytes
from lora_grpo.memory.shape import Layer, Shape
from lora_grpo.memory.step import Step

GIB = 1024**3
_FLOAT32_BYTES = 4
_16_BIT_BYTES = 2

CONTEXT = int(0.5 * GIB)
"""CUDA context of one process. An estimate, because it differs between GPUs and drivers."""
WORKSPACE = int(0.4 * GIB)
"""Workspace of cuBLAS, and fragmentation of torch's allocator. An estimate, because it differs between GPUs."""
VLLM_WORKSPACE = int(0.5 * GIB)
"""Activations of a vLLM engine, which are part of its `gpu_memory_utilization`. An estimate."""
CUDA_GRAPHS = int(0.5 * GIB)
"""CUDA graphs of a vLLM engine, which come on top of its `gpu_memory_utilization`: for dense models, vLLM's
`v1/worker/gpu/model_runner.py` does not count them in 0.27, and in 0.29 and newer only if a variable asks for it, which
`sampling/vllm_engine.py` sets to 0. An estimate."""
LIBRARIES = int(0.5 * GIB)
"""Resident memory of a CPU process with torch, transformers, TRL and PEFT loaded; measured once."""
FRAGMENTATION = 0.9
"""Bytes that the allocator of glibc 2.36 holds in gaps, for each byte of activations and logits on a CPU; measured in
docs/before-you-train.md. It cannot reuse a freed block for an aligned one of the same size."""
SELECTION_BYTES = 64
"""Bytes per sequence and vocabulary entry that token selection needs: the logits twice, probabilities, their sort with
its workspace, and two sums in double precision."""

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM (0.27 to 0.33) can reserve memory for. An adapter uses the next larger one."""

PARTS = (
    # Parameters
    "weights",
    "adapter",
    "gradients",
    "optimizer",
    # Forward and backward pass
    "activations",
    "one_layer",
    "logits",
    "fragmentation",
    # The built-in sampler
    "kv_cache",
    "token_selection",
    "merged_copy",
    # vLLM, which also has a `kv_cache`
    "vllm_weights",
    "vllm_adapter",
    "vllm_workspace",
    "cuda_graphs",
    # The process
    "context",
    "workspace",
    "libraries",
    # Logprobs with Unsloth
    "scoring",
    # Distillation
    "teacher",
    "teacher_pass",
    "divergence",
)
"""The parts of a step, in the order in which plans and run.json list them. `phases` says when each exists."""


def memory_by_part(shape: Shape, step: Step) -> dict[str, int]:
    """Return the peak memory of each part of a GRPO step. They do not all exist at once; see `phases`.

    Returns:
        Bytes by the names of `PARTS`, 0 for a part that the step does not have.
    """
    model = step.config.model
    lora = step.config.lora
    adapter_tensors = shape.adapter_tensors(lora.rank, lora.targets, dora=lora.dora)
    adapter_parameters = sum(adapter_tensors)
    sizes = dict.fromkeys(PARTS, 0)

    # Parameters.
    # weights: 4 bits per weight of a linear layer, with a scale per 64 weights; the rest in 16 bits, on a CPU in 32.
    # vLLM dequantizes the scales on load, and Unsloth's trainer shares vLLM's weights.
    sizes["weights"] = weight_bytes(
        shape, model.loaded_bits, double_quantized=step.sampler != "shared", float_bytes=step.float_bytes
    )
    # adapter: float32, see `trl_compat.use_float32_adapter`. A KL penalty for a run that starts from an adapter needs a
    # copy of that adapter as its reference.
    adapter_copies = 2 if lora.from_ and step.config.train.beta else 1
    sizes["adapter"] = _FLOAT32_BYTES * adapter_parameters * adapter_copies
    # gradients: float32, of the adapter alone.
    sizes["gradients"] = _FLOAT32_BYTES * adapter_parameters
    # optimizer: two moments per parameter of the adapter, in 32 or 8 bits; none with SGD.
    sizes["optimizer"] = sum(optimizer_bytes(elements, step.config.train.optimizer) for elements in adapter_tensors)

    # Forward and backward pass of one micro-batch.
    # activations: what the layers save for the backward pass; with checkpointing, T x h per layer.
    # one_layer: what the backward pass of one layer adds; with checkpointing, also all that its forward pass saves.
    # logits: a tile of T x V with its intermediate results, and the gradient of the last hidden states.
    layers = activation_bytes(shape, step, adapter_parameters)
    sizes["activations"] = layers.saved
    sizes["one_layer"] = layers.one_layer
    sizes["logits"] = logit_bytes(shape, step)
    if step.on_cpu:
        # fragmentation: gaps that the allocator holds, in proportion to the three above.
        allocated = layers.saved + layers.one_layer + sizes["logits"]
        sizes["fragmentation"] = int(FRAGMENTATION * allocated)

    # Sampling.
    # kv_cache: keys and values, 2 x kv per layer and token, of all sequences that are decoded at once.
    if step.sampler != "server":
        sizes["kv_cache"] = _cache_bytes(shape, step)
    if step.sampler in ("transformers", "merged"):
        # token_selection: the logits of the next tokens with their probabilities and sort, sequences x V.
        sizes["token_selection"] = step.sequences * shape.vocabulary * SELECTION_BYTES
    if step.sampler == "merged":
        # merged_copy: the whole model in float32, plus the base weights of layers with an adapter.
        sizes["merged_copy"] = _FLOAT32_BYTES * (shape.parameters + shape.adapted_parameters(lora.targets))
    if step.sampler == "vllm":
        # vllm_weights: the engine's own copy of the base.
        sizes["vllm_weights"] = weight_bytes(shape, model.loaded_bits, double_quantized=False)
    if step.uses_vllm:
        # vllm_adapter: 16 bits. vLLM reserves memory for an adapter on all linear layers, whatever the targets are.
        reserved = sum(shape.adapter_tensors(reserved_rank(lora.rank)))
        sizes["vllm_adapter"] = _16_BIT_BYTES * reserved
        sizes["vllm_workspace"] = VLLM_WORKSPACE
        sizes["cuda_graphs"] = CUDA_GRAPHS

    # The process.
    if step.on_cpu:
        sizes["libraries"] = LIBRARIES
    else:
        sizes["context"] = CONTEXT
        sizes["workspace"] = WORKSPACE

    # scoring: Unsloth's pass without gradients, over as many rows at once as fit into the memory that is free by then.
    # It computes the logprobs of the reference for the KL penalty, and old ones if rollouts are used more than once.
    uses_of_rollouts = parse_grpo_overrides(step.config.grpo).get("num_iterations", 1)
    needs_logprobs = step.config.train.beta > 0 or uses_of_rollouts > 1
    if step.unsloth_kernels and step.config.method == "grpo" and needs_logprobs:
        allocated_before = {"weights", "adapter", "gradients", "optimizer", "cuda_graphs", "context", "workspace"}
        if not step.engine_sleeps:
            allocated_before |= _ENGINE
        free = step.free - sum(sizes[name] for name in allocated_before)
        rows = batch_shape(step.config).parallel_samples
        # It saves nothing for a backward pass, but the buffers of the gradient passes are still there.
        buffers = layers.saved if step.offloads else step.float_bytes * shape.largest_matrix
        sizes["scoring"] = buffers + unsloth.scoring_bytes(shape, rows, step.length, free)

    # teacher: its adapter in float32, or the weights of a second model.
    # teacher_pass: its pass without gradients over a micro-batch, before that of the trained model.
    # divergence: the teacher's hidden states, and a tile of the logits of both models.
    if step.teacher:
        sizes["teacher"] = step.teacher.weights(step.float_bytes)
        sizes["teacher_pass"] = pass_bytes(step.teacher.shape, step)
        if step.config.teacher.loss != "sampled":
            sizes["divergence"] = divergence_bytes(shape, step.teacher.shape, step)
    return sizes


_ENGINE = {"kv_cache", "vllm_weights", "vllm_adapter", "vllm_workspace"}
"""What a vLLM engine gives back while it sleeps."""
_ONLY_SAMPLING = _ENGINE | {"token_selection"}
_ONLY_TRAINING = {"gradients", "activations", "fragmentation"}
_ONLY_TEACHER = {"teacher_pass", "divergence"}
_ABSENT = {
    "sampling": _ONLY_TRAINING | _ONLY_TEACHER | {"logits", "one_layer", "scoring"},
    "scoring": _ONLY_SAMPLING | _ONLY_TEACHER | {"activations", "logits", "one_layer"},
    "teacher": _ONLY_SAMPLING | {"activations", "logits", "one_layer", "scoring", "divergence"},
    "loss": _ONLY_SAMPLING | {"one_layer", "scoring", "teacher_pass"},
    "backward": _ONLY_SAMPLING | _ONLY_TEACHER | {"logits", "scoring"},
}
"""Phase -> the parts that do not exist in it."""


def phases(sizes: Mapping[str, int], *, engine_sleeps: bool) -> dict[str, dict[str, int]]:
    """Return the parts that are allocated in each phase of a step, in bytes, from the result of `memory_by_part`.

    The phases are those that need the most memory: `sampling` (generating completions), `loss` (which needs the
    logits), `backward` (the backward pass through the layers); with a teacher, `teacher`, in which it reads a
    micro-batch; and, with Unsloth and a KL penalty or `num_iterations`, `scoring` (logprobs of all completions of the
    step, without gradients). The sampler frees its cache after sampling.
    A vLLM engine may sleep during training (level 1 in vLLM, standby mode in Unsloth): then only its CUDA graphs remain
    on the GPU.

    Args:
        engine_sleeps: whether a vLLM engine sleeps; True without one.
    """
    by_phase = {}
    for phase, absent in _ABSENT.items():
        if phase == "scoring" and not sizes["scoring"]:
            continue
        if phase == "teacher" and not sizes["teacher_pass"]:
            continue
        if not engine_sleeps:
            absent = absent - _ENGINE
        by_phase[phase] = {name: size for name, size in sizes.items() if size and name not in absent}
    return by_phase


def host_bytes(shape: Shape, step: Step, sizes: Mapping[str, int]) -> int:
    """Return the bytes of host memory that hold data of the GPU.

    A vLLM engine with its own weights copies them when it sleeps; those that Unsloth's engine shares with the trainer
    stay on the GPU.

    Args:
        sizes: the result of `memory_by_part`.
    """
    total = 0
    if step.offloads:
        total += unsloth.host_bytes(shape, step.tokens)
    if step.sampler == "vllm" and step.engine_sleeps:
        total += sizes["vllm_weights"] + sizes["vllm_adapter"]
    return total


def reserved_rank(rank: int) -> int:
    """Return the rank for which vLLM reserves memory, or raise a UserError if vLLM does not serve this rank."""
    largest = _VLLM_RANKS[-1]
    if rank > largest:
        raise UserError(f"vLLM serves ranks up to {largest}, not rank {rank}; select the transformers backend")
    return min(served for served in _VLLM_RANKS if served >= rank)


def _cache_bytes(shape: Shape, step: Step) -> int:
    """Return the bytes that all layers keep of the sequences that are decoded at once."""
    sequences = step.sequences
    if step.row_lengths and step.row_lengths.has_conversations and not step.uses_vllm:
        sequences *= 2  # the built-in sampler copies the cache of a conversation between turns
    total = 0
    for layer, count in shape.kinds.items():
        total += count * _layer_cache_bytes(layer, step, sequences)
    return total


def _layer_cache_bytes(layer: Layer, step: Step, sequences: int) -> int:
    """Return the bytes that a layer keeps of sequences while they are sampled: keys and values, or a state."""
    if layer.shares_keys:
        return 0
    if delta := layer.delta:
        state = _FLOAT32_BYTES * delta.value_heads * delta.key_width * delta.value_width
        convolution = step.float_bytes * delta.kernel * delta.convolved
        return sequences * (state + convolution)
    tokens = sequences * step.length
    if step.uses_vllm:
        # vLLM does not start without room for one sequence of the maximum length.
        tokens = max(tokens, step.config.model.max_sequence_tokens)
    return tokens * 2 * step.float_bytes * layer.total_key_width
