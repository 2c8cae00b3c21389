"""A command with a time limit: its GPU memory, and no process left behind."""

import sys
import time
from pathlib import Path

from lora_grpo.gpu_check.measure import run_measured


def python(code):
    return [sys.executable, "-c", code]


def test_at_the_time_limit_the_command_and_its_children_are_killed(tmp_path):
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    started = time.monotonic()
    ended = run_measured(python(code), tmp_path / "log", 1.0)
    assert ended.exit_code is None and 1 <= time.monotonic() - started < 10
    child = Path("/proc") / ended.message / "stat"
    deadline = time.monotonic() + 10  # a killed process ends when it is next scheduled
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_gpu_peak_is_the_increase_over_the_memory_in_use_at_the_start(machine, tmp_path):
    level = tmp_path / "free"
    level.write_text("6144")
    machine(script=f'read free < {level}; echo "0, GPU-1, Card, 8192, $free"')
    code = f"import time; from pathlib import Path; level = Path({str(level)!r})\n"
    code += "level.write_text('1024'); time.sleep(1.5); level.write_text('5120'); time.sleep(0.5)"
    assert run_measured(python(code), tmp_path / "log", 60).gpu_peak_gib == 5
