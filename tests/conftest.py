"""What tests share: threads that wait without spinning, the folder of real data, and how commands are started."""

import os
from pathlib import Path

import pytest
from helpers.warm_process import FreshInterpreters, WarmProcess

from lora_grpo.config import hardware
from lora_grpo.config.hardware import nvidia_gpus
from lora_grpo.runs import run

# Before any test imports torch; see lora_grpo.policy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nothing here may reach a hub: what a test needs, it makes or ships.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder


@pytest.fixture(autouse=True)
def no_run_is_open(monkeypatch):
    """A process has one run, which its end closes and reports on; a test must not end that of another."""
    monkeypatch.setattr(run, "_opened", [])


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
    process = WarmProcess()
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

    def build(*mebibytes, script=None):
        lines = [
            f"echo '{place}, GPU-{place}abc, Card {place}, {size}, {size - 500}'"
            for place, size in enumerate(mebibytes)
        ]
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\n" + (script or "\n".join(lines)) + "\n")
        tool.chmod(0o755)
        hardware._query.cache_clear()

    return build
