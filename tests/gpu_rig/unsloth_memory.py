"""Print the bytes that Unsloth allocates in a training step on each GPU, one JSON line per GPU.

    python tests/gpu_rig/unsloth_memory.py '[["NVIDIA GeForce RTX 4090", 24564, "23.64", "8.9"]]' FOLDER

Arguments as in vllm_arguments.py. The recipe's preset is planned for each GPU. Then Unsloth's own layers, gradient
checkpointing and logprobs run with the planned model, micro-batch and lengths, on fake tensors, which have a size but
no data: those on `cpu:0` stand for the GPU's, those on `cpu` are the host's. Two layers run, because with checkpointing
each further one only adds a buffer of the host; without it, three run as well, and each further one adds as much as the
third. What replaces compiled code allocates what that code allocates: Triton's kernels write
into tensors that Unsloth makes, dequantization returns a matrix, and attention follows PyTorch's FlashAttention.
"""

import json
import os
import sys
import types
from pathlib import Path

import card
import vllm_arguments

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

GPU = "cpu:0"


def fake_linear(linear, dtype):
    """Return a layer in NF4 with double quantization, made of fake tensors, which bitsandbytes' parameters reject."""
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

    layer, size = Linear4bit.__new__(Linear4bit), linear.weight.numel()
    torch.nn.Module.__init__(layer)
    layer.in_features, layer.out_features, layer.bias = linear.in_features, linear.out_features, linear.bias
    layer.compute_dtype, layer.compute_type_is_set = dtype, True
    layer.weight = torch.nn.Parameter(torch.empty(size // 2, 1, dtype=torch.uint8, device=GPU), requires_grad=False)
    layer.weight.compress_statistics, layer.weight.quant_type = True, "nf4"
    scales = QuantState(
        torch.empty(size // 64 // 256 + 1, device=GPU), code=torch.empty(256, device=GPU), blocksize=256,
        dtype=torch.float32,
    )  # fmt: skip
    layer.quant_state = layer.weight.quant_state = QuantState(
        torch.empty(size // 64, dtype=torch.uint8, device=GPU), shape=linear.weight.shape, blocksize=64, dtype=dtype,
        code=torch.empty(16, device=GPU), quant_type="nf4", offset=torch.empty((), device=GPU), state2=scales,
    )  # fmt: skip
    return layer


def onto_gpu(model):
    import torch

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device.index is None:
                    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
                    if isinstance(tensor, torch.nn.Parameter):
                        moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
                    tensors[name] = moved


def fake_policy(values, config, dtype):
    """Return the policy that Unsloth makes of a base in NF4 or in 16 bits, with gradients of the adapter."""
    import torch
    import unsloth.models.llama
    import unsloth.models.qwen2
    import unsloth.models.qwen3
    from transformers import AutoConfig, AutoModelForCausalLM

    patches = {"llama": unsloth.models.llama.FastLlamaModel, "qwen2": unsloth.models.qwen2.FastQwen2Model}
    {**patches, "qwen3": unsloth.models.qwen3.FastQwen3Model}[values["model_type"]].pre_patch()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values, dtype=dtype), dtype=dtype)
    in_4_bits = config.model.bits == 4
    for name, module in list(model.named_modules()):
        if in_4_bits and type(module) is torch.nn.Linear and name != "lm_head":
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, fake_linear(module, dtype))
    onto_gpu(model)
    model.tie_weights()
    model.is_loaded_in_4bit, model._saved_temp_tokenizer = in_4_bits, types.SimpleNamespace()
    model.max_seq_length = config.model.max_sequence_tokens
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=config.lora.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        lora_alpha=config.lora.alpha,
        use_gradient_checkpointing="unsloth" if config.train.gradient_checkpointing else False,
        max_seq_length=config.model.max_sequence_tokens,
    )
    onto_gpu(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    model.for_training()
    return model


def replace_kernels(scratch):
    """Replace what cannot run on fake tensors by functions that allocate the same."""
    import torch
    import transformers
    import triton.runtime.interpreter
    from unsloth.kernels import rms_layernorm
    from unsloth.models import llama
    from unsloth.utils import attention_dispatch

    class Attention(torch.autograd.Function):
        """Allocates what `_flash_attention_forward` and `_flash_attention_backward` of PyTorch 2.13 allocate."""

        @staticmethod
        def forward(ctx, q, k, v):
            rows, heads, length, size = q.shape
            out = q.new_empty(rows, length, heads, size).transpose(1, 2)
            ctx.save_for_backward(q, k, v, out, q.new_empty(rows, heads, length, dtype=torch.float32))
            return out

        @staticmethod
        def backward(ctx, gradient):
            q, k, v, *_ = ctx.saved_tensors
            sums = [q.new_empty(q.shape, dtype=torch.float32)]
            sums += [torch.empty_like(q), torch.empty_like(q)] if k.shape != q.shape else []  # one per query head
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def dequantize(weight, state=None, out=None, use_global_buffer=False, dtype=None):
        if state is None:
            return weight
        if use_global_buffer:  # one buffer for all layers, as large as the largest matrix
            if scratch.get("weight") is None or scratch["weight"].numel() < state.shape.numel():
                scratch["weight"] = torch.empty(state.shape.numel(), dtype=state.dtype, device=GPU)
            out = scratch["weight"][: state.shape.numel()].view(state.shape)
        else:
            out = torch.empty(state.shape, dtype=state.dtype, device=GPU)
        return out.t() if weight.shape[0] == 1 else out

    def capability():
        return torch.cuda.get_device_capability()[0]

    for name in ("unsloth.kernels", "unsloth.kernels.utils", "unsloth.kernels.fast_lora"):
        sys.modules[name].fast_dequantize = dequantize
    for name in [name for name in dir(torch.nn.init) if name.endswith("_") and name[0] != "_"]:
        setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
    torch.nn.Module.to = lambda module, *args, **kwargs: module  # fake tensors cannot be swapped
    triton.runtime.interpreter.InterpretedFunction.run = lambda *args, **kwargs: None
    rms_layernorm._multirow_checked = lambda *args: None
    transformers.Trainer._inner_training_loop.__name__ = "_fast_inner_training_loop"  # get_peft_model asks
    attention_dispatch.scaled_dot_product_attention = lambda q, k, v, **options: Attention.apply(q, k, v)
    attention_dispatch._sdpa_takes_gqa = lambda *args: capability() >= 8  # older GPUs repeat keys and values
    llama.get_packed_info_from_kwargs = lambda options, *args, **more: options.get("packed_seq_lengths")
    attention_dispatch.packed_segment_lengths = lambda lengths, total: lengths
    card.on_cpu = lambda device: GPU if isinstance(device, int) or str(device).startswith("cuda") else device


def replace_head(total, free):
    """Have Unsloth's fused logprobs allocate on fake tensors what they allocate on a GPU with this memory in bytes.

    Their operator would only make its results, so its Python body takes its place. Kernels write into tensors that the
    body makes, so they need not run.
    """
    import torch
    from unsloth_zoo.fused_losses import fused_linear

    class Logprobs(torch.autograd.Function):
        forward = staticmethod(fused_linear._lp_op._init_fn)
        setup_context = staticmethod(fused_linear._lp_setup)
        backward = staticmethod(fused_linear._lp_backward)

    def every_row(targets, mask, vocabulary, ignored):
        return torch.empty(len(targets), dtype=torch.long, device=GPU), len(targets)

    def head_gradient(logits_gradient, head):
        return torch.empty(len(logits_gradient), head.shape[1], dtype=torch.float32, device=GPU)

    setattr(torch.ops.unsloth_zoo, fused_linear._LP_OP, Logprobs.apply)
    fused_linear._use_triton = lambda device: True
    fused_linear._launch = lambda device, launch: None
    fused_linear._logits_mode = lambda *args: (True, False)  # matrix products of 16 bits with results in 32, on CUDA
    fused_linear._flash_min_rows = lambda device: 0 if total <= fused_linear._SMALL_CARD_BYTES else 4096
    fused_linear._budget_bytes = lambda device: int(min(fused_linear._CHUNK_GB * card.GIB, free / 2))
    fused_linear._keep_index = every_row
    fused_linear._logits_into = lambda hidden, head, out, in_32_bits: out
    fused_linear._dz_w = head_gradient
    fused_linear._dz_w_acc = lambda *args: None


def scored_rows(config, plan):
    """Return the rows that Unsloth scores at once without gradients, by its own estimate, and the chunks of each."""
    import torch
    from unsloth_zoo.rl_replacements import autotune_batch_and_chunks

    free = plan.estimate.device.free - fixed_bytes(plan)
    torch.cuda.mem_get_info = lambda *args: (free, plan.estimate.device.total)
    samples, lengths = plan.estimate.max_num_seqs, config.model.max_sequence_tokens
    rows, chunks = autotune_batch_and_chunks(samples, lengths, plan.shape.hidden, plan.shape.vocabulary, 16)
    return -(-samples // (samples // rows)), chunks


def count(config, plan, scored, dtype, num_layers):
    """Return the bytes on the GPU in each phase, apart from weights, adapter, gradients, optimizer, and on the host."""
    import torch
    from helpers.tensor_memory import TensorMemory
    from torch._subclasses import FakeTensorMode
    from trl.models.utils import disable_gradient_checkpointing
    from unsloth_zoo import gradient_checkpointing as offload
    from unsloth_zoo.rl_replacements import grpo_chunked_hidden_states_logprobs as logprobs

    from lora_grpo.models import model_files

    values = {**model_files.read_config(config.model), "num_hidden_layers": num_layers}
    rows, length = plan.estimate.micro_batch_size, config.model.max_sequence_tokens
    completion, (together, chunks) = config.sampling.max_completion_tokens, scored
    scratch, sizes = {}, {}
    replace_kernels(scratch)
    replace_head(plan.estimate.device.total, plan.estimate.device.free)

    def ids(*shape):
        return torch.zeros(shape, dtype=torch.long, device=GPU)

    def score(rows, kept, chunks, packed=False):
        """As unsloth_zoo scores the last `kept` tokens of each row. Packed, all rows are one."""
        count, tokens = rows * kept, (1, rows * length) if packed else (rows, length)
        options = {"packed_seq_lengths": (length,) * rows, "position_ids": ids(*tokens)} if packed else {}
        hidden = policy(input_ids=ids(*tokens), **options, use_cache=False).logits
        if packed:
            phase("backward")  # the forward pass of the layers, whose peak is lower
        states = hidden[0, :-1][ids(count)].unsqueeze(0) if packed else hidden[:, -kept - 1 : -1]
        head = policy.get_output_embeddings().weight
        return hidden, logprobs(states, head, ids(*states.shape[:2]), chunks)

    def on_gpu(tensor):
        return tensor.device.index == 0

    def phase(name):
        sizes[name] = max(sizes.get(name, 0), held.peak)
        held.peak = held.live

    os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] = "1"
    mixed = torch.autocast("cuda", dtype=dtype)
    with card.OnCpu(), FakeTensorMode(allow_non_fake_inputs=True):
        policy = fake_policy(values, config, dtype)
        for _ in range(2):  # Unsloth's second buffer on the GPU is used from the second step
            sizes = {}
            with TensorMemory(on_gpu) as held:
                with mixed:
                    hidden, found = score(rows, completion, chunks * rows, packed=True)
                    with torch.no_grad():  # Unsloth compares with one row at a time until it trusts its packing
                        score(1, length - 1, 1)
                hidden.register_hook(lambda gradient: phase("loss"))
                found.sum().backward()
                phase("backward")
                del hidden, found
        kept = sum(each.untyped_storage().nbytes() for each in scratch.values())
        on_host = 0
        if config.train.gradient_checkpointing:
            buffers = [*offload._allocated_slots(offload.GPU_BUFFERS), *offload._allocated_slots(offload.GPU_BUFFERS_B)]
            kept += sum(each.untyped_storage().nbytes() for each in buffers)
            host = [offload._pinned_block_bytes(each.untyped_storage().nbytes()) for each in offload.CPU_BUFFERS]
            on_host = sum(host) + (len(plan.shape.layers) - num_layers) * (host[0] - host[-1])
        with TensorMemory(on_gpu) as held, torch.no_grad(), disable_gradient_checkpointing(policy), mixed:
            score(together, completion, chunks * together)
            phase("scoring")
    return {**{name: size + kept for name, size in sizes.items()}, "host": on_host}


def count_all(config, plan, scored, dtype):
    """Return the result of `count` for all layers of the model."""
    with_two = in_own_process(count, config, plan, scored, dtype, 2)
    if config.train.gradient_checkpointing:
        return with_two
    with_three = in_own_process(count, config, plan, scored, dtype, 3)
    added = {name: with_three[name] - size for name, size in with_two.items()}
    return {name: size + (len(plan.shape.layers) - 2) * added[name] for name, size in with_two.items()}


def in_own_process(function, *arguments):
    """Return the result of a function that a forked process calls, because Unsloth keeps buffers in its modules."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.write(writer, json.dumps(function(*arguments)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        result = pipe.read()
    assert os.waitpid(process, 0)[1] == 0
    return json.loads(result)


FIXED = ("weights", "adapter", "gradients", "optimizer", "context", "workspace", "cuda_graphs")
"""Parts of the plan that are not counted here."""
ENGINE = ("kv_cache", "vllm_adapter", "vllm_workspace")
"""Also not counted: what vLLM keeps where it does not sleep while the model is trained."""


def fixed_bytes(plan):
    """Return the planned bytes of the parts that are not counted here."""
    parts = FIXED if plan.estimate.engine_sleeps else FIXED + ENGINE
    return sum(plan.estimate.parts[part] for part in parts)


def main():
    gpus, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", HF_HUB_CACHE=f"{folder}/hub")
    card.pretend(gpus[0][0], *gpus[0][2:])
    card.autocast_on_cpu()
    vllm_arguments.stand_in_extensions()
    vllm_arguments.import_unsloth()
    import torch

    alike = {}
    for name, mebibytes, gibibytes, capability in gpus:
        # With a KL penalty, Unsloth scores all completions without gradients.
        flags = ("--model.engine", "unsloth", "--sampling.backend", "vllm", "--train.beta", "0.04")
        config, plan = vllm_arguments.make_plan_on(name, mebibytes, folder, *flags)
        scored, is_old = scored_rows(config, plan), float(capability) < 8
        is_small = float(gibibytes) <= 24.5  # Unsloth cuts logits in another way on larger GPUs
        options = (config.model.bits, config.train.gradient_checkpointing)
        key = (config.model.name, *options, plan.estimate.micro_batch_size, scored, is_old, is_small)
        alike.setdefault(key, []).append((name, gibibytes, capability, config, plan))
    for (*_, scored, is_old, _), group in alike.items():
        card.pretend(*group[0][:3])
        counted = count_all(*group[0][3:], scored, torch.float16 if is_old else torch.bfloat16)
        for name, _, _, _, plan in group:
            fixed = fixed_bytes(plan)
            planned = {phase: sum(sizes.values()) - fixed for phase, sizes in plan.estimate.phases.items()}
            planned["host"] = plan.estimate.host_bytes
            print(json.dumps({"gpu": name, "fixed": fixed, "planned": planned, "counted": counted}), flush=True)


if __name__ == "__main__":
    main()
