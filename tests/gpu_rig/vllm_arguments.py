"""Print what vLLM would be started with on each GPU, one JSON line per GPU and engine.

    python tests/gpu_rig/vllm_arguments.py '[["NVIDIA GeForce RTX 4090", 24564, "23.64", "8.9"]]' FOLDER

A GPU is a name, the MiB that nvidia-smi lists, the GiB that torch reports, and a compute capability. FOLDER gets
stand-ins for nvidia-smi and a CUDA toolkit, and a Hub cache of models without weights. For each GPU, the recipe's
preset is planned for an old commit of its model, and its policy loaded, with Unsloth if it is installed and with PEFT,
until vLLM would start.
"""

import dataclasses
import importlib.util
import inspect
import json
import os
import runpy
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "0.5B": {},
    "1.5B": {"hidden_size": 1536, "num_attention_heads": 12, "num_hidden_layers": 28, "intermediate_size": 8960},
    "3B": {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 36, "intermediate_size": 11008},
}


OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
"""Commits of each model. The new one, which is the branch `main`, is another model."""


class Extension(types.ModuleType):
    """A compiled module of vLLM, which cannot be loaded without a driver."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


def stand_in_extensions():
    """Have vLLM find its compiled modules. Unsloth hides a vLLM whose modules cannot be loaded."""
    sys.modules.update((name, Extension(name)) for name in ("vllm._C_stable_libtorch", "vllm.cumem_allocator"))


class Started(BaseException):
    """Raised where vLLM would load the model. Unsloth tries again after an Exception."""


def import_unsloth():
    """Import Unsloth as for a GPU."""
    from lora_grpo.models import unsloth_policy

    run, os.system = os.system, lambda command: 1  # Unsloth runs ldconfig to find a driver
    unsloth_policy.import_unsloth()
    os.system = run


def make_plan_on(name, mebibytes, folder, *flags):
    """Plan the recipe's preset for a GPU, and return its configuration and the plan."""
    from helpers.model_configs import QWEN25_HALF

    from lora_grpo.cli import parse
    from lora_grpo.hardware import nvidia_gpus
    from lora_grpo.memory import make_plan

    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '0, GPU-0, {name}, {mebibytes}, {mebibytes - 500}'\n")
    tool.chmod(0o755)
    nvidia_gpus(refresh=True)
    presets = runpy.run_path(str(ROOT / "recipes" / "gsm8k_lora.py"))["PRESETS"]
    flags = ["--plan", "--model.revision", OLD, *flags]
    config, invocation = parse(flags, recipe="gsm8k_lora", description="", presets=presets)
    [size] = [size for size in SIZES if f"-{size}-" in config.model.name]
    repository = folder / "hub" / f"models--{config.model.name.replace('/', '--')}"
    shape = {**QWEN25_HALF, **SIZES[size], "max_position_embeddings": 32768, "architectures": ["Qwen2ForCausalLM"]}
    for commit, config_json in {OLD: shape, NEW: {"model_type": "unheard_of"}}.items():
        (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (repository / "snapshots" / commit / "config.json").write_text(json.dumps(config_json))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(NEW)
    return make_plan(config, invocation)


def main():
    gpus, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    sys.path[:0] = [str(ROOT / "tests")]
    for tool in ("nvcc", "ninja", "libcuda.so"):  # Unsloth uses FlashInfer only if it finds these
        (folder / tool).touch(mode=0o755)
    os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", LIBRARY_PATH=str(folder), HF_HUB_CACHE=f"{folder}/hub")
    import card

    from lora_grpo.models import engines

    card.pretend(gpus[0][0], *gpus[0][2:])
    stand_in_extensions()
    has_unsloth = importlib.util.find_spec("unsloth") is not None
    if has_unsloth:
        import_unsloth()
    else:
        engines.hide_flashinfer()  # as before vLLM is started
    from vllm import plugins
    from vllm.engine import arg_utils
    from vllm.entrypoints import llm
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.platforms import cuda
    from vllm.utils.flashinfer import has_flashinfer
    from vllm.v1.sample.ops import topk_topp_sampler

    from lora_grpo.models import load_policy
    from lora_grpo.sampling import build

    def start(self, *arguments, **options):
        raise Started({**dict(zip(["model"], arguments, strict=False)), **options})

    def pins_memory_on_wsl():
        cuda.in_wsl, cuda._get_wsl_kernel_version = lambda: True, lambda: (6, 6, 87)
        return cuda.CudaPlatformBase.is_pin_memory_available()

    def remember(*arguments, **options):
        nonlocal expected
        expected = approximate(*arguments, **options)
        return expected

    arguments_of_vllm = {*inspect.signature(llm.LLM.__init__).parameters}
    arguments_of_vllm |= {field.name for field in dataclasses.fields(arg_utils.EngineArgs)}
    plugins.load_general_plugins()
    llm.LLM.__init__ = start
    topk_topp_sampler.current_platform = cuda.CudaPlatform()  # here, vLLM's is the CPU
    load = {"peft": build._engine}
    if has_unsloth:
        from unsloth_zoo import vllm_utils

        approximate, vllm_utils.approximate_vllm_memory_usage = vllm_utils.approximate_vllm_memory_usage, remember
        load = {"unsloth": load_policy, **load}
        print(json.dumps({"gpu": "WSL2", "engine": "unsloth", "pins_memory": pins_memory_on_wsl()}))
    os.environ.pop("VLLM_WSL2_ENABLE_PIN_MEMORY", None)
    for name, mebibytes, gibibytes, capability in gpus:
        card.pretend(name, gibibytes, capability)
        for engine in load:
            flags = ["--model.engine", engine, "--sampling.backend", "vllm"]
            config, plan = make_plan_on(name, mebibytes, folder, *flags)
            expected, options = None, {}
            try:
                with card.OnCpu():
                    load[engine](config)
            except Started as started:
                [options] = started.args
            line = {
                "gpu": name,
                "engine": engine,
                "config": config.to_dict(),
                "plan": plan.estimate.record(),
                "vllm": {key: value for key, value in options.items() if not hasattr(value, "inductor_compile_config")},
                "unknown": sorted(options.keys() - arguments_of_vllm),
                "quantizes": options.get("quantization") in QUANTIZATION_METHODS,
                "has_flashinfer": has_flashinfer(),
                "flashinfer_sampler": topk_topp_sampler.flashinfer_sampler_supported(),
                "kv_cache_gib": expected and expected[3],
            }
            print(json.dumps(line, default=str))
            os.environ.pop("VLLM_USE_FLASHINFER_SAMPLER", None)  # each engine sets it
    print(json.dumps({"gpu": "WSL2", "engine": "peft", "pins_memory": pins_memory_on_wsl()}))


if __name__ == "__main__":
    main()
