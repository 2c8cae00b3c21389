import io
import json
import os
import subprocess
import sys

import pytest

from lora_grpo.errors import RunError
from lora_grpo.gpu_check import pretended_card

GIB = 1 << 30

TELLS = """
import json, os, sys
import torch
from lora_grpo.command_line import choose_preset
from lora_grpo.hardware import nvidia_gpus
from lora_grpo.backends import nvidia_gpus as again
[gpu], _ = nvidia_gpus()
print(json.dumps({
    "gpu": [gpu.name, gpu.memory_gib, gpu.free_gib, again()[0][0].memory_gib],
    "preset": choose_preset("auto", ("starter", "8gb", "16gb", "24gb"))[0],
    "torch": [torch.cuda.mem_get_info(), torch.cuda.memory.mem_get_info(0), torch.accelerator.get_memory_info(0)],
    "argv": sys.argv,
    "imports_beside": __import__("beside").HERE,
    "visible": os.environ["CUDA_VISIBLE_DEVICES"],
}))
"""
# A CPU's torch has no card to ask.
RUN = """
import sys
import torch
torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = lambda device=None: ({free}, {total})
torch.accelerator.get_memory_info = lambda device=None: ({free}, {total})
from lora_grpo.pretended_card import run
run(float(sys.argv[1]), sys.argv[2:])
"""


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A card of 80 GiB of which 70 are free, as nvidia-smi tells it."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '0, GPU-1, Card, {80 * 1024}, {70 * 1024}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def told(tmp_path, free, gib="16"):
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    (tmp_path / "beside.py").write_text("HERE = True")
    code = RUN.format(free=free * GIB, total=80 * GIB)
    command = [sys.executable, "-c", code, gib, str(script), "--flag", "value"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_everything_that_is_asked_tells_the_smaller_card(card, tmp_path):
    found = told(tmp_path, free=70)
    assert found["gpu"] == ["Card", 16, 16, 16] and found["preset"] == "16gb"
    assert found["torch"] == [[16 * GIB, 16 * GIB]] * 3
    assert found["argv"] == [str(tmp_path / "script.py"), "--flag", "value"]
    assert found["imports_beside"] and found["visible"] == "0"


def test_what_is_free_is_the_cards_own(card, tmp_path):
    assert told(tmp_path, free=5)["torch"] == [[5 * GIB, 16 * GIB]] * 3


def test_no_card_grows(card, tmp_path):
    found = told(tmp_path, free=70, gib="200")
    assert found["gpu"] == ["Card", 80, 70, 80] and found["torch"] == [[70 * GIB, 80 * GIB]] * 3


class Driver:
    """A card's memory, as torch's functions take and tell it."""

    def __init__(self, monkeypatch, free, grain=2 << 20):
        self.free, self.grain, self.taken = free, grain, []
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device=None: (self.free, 80 * GIB))
        monkeypatch.setattr("torch.empty", self.take)
        monkeypatch.setattr("lora_grpo.config.schema.hardware.use_one_gpu", lambda: None)
        monkeypatch.setattr("sys.stdin", io.StringIO())

    def take(self, size, dtype, device):
        assert device == "cuda" and size > 0
        self.free -= -(-size // self.grain) * self.grain
        assert self.free >= 0, "more was taken than there was"
        self.taken.append(size)
        return object()


def test_the_rest_is_held_to_the_allocators_grain(monkeypatch, capsys):
    driver = Driver(monkeypatch, free=70 * GIB - 12345)
    pretended_card.hold(16.0)
    assert 16 * GIB - driver.grain < driver.free <= 16 * GIB
    assert max(driver.taken) <= 8 * GIB
    assert capsys.readouterr().out == "held\n"


def test_a_card_that_is_small_already_is_left_alone(monkeypatch, capsys):
    driver = Driver(monkeypatch, free=12 * GIB)
    pretended_card.hold(16.0)
    assert not driver.taken and capsys.readouterr().out == "held\n"


@pytest.fixture
def holder(monkeypatch):
    """Return a function that puts a script in the place of the process that holds memory."""
    return lambda script: monkeypatch.setattr(pretended_card, "_HOLD", script)


def test_the_holder_lives_as_long_as_the_block(holder, tmp_path):
    state = tmp_path / "state"
    holder(
        "import pathlib, sys\n"
        "print('chatter'); print('held', flush=True)\n"
        f"state = pathlib.Path({str(state)!r}); state.write_text('holds ' + sys.argv[1])\n"
        "sys.stdin.read(); state.write_text('ended')"
    )
    with pretended_card.rest_held(16.0):
        while not state.exists() or not state.read_text():
            pass
        assert state.read_text() == "holds 16.0"
    assert state.read_text() == "ended"


def test_memory_that_cannot_be_held_is_an_error_with_its_reason(holder):
    holder("print('torch.OutOfMemoryError: no'); raise SystemExit(1)")
    with (
        pytest.raises(RunError, match=r"above 16 GiB could not be held: torch.OutOfMemoryError: no"),
        pretended_card.rest_held(16.0),
    ):
        pytest.fail("the block ran")


def test_a_real_holder_without_a_gpu_says_why():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RunError, match=r"could not be held: .+"), pretended_card.rest_held(16.0):
        pytest.fail("the block ran")
