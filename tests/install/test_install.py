"""`make install` with a stand-in for pip: only a killed installation starts again, and a GPU gets the lock."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
# Stands for a Python of the system: its venv contains only a stand-in for pip.
case "$*" in
*nvidia.py*) exec REAL "$@";;
"-m venv"*) for folder; do :; done; case "$*" in *--clear*) rm -rf "$folder"/*;; esac
    mkdir -p "$folder/bin"; ln -sf PIP "$folder/bin/python";;
"-m pip"*) exec PIP "$@";;
esac
"""

PIP = """#!/bin/sh
# Installs one file a call. With a file `killed` beside it, kills the installation as soon as half a file is there;
# with a file `fails`, prints that file and fails.
folder=$(dirname "$(dirname "$0")")
echo "$*" >> LOG
for file; do case "$file" in /dev/fd/*) cat "$file" > REQUIREMENTS;; esac; done
if [ -e KILLED ]; then echo half > "$folder/package"; . KILLED; exit 1; fi
if [ -e FAILS ]; then cat FAILS >&2; exit 1; fi
[ ! -e "$folder/package" ] || [ "$(cat "$folder/package")" = whole ] || exit 0  # pip skips what it finds
echo whole > "$folder/package"
"""


class Machine:
    def __init__(self, folder):
        self.venv, self.log = folder / "venv", folder / "log"
        self.killed, self.fails = folder / "killed", folder / "fails"
        self.requirements, self.tools = folder / "requirements", folder / "tools"
        for name, text in (("python", PYTHON), ("pip", PIP)):
            text = text.replace("REAL", sys.executable)
            for word in ("pip", "log", "killed", "fails", "requirements"):
                text = text.replace(word.upper(), str(folder / word))
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.python = folder / "python"

    def make(self, target, extra="", *flags):
        command = ["make", target, f"PYTHON={self.python}", f"VENV={self.venv}"]
        command += [*([] if extra is None else [f"EXTRA={extra}"]), *flags]
        # A background job of a script ignores SIGINT, and so would make.
        default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        options = {"capture_output": True, "text": True, "start_new_session": True, "preexec_fn": default}
        options["env"] = {**os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}"}
        return subprocess.run(command, cwd=ROOT, check=False, **options)

    def nvidia_smi(self, script):
        self.tools.mkdir(exist_ok=True)
        (self.tools / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (self.tools / "nvidia-smi").chmod(0o755)

    def outdate(self):
        subprocess.run(["touch", "-d", "2000-01-01", self.venv / "installed"], check=True)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("kill", ["kill -9 $PPID", "kill -9 $$", "kill -INT 0"])
def test_an_installation_that_was_killed_starts_again(machine, installed, kill):
    if installed:  # an update
        assert machine.make("install").returncode == 0
        machine.outdate()
    machine.killed.write_text(kill)
    assert machine.make("install").returncode != 0
    machine.killed.unlink()
    done = machine.make("install")
    assert done.returncode == 0, done.stderr
    assert "the last installation" in done.stderr and (machine.venv / "package").read_text() == "whole\n"
    assert (machine.venv / "installed").exists() and not (machine.venv / "installing").exists()
    calls = machine.log.read_text()
    assert machine.make("install").returncode == 0 and machine.log.read_text() == calls  # nothing left to do


@pytest.mark.parametrize("extra", ["", ",gpu"])
def test_an_update_that_fails_keeps_the_environment(machine, extra):
    assert machine.make("install", extra=extra).returncode == 0
    machine.outdate()
    machine.fails.write_text("ERROR: unreachable")
    for _ in range(2):
        failed = machine.make("install", extra=extra)
        assert failed.returncode != 0 and "ERROR: unreachable" in failed.stderr
        assert (machine.venv / "package").exists() and (machine.venv / "installed").exists()
    machine.fails.unlink()
    calls = machine.log.read_text()
    assert machine.make("install", extra=extra).returncode == 0 and machine.log.read_text() != calls


def test_an_environment_that_somebody_else_made_is_kept(machine):
    machine.venv.mkdir()
    (machine.venv / "mine").touch()
    machine.killed.write_text("kill -9 $PPID")
    assert machine.make("install").returncode != 0
    machine.killed.unlink()
    machine.make("install")
    assert (machine.venv / "mine").exists()


def test_only_a_gpu_gets_the_lock(machine):
    assert machine.make("install").returncode == 0
    assert "--no-deps" not in machine.log.read_text() and "+cpu" in machine.log.read_text()
    assert machine.requirements.read_text().splitlines() == locked("cpu")
    machine.log.unlink()
    assert machine.make("install", extra=",gpu").returncode == 0
    lock, project = machine.log.read_text().splitlines()
    assert re.search(r"install --no-compile --no-deps -r /dev/fd/\d+ torch==[\d.]+,!=[\d.]+\+cpu$", lock)
    assert machine.requirements.read_text().splitlines() == locked("gpu")
    assert project.endswith("install --no-compile --no-deps -e .")
    assert machine.make("install", extra=",gpu").returncode == 0
    machine.outdate()
    assert machine.make("install", extra=None).returncode == 0  # nvidia-smi finds no GPU this time
    assert re.sub(r"fd/\d+", "", machine.log.read_text()) == re.sub(r"fd/\d+", "", f"{lock}\n{project}\n" * 2)


def test_the_newest_packages_are_installed_without_a_lock(machine):
    environment = {**os.environ, "PYTHON": str(machine.python), "VENV": str(machine.venv), "EXTRA": "newest"}
    subprocess.run(["bash", "scripts/install.sh"], cwd=ROOT, env=environment, check=True)
    [call] = machine.log.read_text().splitlines()
    assert call.endswith("install --no-compile --upgrade --upgrade-strategy eager -e .[dev]")
    assert (machine.venv / "installed").read_text() == "newest\n"


def locked(kind):
    lines = (ROOT / f"requirements-{kind}.lock").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def card(driver):
    return f"echo '0, GPU-1, Card, 24564, 24000, {driver}, 8.9'"


@pytest.mark.parametrize("driver", ["550.54.14", "570.211.01"])
def test_an_old_driver_stops_the_download_and_can_be_overridden(machine, driver):
    machine.nvidia_smi(card(driver))
    stopped = machine.make("install", None)
    errors = [line for line in stopped.stderr.splitlines() if line.startswith("error: ")]
    assert stopped.returncode == 2 and not machine.log.exists() and not machine.venv.exists()
    assert len(errors) == 1 and all(word in errors[0] for word in (driver, "580", "EXTRA=cuda12", "ANY_DRIVER=1"))
    assert machine.make("install", None, "ANY_DRIVER=1").returncode == 0
    assert machine.requirements.read_text().splitlines() == locked("gpu")


def test_cuda_12_runs_on_an_old_driver_and_is_kept(machine):
    machine.nvidia_smi(card("550.54.14"))
    assert machine.make("install", "cuda12").returncode == 0
    torch, project = machine.log.read_text().splitlines()
    assert re.search(r" torch==[\d.]+\+cu126$", torch) and project.endswith("-e .[dev]")
    names = [line.partition("==")[0] for line in machine.requirements.read_text().splitlines()]
    assert "torch" in names and not [name for name in names if name.startswith(("nvidia", "cuda"))]
    machine.outdate()
    assert machine.make("install", None).returncode == 0
    assert (machine.venv / "installed").read_text() == "cuda12\n"


@pytest.mark.parametrize(
    ("script", "extra", "notes"),
    [
        (card("580.65.06"), ",gpu", []),
        ('echo "couldn\'t communicate with the NVIDIA driver"; exit 9', "", ["couldn't communicate", "580"]),
        ("exit 127", "", ["nvidia-smi failed", "580"]),
    ],
)
def test_a_driver_that_fails_is_named_and_the_cpu_takes_its_place(machine, script, extra, notes):
    machine.nvidia_smi(script)
    done = machine.make("install", None)
    assert done.returncode == 0 and (machine.venv / "installed").read_text() == f"{extra}\n"
    found = [line for line in done.stderr.splitlines() if "NVIDIA" in line]
    assert len(found) == bool(notes) and all(note in line for note in notes for line in found)


def test_the_notebook_installs_the_lock_beside_its_kernel(machine, monkeypatch):
    shells = pytest.importorskip("IPython.core.interactiveshell")
    machine.nvidia_smi(card("580.65.06"))
    monkeypatch.setenv("PATH", f"{machine.tools}:{os.environ['PATH']}")
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "executable", str(machine.python))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # lora_grpo is not installed
    cells = json.loads((ROOT / "notebooks" / "first_run.ipynb").read_text())["cells"]
    install = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))
    assert shells.InteractiveShell().run_cell(install).success
    left_out = {*locked("gpu")} - {*machine.requirements.read_text().splitlines()}
    assert {line.partition("==")[0] for line in left_out} >= {"ipykernel", "ipython", "pyzmq", "tornado"}
    assert len(left_out) < 10 and "-m pip" in machine.log.read_text()
    machine.nvidia_smi(card("550.54.14"))
    assert not shells.InteractiveShell().run_cell(install).success
