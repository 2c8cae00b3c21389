"""What makes a command start and end sooner."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


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


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with PyTorch's CUDA builds only")
def test_a_command_that_loads_triton_ends_quietly():
    script = (
        "import sys\n"
        "from lora_grpo.cli.main import run_command\n"
        "sys.exit(run_command(lambda: __import__('triton._C.libtriton')))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
