"""`make install` with a stand-in for pip: only a killed installation starts again, and a GPU gets the lock."""

import functools
import re
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
# Stands for a Python of the system: its venv contains only a stand-in for pip.
case "$*" in
*"-m venv"*) for folder; do :; done; case "$*" in *--clear*) rm -rf "$folder"/*;; esac
    mkdir -p "$folder/bin"; ln -sf PIP "$folder/bin/python";;
esac
"""

PIP = """#!/bin/sh
# Installs one file a call. With a file `killed` beside it, kills the installation as soon as half a file is there;
# with a file `fails`, prints that file and fails.
folder=$(dirname "$(dirname "$0")")
echo "$*" >> LOG
if [ -e KILLED ]; then echo half > "$folder/package"; . KILLED; exit 1; fi
if [ -e FAILS ]; then cat FAILS >&2; exit 1; fi
[ ! -e "$folder/package" ] || [ "$(cat "$folder/package")" = whole ] || exit 0  # pip skips what it finds
echo whole > "$folder/package"
"""


class Machine:
    def __init__(self, folder):
        self.venv, self.log = folder / "venv", folder / "log"
        self.killed, self.fails = folder / "killed", folder / "fails"
        for name, text in (("python", PYTHON), ("pip", PIP)):
            for word in ("pip", "log", "killed", "fails"):
                text = text.replace(word.upper(), str(folder / word))
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.python = folder / "python"

    def make(self, target, extra=""):
        command = ["make", target, f"PYTHON={self.python}", f"VENV={self.venv}"]
        command += [] if extra is None else [f"EXTRA={extra}"]
        # A background job of a script ignores SIGINT, and so would make.
        default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        options = {"capture_output": True, "text": True, "start_new_session": True, "preexec_fn": default}
        return subprocess.run(command, cwd=ROOT, check=False, **options)

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
    assert "requirements-gpu.lock" not in machine.log.read_text() and "+cpu" in machine.log.read_text()
    machine.log.unlink()
    assert machine.make("install", extra=",gpu").returncode == 0
    lock, project = machine.log.read_text().splitlines()
    assert re.search(r"install --no-compile --no-deps -r requirements-gpu\.lock torch==[\d.]+,!=[\d.]+\+cpu$", lock)
    assert project.endswith("install --no-compile --no-deps -e .")
    assert machine.make("install", extra=",gpu").returncode == 0
    machine.outdate()
    assert machine.make("install", extra=None).returncode == 0  # nvidia-smi finds no GPU this time
    assert machine.log.read_text().splitlines() == 2 * [lock, project]
