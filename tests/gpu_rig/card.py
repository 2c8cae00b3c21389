"""Run a script as it would run on a named NVIDIA GPU, on a machine without one.

    python tests/gpu_rig/card.py "NVIDIA GeForce RTX 4090,24,8.9" recipes/gsm8k_lora.py --model.engine unsloth ...

`torch.cuda` describes the named GPU (name, GiB, compute capability), so all code takes its branches for CUDA: Unsloth's
patches of TRL, transformers and PEFT, its fused layers, its GRPO loss. Tensors that are created on or moved to a GPU
stay on the CPU, with the mixed precision that is asked for. PyTorch computes what Unsloth's kernels for RMSNorm, RoPE
and SwiGLU do, because Triton's interpreter takes a minute per forward pass and reads bfloat16 as integers. bitsandbytes
dequantizes 4-bit weights on the CPU.

What this cannot show: kernels (Triton, bitsandbytes, vLLM, FlashInfer, attention backends), compiled code
(`torch.compile` is off), rounding on a real GPU, speed, and memory. Unsloth's `generate` returns NaN here, so
completions must come from another sampler.
"""

import contextlib
import os
import runpy
import sys
import types
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    TORCHDYNAMO_DISABLE="1",
    TRITON_INTERPRET="1",
    UNSLOTH_COMPILE_DISABLE="1",
)

import torch
from torch.overrides import TorchFunctionMode

GIB = 1 << 30


class Nothing:
    """Stands for a stream, an event, or a device guard."""

    cuda_stream = idx = 0
    prev_idx = -1

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


def pretend(name, gibibytes, capability):
    """Have `torch.cuda` describe this GPU."""
    major, minor = map(int, capability.split("."))
    total = int(float(gibibytes) * GIB)
    properties = types.SimpleNamespace(
        name=name, total_memory=total, major=major, minor=minor, multi_processor_count=128, is_integrated=0
    )
    sizes = ("memory_reserved", "max_memory_reserved", "memory_allocated", "max_memory_allocated")
    actions = ("synchronize", "empty_cache", "set_device", "manual_seed_all", "reset_peak_memory_stats", "ipc_collect")
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (major, minor),
        "get_device_properties": properties,
        "get_device_name": name,
        "mem_get_info": (total - GIB // 2, total),
        "get_rng_state": torch.get_rng_state(),
        "get_rng_state_all": [torch.get_rng_state()],
        "stream": contextlib.nullcontext(),
        **dict.fromkeys(("current_stream", "default_stream"), Nothing()),
        **dict.fromkeys(sizes, 0),
        **dict.fromkeys((*actions, "_lazy_init", "set_rng_state", "set_rng_state_all"), None),
    }
    for question, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random):
            setattr(module, question, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.is_bf16_supported = lambda including_emulation=True: major >= 8
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.device = Nothing
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda optimizer: None
    torch.nn.Module.cuda = lambda module, *args, **kwargs: module


def on_cpu(device):
    """Return the device to use instead. A plain number names a GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return "cpu" if kind == "cuda" else device


def autocast_on_cpu():
    """Have mixed precision for a GPU apply to tensors on the CPU."""
    start, enabled, dtype = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype
    torch.autocast.__init__ = lambda self, device_type, *args, **kwargs: start(
        self, on_cpu(device_type), *args, **kwargs
    )
    torch.is_autocast_enabled = lambda device_type="cpu": enabled(on_cpu(device_type))
    torch.get_autocast_dtype = lambda device_type="cpu": dtype(on_cpu(device_type))


class OnCpu(TorchFunctionMode):
    """Create tensors on the CPU if they are requested on a GPU."""

    def __torch_function__(self, function, kinds, arguments=(), options=None):
        options = dict(options or {})
        if "device" in options:
            options["device"] = on_cpu(options["device"])
        if options.get("pin_memory"):
            options["pin_memory"] = False
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return arguments[0]
        if name == "to":
            tensor, *rest = arguments
            arguments = (
                tensor,
                *(on_cpu(each) if isinstance(each, str | torch.device | int) else each for each in rest),
            )
        return function(*arguments, **options)


def rms_norm(norm, hidden, gemma=False, **kwargs):
    """Compute Unsloth's `fast_rms_layernorm`."""
    weight = norm.weight.float() + 1 if gemma else norm.weight
    normed = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=norm.variance_epsilon)
    return (weight * normed.to(weight.dtype)).to(hidden.dtype)


def rotate(queries, keys, cosines, sines, positions=None):
    """Compute Unsloth's `fast_rope_embedding` for (B, heads, T, head size) queries and keys."""
    rows, _, length, size = queries.shape
    if positions is None:
        positions = torch.arange(length).expand(rows, length)
    cosines, sines = (each.squeeze()[positions.reshape(rows, 1, length)].to(queries.dtype) for each in (cosines, sines))

    def turned(states):
        return states * cosines + torch.cat((-states[..., size // 2 :], states[..., : size // 2]), dim=-1) * sines

    return turned(queries), turned(keys)


def dequantize(weight, state=None, out=None, use_global_buffer=False, dtype=None):
    """Compute Unsloth's `fast_dequantize` with bitsandbytes' code for the CPU."""
    from bitsandbytes.functional import dequantize_4bit

    return weight if state is None else dequantize_4bit(weight, state)


def import_unsloth():
    """Import Unsloth, which runs ldconfig to find a driver, and have it load models into the CPU's memory."""
    from lora_grpo.models import unsloth_policy

    run, os.system = os.system, lambda command: 1
    unsloth_policy.import_unsloth()
    os.system = run
    import unsloth

    unsloth.models.llama.fast_rms_layernorm = rms_norm
    unsloth.models.llama.fast_rope_embedding = rotate
    fast_lora = sys.modules["unsloth.kernels.fast_lora"]
    fast_lora.swiglu_fg_kernel = lambda gate, up: torch.nn.functional.silu(gate.float()).to(up.dtype) * up
    fast_lora.swiglu_DWf_DW_dfg_kernel = sys.modules["unsloth.kernels.swiglu"]._DWf_DW_dfg_traced
    for name in ("unsloth.kernels", "unsloth.kernels.utils", "unsloth.kernels.fast_lora"):
        sys.modules[name].fast_dequantize = dequantize
    load = unsloth.FastLanguageModel.from_pretrained
    unsloth.FastLanguageModel.from_pretrained = staticmethod(
        lambda *args, **options: load(*args, **{"device_map": {"": "cpu"}, **options})
    )


def main():
    pretend(*sys.argv[1].split(","))
    autocast_on_cpu()
    sys.argv = sys.argv[2:]
    if "unsloth" in sys.argv:
        import_unsloth()
    sys.path[0] = str(Path(sys.argv[0]).parent)
    with OnCpu():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
