"""Engines that fail at import or at start: one line that names another engine.

Packages on a path of their own stand in for broken installations of the real ones.
"""

import os
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from lora_grpo import console
from lora_grpo.config import RunConfig, replace
from lora_grpo.errors import RunError, UserError
from lora_grpo.models import ModelFlags, Policy, base_model, engines, load_policy, resolve
from lora_grpo.sampling import build

LIBRARY = "libcudart.so.13: cannot open shared object file: No such file or directory"

IMPORT_FAILURES = {
    "raise ImportError(\"cannot import name 'a' from 'b'\")": "ImportError: cannot import name 'a' from 'b'",
    f"raise RuntimeError('Look up to see it\\n') from OSError({LIBRARY!r})": f"OSError: {LIBRARY}",
    "raise RuntimeError('no device\\nUse the launcher')": "RuntimeError: no device",
    "raise SystemExit(1)": "SystemExit: 1",
}
"""Statement of a broken package -> what the message says of it."""


@pytest.fixture
def broken(tmp_path, monkeypatch, machine):
    """Return a function that puts packages in front of the installed ones, on a machine with a GPU."""
    environment = dict(os.environ)
    machine(16_376)

    def loaded_modules(*packages):
        return [module for module in sys.modules if module.partition(".")[0] in packages]

    def add(sources, requires=()):
        for module, source in sources.items():
            package, *submodules = module.split(".")
            folder = tmp_path.joinpath("packages", package, *submodules)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").write_text(source)
            if module == "unsloth":
                write_metadata(tmp_path / "packages", requires)
            for loaded in loaded_modules(package):
                monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.syspath_prepend(tmp_path / "packages")

    yield add
    for module in loaded_modules("unsloth", "unsloth_zoo", "vllm"):
        del sys.modules[module]
    os.environ.clear()
    os.environ.update(environment)


def write_metadata(folder, requires):
    """Write the metadata of a package `unsloth` with these requirements, as pip installs it."""
    metadata = folder / "unsloth-2026.10.9.dist-info"
    metadata.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.4", "Name: unsloth", "Version: 2026.10.9"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n")


def config(engine="auto", backend="auto", **model):
    return replace(RunConfig(), {"model": {"engine": engine, "bits": 16, **model}, "sampling": {"backend": backend}})


def sampler(config):
    return build.build_sampler(Policy(SimpleNamespace(), None, [0], "peft", {}), config)


@pytest.mark.parametrize(("statement", "cause"), IMPORT_FAILURES.items())
def test_an_import_of_unsloth_fails(broken, statement, cause):
    broken({"unsloth": statement})
    with pytest.raises(RunError, match=r"pass --model\.engine peft$") as failed:
        load_policy(config())
    assert cause in str(failed.value)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(("statement", "cause"), IMPORT_FAILURES.items())
def test_an_import_of_vllm_fails(broken, statement, cause):
    broken({"vllm": "", "vllm.entrypoints": "", "vllm.entrypoints.llm": statement})
    with pytest.raises(RunError, match=r"pass --sampling\.backend transformers$") as failed:
        sampler(config())
    assert cause in str(failed.value)
    assert "\n" not in str(failed.value)


ZOO = {
    "unsloth_zoo": "",
    # The functions that are replaced before a start.
    "unsloth_zoo.rl_replacements": (
        "chunked_hidden_states_selective_log_softmax = None\n"
        "chunked_hidden_states_selective_log_softmax_recompute = None\n"
    ),
}
START_FAILURES = {
    "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')": "CUDA out of memory. Tried",
    "raise RuntimeError('Engine core initialization failed\\nmore') from OSError('no kernel image')": "no kernel image",
    "raise SystemExit(1)": "SystemExit: 1",
}


@pytest.mark.parametrize(("statement", "cause"), START_FAILURES.items())
def test_a_start_of_unsloth_fails(broken, monkeypatch, statement, cause):
    unsloth = f"""
import torch

class FastLanguageModel:
    @staticmethod
    def from_pretrained(**options):
        {statement}
"""
    broken({"unsloth": unsloth, **ZOO, "vllm": ""})
    monkeypatch.setattr(base_model, "compute_dtype", lambda: None)
    with pytest.raises(RunError, match=r"pass --model\.engine peft$") as failed:
        load_policy(config())
    assert cause in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_gpu_machine_without_a_compiler_is_refused_before_the_model_is_loaded(broken, monkeypatch):
    broken({"unsloth": "FastLanguageModel = None", **ZOO})
    engines.prepare_torch(0)  # transformers does not load if torch claims a GPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CC", "")  # and the fixture `machine` leaves no compiler on the PATH
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": "/nowhere"})
    with pytest.raises(UserError, match=r"a C compiler and Python's C headers .*pass --model\.engine peft$"):
        load_policy(config())


@pytest.mark.parametrize(("statement", "cause"), START_FAILURES.items())
def test_a_start_of_vllm_fails(broken, statement, cause):
    llm = f"""
import torch

class LLM:
    def __init__(self, *_, **options):
        {statement}
"""
    broken({"vllm": "", "vllm.entrypoints": "", "vllm.entrypoints.llm": llm})
    target = resolve("starter", ModelFlags())
    with pytest.raises(RunError, match=r"^vLLM does not start .*; pass --sampling\.backend transformers$") as of_run:
        sampler(config())
    with pytest.raises(RunError, match=r"^vLLM does not start .*; pass --backend transformers$") as of_evaluation:
        build.load_sampler(target, "vllm", build.load_tokenizer(target), 64, 0)
    for failed in (of_run, of_evaluation):
        assert cause in str(failed.value)
        assert "\n" not in str(failed.value)


def test_unsloth_neither_counts_users_nor_writes_into_the_working_directory(broken):
    """Unsloth reads these variables on import and later."""
    unsloth = """
import os

statistics = os.environ.get("UNSLOTH_DISABLE_STATISTICS", "unset")
location = os.environ.get("UNSLOTH_COMPILE_LOCATION", "unset")
raise ImportError(f"{statistics} {location}")
"""
    broken({"unsloth": unsloth})
    with pytest.raises(RunError, match="ImportError: 1 /"):
        load_policy(config())


@pytest.mark.parametrize(
    ("requires", "named"),
    [
        (["trl!=0.19.0,<=0.20,>=0.18.2", "transformers<=99"], {"trl": "<=0.20"}),
        (["trl<=0.20", "transformers<5,!=4.1", "torch<2"], {"trl": "<=0.20", "transformers": "<5"}),
        (["trl<=99", "trl<=0.20; extra == 'old'"], {}),
    ],
)
def test_a_version_that_unsloth_excludes_is_named(broken, requires, named):
    broken({"unsloth": "raise ImportError('stop here')"}, requires)
    heard = []
    with console.listening(heard.append), pytest.raises(RunError):
        load_policy(config())
    warnings = [str(message) for message in heard if "Unsloth 2026.10.9" in str(message)]
    assert len(warnings) == bool(named)
    for warning in warnings:
        for name, rule in named.items():
            assert f"{name} {version(name)} (expected {rule})" in warning
        assert "--model.engine peft" in warning and "torch" not in warning and "\n" not in warning
