"""Engines that fail at import or at start: one line, and another engine only where `auto` chose the one that failed.

Packages on a path of their own stand in for broken installations of the real ones.
"""

import os
import sys
from types import SimpleNamespace

import pytest

from lora_grpo.config import RunConfig, replace
from lora_grpo.errors import EngineFailed, RunError, UserError
from lora_grpo.models import Overrides, Policy, base_model, load_policy, resolve
from lora_grpo.sampling import build

LIBRARY = "libcudart.so.13: cannot open shared object file: No such file or directory"

FAILURES = {
    "raise ImportError(\"cannot import name 'a' from 'b'\")": "ImportError: cannot import name 'a' from 'b'",
    f"raise RuntimeError('Look up to see it\\n') from OSError({LIBRARY!r})": f"OSError: {LIBRARY}",
    "raise SystemExit(1)": "SystemExit: 1",
}
"""Statement -> what the message says of it."""


@pytest.fixture
def broken(tmp_path, monkeypatch, machine):
    """Return a function that puts packages in front of the installed ones, on a machine with a GPU."""
    kept = dict(os.environ)
    machine(16_376)

    def add(**modules):
        for name, text in modules.items():
            path = tmp_path / "packages" / name.replace("__", "/") / "__init__.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            for loaded in [each for each in sys.modules if each.partition(".")[0] == name.partition("__")[0]]:
                monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.syspath_prepend(tmp_path / "packages")

    yield add
    for name in [each for each in sys.modules if each.partition(".")[0] in ("unsloth", "vllm")]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(kept)


def config(engine="auto", backend="auto", **model):
    return replace(RunConfig(), {"model": {"engine": engine, "bits": 16, **model}, "sampling": {"backend": backend}})


def sampler(config):
    return build.build_sampler(Policy(SimpleNamespace(), None, [0], "peft", {}), config)


@pytest.mark.parametrize("engine", ["unsloth", "vllm"])
@pytest.mark.parametrize(("statement", "said"), FAILURES.items())
def test_an_import_of_an_engine_fails(broken, statement, said, engine):
    if engine == "unsloth":
        broken(unsloth=statement)
        load, chosen, arguments = load_policy, config("unsloth"), ("--model.engine", "peft")
    else:
        broken(vllm="", vllm__entrypoints="", vllm__entrypoints__llm=statement)
        load, chosen, arguments = sampler, config(backend="vllm"), ("--sampling.backend", "transformers")
    with pytest.raises(EngineFailed) as failed:
        load(config())
    assert failed.value.arguments == arguments and said in failed.value.problem
    with pytest.raises(UserError, match=r"(peft|transformers backend)$") as refused:
        load(chosen)
    assert said in str(refused.value) and "\n" not in str(refused.value)


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
        vllm="",
    )
    monkeypatch.setattr(base_model, "compute_dtype", lambda: None)
    for engine, backend, arguments in (
        ("auto", "auto", ("--model.engine", "peft")),
        ("auto", "vllm", ("--model.engine", "peft")),
        ("unsloth", "auto", ("--sampling.backend", "transformers")),
    ):
        with pytest.raises(EngineFailed) as failed:
            load_policy(config(engine, backend))
        assert failed.value.arguments == arguments
        assert said in failed.value.problem and "\n" not in str(failed.value)
    with pytest.raises((UserError, RunError), match=said) as refused:
        load_policy(config("unsloth", "vllm"))
    assert not isinstance(refused.value, EngineFailed) and "\n" not in str(refused.value)


def test_a_gpu_machine_without_a_compiler_is_refused_before_the_model_is_loaded(broken, monkeypatch):
    broken(unsloth="FastLanguageModel = None")
    base_model.prepare_torch(0)  # transformers does not load if torch claims a GPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CC", "")  # and the fixture `machine` leaves no compiler on the PATH
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": "/nowhere"})
    with pytest.raises(EngineFailed, match="a C compiler and Python's C headers") as failed:
        load_policy(config())
    assert failed.value.arguments == ("--model.engine", "peft")
    with pytest.raises(UserError, match=r"pass --model\.engine peft$"):
        load_policy(config("unsloth", "vllm"))


@pytest.mark.parametrize(("statement", "said"), STARTS.items())
def test_a_start_of_vllm_fails(broken, statement, said):
    start = f"import torch\nclass LLM:\n    def __init__(self, *_, **options):\n        {statement}\n"
    broken(vllm="", vllm__entrypoints="", vllm__entrypoints__llm=start)
    target = resolve("starter", Overrides(None, None, None, False))
    choices = {
        ("--sampling.backend", "transformers"): lambda is_auto: sampler(config(backend="auto" if is_auto else "vllm")),
        ("--backend", "transformers"): lambda is_auto: build.load_sampler(
            target, "vllm", build.load_tokenizer(target), 64, 0, is_auto=is_auto
        ),
    }
    for arguments, load in choices.items():
        with pytest.raises(EngineFailed) as failed:
            load(True)
        assert failed.value.arguments == arguments and "\n" not in str(failed.value)
        with pytest.raises(RunError, match=r"^vLLM cannot serve .*; select the transformers backend$") as refused:
            load(False)
        assert not isinstance(refused.value, EngineFailed) and "\n" not in str(refused.value)
        assert said in str(refused.value)
