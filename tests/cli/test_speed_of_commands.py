"""What makes a command start and end sooner."""

import os
import subprocess
import sys

import pytest

from lora_grpo.cli import limit_spinning

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def test_a_command_does_not_look_for_garbage_when_it_exits():
    code = (
        "import atexit, gc, sys; from lora_grpo.cli import run_command\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"  # runs after those of the command
        "sys.exit(run_command(lambda: None))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("of_user", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_spin_a_little_unless_the_user_decides(of_user, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(of_user))
    limit_spinning()
    assert os.environ == expected


@pytest.mark.parametrize(
    "command",
    [
        ["recipes/gsm8k_lora.py", "--preset", "starter", "--train.max-steps", "1", "--output-dir", "{out}/run"],
        ["scripts/evaluate.py", "starter", "--task", "starter", "--limit", "2", "--output-dir", "{out}/evaluation"],
    ],
    ids=["train", "evaluate"],
)
def test_a_command_limits_spinning_before_it_imports_torch(command, tmp_path):
    code = (
        "import os, runpy, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': print(os.environ.get('GOMP_SPINCOUNT')); sys.stdout.flush(); os._exit(0)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [part.format(out=tmp_path) for part in command]
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["1000"]), done.stderr
