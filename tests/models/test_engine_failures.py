"""Engines that fail at import or at start: one line that names another engine.

Packages on a path of their own stand in for broken installations of the real ones.
"""

import os
import sys
from types import SimpleNamespace

import pytest

from lora_grpo.config import RunConfig, replace
from lora_grpo.errors import RunError, UserError
from lora_grpo.models import ModelFlags, Policy, base_model, engines, load_policy, resolve
from lora_grpo.sampling import build

LIBRARY = "libcudart.so.13: cannot open shared object file: No such file or directory"

FAILURES = {
    "raise ImportError(\"cannot import name 'a' from 'b'\")": "ImportError: cannot import name 'a' from 'b'",
    f"raise RuntimeError('Look up to see it\\n') from OSError({LIBRARY!r})": f"OSError: {LIBRARY}",
    "raise RuntimeError('no device\\nUse the launcher')": "RuntimeError: no device",
    "raise SystemExit(1)": "SystemExit: 1",
}
"""Statement -> what the message says of it."""


@pytest.fixture
def broken(tmp_path, monkeypatch, machine):
    """Return a function that puts packages in front of the installed ones, on a machine with a GPU."""
    environment = dict(os.environ)
    machine(16_376)

    def loaded_modules(*packages):
        return [module for module in sys.modules if module.partition(".")[0] in packages]

    def add(**modules):
        for name, text in modules.items():
            path = tmp_path / "packages" / name.replace("__", "/") / "__init__.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            for module in loaded_modules(name.partition("__")[0]):
                monkeypatch.delitem(sys.modules, module)
        monkeypatch.syspath_prepend(tmp_path / "packages")

    yield add
    for module in loaded_modules("unsloth", "unsloth_zoo", "vllm"):
        del sys.modules[module]
    os.environ.clear()
    os.environ.update(environment)


def config(engine="auto", backend="auto", **model):
    return replace(RunConfig(), {"model": {"engine": engine, "bits": 16, **model}, "sampling": {"backend": backend}})


def sampler(config):
    return build.build_sampler(Policy(SimpleNamespace(), None, [0], "peft", {}), config)


@pytest.mark.parametrize("engine", ["unsloth", "vllm"])
@pytest.mark.parametrize(("statement", "said"), FAILURES.items())
def test_an_import_of_an_engine_fails(broken, statement, said, engine):
    if engine == "unsloth":
        broken(unsloth=statement)
        load, instead = load_policy, "--model.engine peft"
    else:
        broken(vllm="", vllm__entrypoints="", vllm__entrypoints__llm=statement)
        load, instead = sampler, "--sampling.backend transformers"
    with pytest.raises(RunError, match=f"pass {instead}$") as failed:
        load(config())
    assert said in str(failed.value) and "\n" not in str(failed.value)


CHUNKS = "chunked_hidden_states_selective_log_softmax = chunked_hidden_states_selective_log_softmax_recompute = None"
"""The functions of unsloth_zoo.rl_replacements that are replaced before a start."""

STARTS = {
    "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')": "CUDA out of memory. Tried",
    "raise RuntimeError('Engine core initialization failed\\nmore') from OSError('no kernel image')": "no kernel image",
    "raise SystemExit(1)": "SystemExit: 1",
}


@pytest.mark.parametrize(("statement", "said"), STARTS.items())
def test_a_start_of_unsloth_fails(broken, monkeypatch, statement, said):
    broken(
        unsloth="import torch\nclass FastLanguageModel:\n    @staticmethod\n    def from_pretrained(**options):\n"
        f"        {statement}\n",
        unsloth_zoo="",
        unsloth_zoo__rl_replacements=CHUNKS,
        vllm="",
    )
    monkeypatch.setattr(base_model, "compute_dtype", lambda: None)
    with pytest.raises(RunError, match=r"pass --model\.engine peft$") as failed:
        load_policy(config())
    assert said in str(failed.value) and "\n" not in str(failed.value)


def test_a_gpu_machine_without_a_compiler_is_refused_before_the_model_is_loaded(broken, monkeypatch):
    broken(unsloth="FastLanguageModel = None", unsloth_zoo="", unsloth_zoo__rl_replacements=CHUNKS)
    engines.prepare_torch(0)  # transformers does not load if torch claims a GPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CC", "")  # and the fixture `machine` leaves no compiler on the PATH
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": "/nowhere"})
    with pytest.raises(UserError, match=r"a C compiler and Python's C headers .*pass --model\.engine peft$"):
        load_policy(config())


@pytest.mark.parametrize(("statement", "said"), STARTS.items())
def test_a_start_of_vllm_fails(broken, statement, said):
    start = f"import torch\nclass LLM:\n    def __init__(self, *_, **options):\n        {statement}\n"
    broken(vllm="", vllm__entrypoints="", vllm__entrypoints__llm=start)
    target = resolve("starter", ModelFlags())
    choices = {
        "--sampling.backend transformers": lambda: sampler(config()),
        "--backend transformers": lambda: build.load_sampler(target, "vllm", build.load_tokenizer(target), 64, 0),
    }
    for instead, load in choices.items():
        with pytest.raises(RunError, match=f"^vLLM does not start .*; pass {instead}$") as failed:
            load()
        assert said in str(failed.value) and "\n" not in str(failed.value)


def test_unsloth_neither_counts_users_nor_writes_into_the_working_directory(broken):
    names = ("UNSLOTH_DISABLE_STATISTICS", "UNSLOTH_COMPILE_LOCATION")  # read on import and later
    broken(unsloth=f"import os\nraise ImportError(' '.join(os.environ.get(each, 'unset') for each in {names}))")
    with pytest.raises(RunError, match="ImportError: 1 /"):
        load_policy(config())
