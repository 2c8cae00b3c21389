"""Grade completions of code tasks: extract each program and run it against the tests of its row in the sandbox.

In addition to the common columns, rows of code tasks have:

- `entry_point`: the name of the function to write;
- `test`: Python code that asserts its results;
- `prelude`: trusted Python code that runs before `test`, such as imports; may be empty;
- `functions`: any names besides `entry_point` that the candidate defines for the tests;
- `completion_prefix`: the start of the program, if the task is to complete it;
- `seconds`: a time limit, if it is more than `--sandbox.timeout-seconds`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo import console, sandbox
from lora_grpo.errors import UserError
from lora_grpo.grading.code_extraction import extract_program
from lora_grpo.grading.verdict import Row, Verdict
from lora_grpo.prompts import thoughts, write_completion

GRADING = "the last code block, or a file's completion as it is, against the unit tests in the sandbox"
"""How programs are graded, in one phrase."""


def check(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade one completion. For several, `check_many` is faster."""
    return check_many([completion], [row])[0]


def check_many(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Grade B completions against the tests of their B rows in one call to the sandbox."""
    programs = [
        extract_program(completion, row["entry_point"], row.get("completion_prefix") or "")
        for completion, row in zip(completions, rows, strict=True)
    ]
    results = run_sources(programs, rows)
    return [
        _verdict(completion, program, result)
        for completion, program, result in zip(completions, programs, results, strict=True)
    ]


def _verdict(completion: str, program: str | None, result: sandbox.Verdict | None) -> Verdict:
    """Return the grade of a completion with its program and the sandbox's result, which are None if it has no code."""
    if result is None:
        is_unfinished = thoughts.answer_of(completion) is None
        reason = thoughts.UNFINISHED if is_unfinished else "no_code"
        return Verdict(False, reason, tests=(0, 0))
    return Verdict(
        result.passed,
        result.status,
        program,
        detail=result.message or None,
        tests=(result.passed_tests, result.num_tests),
    )


def run_sources(
    programs: Sequence[str | None], rows: Sequence[Mapping[str, Any]], *, reference: bool = False
) -> list[sandbox.Verdict | None]:
    """Run B programs against the tests of their B rows. Each distinct program runs once; None is skipped.

    The programs are the rows' own if `reference` is set.
    """
    jobs: list[sandbox.Program | None] = []
    for source, row in zip(programs, rows, strict=True):
        jobs.append(None if source is None else _job(source, row, reference))
    distinct_jobs = list(dict.fromkeys(job for job in jobs if job is not None))
    if not distinct_jobs:
        return [None] * len(jobs)
    verdict_of = dict(zip(distinct_jobs, sandbox.run(distinct_jobs), strict=True))
    return [None if job is None else verdict_of[job] for job in jobs]


def _job(source: str, row: Mapping[str, Any], reference: bool) -> sandbox.Program:
    return sandbox.Program(
        source,
        row["test"],
        functions=tuple(row.get("functions") or [row["entry_point"]]),
        prelude=row.get("prelude") or "",
        reference=reference,
        seconds=row.get("seconds") or 0.0,
        name=str(row.get("id", "a program")),
    )


def run_references(rows: Sequence[Mapping[str, Any]]) -> list[sandbox.Verdict | None]:
    """Run the rows' reference programs. Raise UserError if the tests of a row cannot run with its own program."""
    try:
        return run_sources([row["answer"] for row in rows], rows, reference=True)
    except sandbox.BrokenTest as error:
        raise UserError(f"{error}; fix the row or remove it") from None


def solvable(rows: Sequence[Row]) -> list[Row]:
    """Drop rows with a reference program that fails the tests, and print their ids.

    Rows that only time out are kept, because the time depends on the machine.
    """
    failures: dict[str, str] = {}
    for row, verdict in zip(rows, run_references(rows), strict=True):
        if verdict and verdict.status not in ("passed", "timeout"):
            failures[row["id"]] = verdict.message
    if failures:
        shown = ", ".join(f"{name} ({message})" for name, message in failures.items())
        console.note(f"dropped {len(failures)} rows whose reference program fails its tests: {shown}")
    return [row for row in rows if row["id"] not in failures]


def gold(row: Mapping[str, Any]) -> str:
    """Return the row's reference program in a fenced block, in the format of its `prompt_style`."""
    program = write_completion("", row["answer"].strip("\n"), "code")
    style = row.get("prompt_style") or "code"
    if style == "code":
        return program
    return write_completion("The function is below.", program, style)
