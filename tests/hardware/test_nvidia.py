"""Which drivers can run which PyTorch, as every command says it; nvidia-smi and torch are stand-ins."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lora_grpo.hardware import choose_preset, driver_problem, nvidia_gpus

ROOT = Path(__file__).resolve().parents[2]
NO_DRIVER = (
    "echo \"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
    'NVIDIA driver is installed and running."; exit 9'
)
TRAIN = ("train", "gsm8k", "--preset", "24gb", "--output-dir", "run")
COMMANDS = {"plan": (*TRAIN, "--plan"), "run": TRAIN, "check-gpu": ("check-gpu", "--output-dir", "check")}


@pytest.fixture
def start(tmp_path):
    """Return a function that runs a command where nvidia-smi answers so, and torch is a build with this CUDA version.

    It returns the exit code and the lines about the driver.
    """

    def run(command, smi, cuda="13.0"):
        torch, tool = tmp_path / "torch", tmp_path / "bin" / "nvidia-smi"
        torch.mkdir()
        tool.parent.mkdir()
        (torch / "__init__.py").write_text("raise ImportError('torch was imported')")
        version = f"__version__ = '2.13.0+cu{cuda.replace('.', '')}'\ncuda: Optional[str] = '{cuda}'\n"
        (torch / "version.py").write_text(version)
        if smi:
            tool.write_text(f"#!/bin/sh\n{smi}\n")
            tool.chmod(0o755)
        environment = {"PATH": str(tool.parent), "PYTHONPATH": f"{tmp_path}:{ROOT}", "HF_HUB_OFFLINE": "1"}
        environment |= {"HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
        arguments = [sys.executable, "-m", "lora_grpo", *COMMANDS[command]]
        done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert "Traceback" not in done.stderr
        return (
            done.returncode,
            [line for line in done.stderr.splitlines() if re.search("NVIDIA driver|CUDA 1", line)],
            done.stdout,
        )

    return run


def card(driver, capability="8.9"):
    return f"echo '0, GPU-1, NVIDIA GeForce RTX 4090, 24564, 24000, {driver}, {capability}'"


@pytest.mark.parametrize(
    ("smi", "cuda", "words"),
    [
        (card("550.54.14"), "13.0", ["550.54.14", "CUDA 13", "580", "EXTRA=cuda12"]),  # CUDA 12.4
        (card("570.211.01"), "13.0", ["570.211.01", "CUDA 13", "580", "EXTRA=cuda12"]),  # CUDA 12.8
        (card("570.211.01", "12.0"), "13.0", ["570.211.01", "CUDA 13", "580"]),
        (card("470.256.02"), "12.6", ["470.256.02", "CUDA 12", "525"]),
        (card("580.95.05", "7.0"), "13.0", ["compute capability 7.0", "CUDA 13", "EXTRA=cuda12"]),
        (card("580.95.05", "7.0"), "12.6", None),
        (card("550.54.14"), "12.6", None),
        (card("580.65.06"), "13.0", None),
        (NO_DRIVER, "13.0", ["couldn't communicate", "580"]),
        ("", "13.0", ["not on the PATH", "580"]),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_in_one_line_what_to_do_about_the_driver(start, command, smi, cuda, words):
    code, lines, printed = start(command, smi, cuda)
    assert code == (0 if command == "plan" else 2)  # an accepted run then misses the model, the check torch
    assert (command == "plan") == ("\nGiB " in printed)  # the table of the plan
    if words is None:
        assert lines == []
    else:
        [line] = lines
        assert all(word in line for word in words) and ("cuda12" in line) == ("EXTRA=cuda12" in words)


@pytest.fixture
def cuda_13(monkeypatch):
    monkeypatch.setattr("lora_grpo.hardware.nvidia._torch_build", lambda: ("2.13.0+cu130", 13))
    return monkeypatch


def test_the_starter_runs_beside_an_old_driver_and_a_small_gpu_does_not_stop_it(machine, cuda_13):
    machine(24564, driver="550.54.14")
    assert choose_preset("starter", ("starter", "24gb"))[0] == "starter"
    machine(2048, driver="550.54.14")
    assert choose_preset("auto", ("starter", "24gb"))[0] == "starter"


def test_a_newer_libcuda_is_enough(machine, cuda_13):
    """As with NVIDIA's forward-compatibility package in a container."""
    machine(24564, driver="550.54.14")
    [gpu] = nvidia_gpus()[0]
    assert "550.54.14" in driver_problem(gpu)
    cuda_13.setattr("lora_grpo.hardware.nvidia._libcuda_version", lambda: 13)
    assert driver_problem(gpu) == ""


def test_wsl2_has_its_tool_beside_the_path_and_its_driver_on_windows(machine, monkeypatch, tmp_path):
    monkeypatch.setattr("platform.release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr("lora_grpo.hardware.nvidia._WSL_LIBRARIES", str(tmp_path))
    assert "on Windows" in nvidia_gpus()[1]
    machine(24564)
    assert len(nvidia_gpus()[0]) == 1
    machine(script=NO_DRIVER)
    assert "on Windows" in nvidia_gpus()[1]
