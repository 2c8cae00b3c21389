"""What tests share: one thread for each worker, the folder of real data, and how commands are started."""

import functools
import gc
import importlib
import os
import sys
from pathlib import Path

import pytest
from helpers.warm_process import FreshInterpreters, WarmProcess

from lora_grpo import commands, console, python_objects
from lora_grpo.files import python_file
from lora_grpo.hardware import nvidia_gpus
from lora_grpo.runs import run
from lora_grpo.tasks import of_object

# Before any test imports torch. Small models gain nothing from more threads, which wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nothing here may reach a hub: what a test needs, it makes or ships.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parent.parent
# Workers begin with the files that take longest, or that wait for a registry, and so end together.
LONGEST_FIRST = (
    "gpu_rig/test_logprob_check.py",
    "gpu_rig/test_training.py",
    "gpu_rig/test_vllm_arguments.py",
    "test_real_model.py",
    "install/test_locks.py",
    "models/test_vllm_models.py",
    "verify/test_matrix.py",
    "gpu_rig/test_logprob_check.py",
    "gpu_rig/test_training.py",
    "gpu_rig/test_unsloth_memory.py",
    "gpu_rig/test_vllm_arguments.py",
    "test_agent_recipes.py",
    "training/test_gain.py",
    "models/test_architectures.py",
    "test_python_page.py",
    "training/test_unsloth.py",
    "training/test_task_file_run.py",
    "agents/test_resume_agents.py",
    "verify/test_servers.py",
    "agents/test_exact_tokens.py",
    "sampling/test_vllm.py",
    "sampling/test_vllm_server.py",
    "test_agent_recipes.py",
    "training/test_resume.py",
    "training/test_sft.py",
    "loss/test_compiled_layers.py",
    "monitoring/test_monitor.py",
    "hub/test_run_to_hub.py",
    "test_api.py",
    "sandbox/test_attacks.py",
    "training/test_fast_trainer.py",
    "training/test_several_processes.py",
    "monitoring/test_time_budget.py",
    "gpu_check/test_gpu_check.py",
    "training/test_run.py",
    "sandbox/test_kill.py",
    "training/test_difficulty.py",
    "training/test_sft.py",
    "loss/test_compiled_layers.py",
    "cli/test_serve.py",
    "rollouts/test_loop.py",
    "cli/test_environments.py",
    "audit/test_policies.py",
    "evaluation/test_kill.py",
    "training/test_logprob_check.py",
    "sandbox/test_official.py",
    "test_card.py",
    "test_benchmarks.py",
    "test_gsm8k_study.py",
)


def pytest_collection_modifyitems(items):
    positions = {ROOT / "tests" / name: position for position, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: positions.get(item.path, len(positions)))


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder


@pytest.fixture(autouse=True)
def no_run_is_open(monkeypatch):
    """A process has one run, which its end closes and reports on, and one command; a test has its own."""
    monkeypatch.setattr(run, "_opened", [])
    monkeypatch.setattr(run, "_claims", [])
    monkeypatch.setattr(commands, "_start", [])


@pytest.fixture(autouse=True)
def no_user_file_is_known():
    """The folders of a test's files leave Python's path: a later test may have modules of the same names."""
    yield
    python_file.forget()


@pytest.fixture(scope="session", autouse=True)
def messages_are_printed():
    """Rooms tell their messages as on the command line: results on stdout, notes on stderr."""
    with console.listening(console.Terminal()):
        yield


@pytest.fixture
def known_task():
    """Return a function that lets settings refer to a class as a task, and returns the name for them."""
    objects = python_objects.Objects()

    def name_of(task):
        return objects.add(task.__name__, of_object(task.__name__, task))

    with python_objects.known(objects):
        yield name_of


@functools.cache
def freeze_imports() -> None:
    """Exclude everything imported so far from garbage collection, which trainers and tests run in full, once."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def imports_are_not_collected():
    yield
    if "trl" in sys.modules:  # `gc.get_freeze_count` would tell as well, but it takes 0.1 s to count
        freeze_imports()


@pytest.fixture(scope="session")
def fresh():
    """Start commands in interpreters of their own."""
    return FreshInterpreters()


@pytest.fixture(scope="session")
def warm(fresh):
    """Start commands without their seconds of imports; in fresh interpreters where a GPU's driver cannot be forked."""
    if nvidia_gpus()[0]:
        yield fresh
        return
    process = WarmProcess(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid())))  # shared by all workers
    yield process
    process.close()


@pytest.fixture(scope="session", autouse=True)
def warm_in_time(request):
    """Have the warm process begin its imports before the first test, beside those that do without it."""
    if any("warm" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("warm")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that puts a stand-in nvidia-smi, alone, on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def build(*mebibytes, script=None, driver="580.65.06"):
        lines = [
            f"echo '{index}, GPU-{index}abc, Card {index}, {total}, {total - 500}, {driver}, 8.9'"
            for index, total in enumerate(mebibytes)
        ]
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\n" + (script or "\n".join(lines)) + "\n")
        tool.chmod(0o755)
        nvidia_gpus(refresh=True)

    return build


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Return a function that puts empty packages in front of the installed ones, such as vllm="0.28.0"."""
    monkeypatch.syspath_prepend(tmp_path)
    for module in [*sys.modules]:
        if module.partition(".")[0] in ("vllm", "vllm_bnb_plugin", "unsloth"):
            monkeypatch.delitem(sys.modules, module)

    def add(**versions):
        for name, version in versions.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
            (tmp_path / f"{name}-{version}.dist-info").mkdir()
            metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
            metadata.write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()

    return add


@pytest.fixture
def gpu_packages(packages):
    """Put empty packages in front of the installed ones, which look like those of the `gpu` extra."""
    packages(vllm="0.27.1", unsloth="2026.10.9")
