"""`make install` with a stand-in for pip: an interrupted installation starts again, and a GPU gets the lock."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
# Stands for a Python of the system: its venv contains only a stand-in for pip.
case "$*" in
*"-m venv"*) for folder; do :; done; mkdir -p "$folder/bin"; ln -sf PIP "$folder/bin/python";;
esac
"""

PIP = """#!/bin/sh
# Installs one file a call. With a file `killed` beside it, kills the installation as soon as half a file is there.
folder=$(dirname "$(dirname "$0")")
echo "$*" >> LOG
if [ -e KILLED ]; then echo half > "$folder/package"; kill -9 $PPID; exit 1; fi
[ ! -e "$folder/package" ] || [ "$(cat "$folder/package")" = whole ] || exit 0  # pip skips what it finds
echo whole > "$folder/package"
"""


class Machine:
    def __init__(self, folder):
        self.venv, self.log, self.killed = folder / "venv", folder / "log", folder / "killed"
        for name, text in (("python", PYTHON), ("pip", PIP)):
            for word, path in (("PIP", folder / "pip"), ("LOG", self.log), ("KILLED", self.killed)):
                text = text.replace(word, str(path))
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.python = folder / "python"

    def make(self, *targets, extra=""):
        command = ["make", *targets, f"PYTHON={self.python}", f"VENV={self.venv}", f"EXTRA={extra}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("installed", [False, True])
def test_an_installation_that_was_killed_starts_again(machine, installed):
    if installed:  # an update
        assert machine.make("install").returncode == 0
        subprocess.run(["touch", "-d", "2000-01-01", machine.venv / "installed"], check=True)
    machine.killed.touch()
    assert machine.make("install").returncode != 0
    assert not (machine.venv / "installed").exists()
    machine.killed.unlink()
    done = machine.make("install")
    assert done.returncode == 0, done.stderr
    assert "the last installation" in done.stderr and (machine.venv / "package").read_text() == "whole\n"
    assert (machine.venv / "installed").exists() and not (machine.venv / "installing").exists()
    calls = machine.log.read_text()
    assert machine.make("install").returncode == 0 and machine.log.read_text() == calls  # nothing left to do


def test_an_environment_that_somebody_else_made_is_kept(machine):
    machine.venv.mkdir()
    (machine.venv / "mine").touch()
    assert machine.make("install").returncode == 0
    assert (machine.venv / "mine").exists()


def test_only_a_gpu_gets_the_lock(machine):
    assert machine.make("install").returncode == 0
    assert "requirements-gpu.lock" not in machine.log.read_text() and "+cpu" in machine.log.read_text()
    machine.log.unlink()
    assert machine.make("install", "-B", extra=",gpu").returncode == 0
    lock, project = machine.log.read_text().splitlines()
    assert re.search(r"install --no-compile --no-deps -r requirements-gpu\.lock torch==[\d.]+,!=[\d.]+\+cpu$", lock)
    assert project.endswith("install --no-compile --no-deps -e .")
