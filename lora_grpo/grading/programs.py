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


def check(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade one completion. For several, `check_many` is faster."""
    return check_many([completion], [row])[0]


def check_many(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Grade B completions against the tests of their B rows in one call to the sandbox."""
    programs = [
        extract_program(completion, row["entry_point"], row.get("completion_prefix") or "")
        for completion, row in zip(completions, rows, strict=True)
    ]
    return [
        Verdict(
            verdict.passed,
            verdict.status,
            program,
            detail=verdict.message or None,
            tests=(verdict.passed_tests, verdict.num_tests),
        )
        if verdict
        else Verdict(False, _why_no_program(completion), tests=(0, 0))
        for completion, program, verdict in zip(completions, programs, run_sources(programs, rows), strict=True)
    ]


def _why_no_program(completion: str) -> str:
    return thoughts.UNFINISHED if thoughts.answer_of(completion) is None else "no_code"


def run_sources(
    programs: Sequence[str | None], rows: Sequence[Mapping[str, Any]], *, reference: bool = False
) -> list[sandbox.Verdict | None]:
    """Run B programs against the tests of their B rows. Each distinct program runs once; None is skipped.

    The programs are the rows' own if `reference` is set.
    """
    jobs = [
        sandbox.Program(
            source,
            row["test"],
            functions=tuple(row.get("functions") or [row["entry_point"]]),
            prelude=row.get("prelude") or "",
            reference=reference,
            seconds=row.get("seconds") or 0.0,
            name=str(row.get("id", "a program")),
        )
        if source is not None
        else None
        for source, row in zip(programs, rows, strict=True)
    ]
    distinct = list(dict.fromkeys(job for job in jobs if job is not None))
    verdicts = dict(zip(distinct, sandbox.run(distinct), strict=True)) if distinct else {}
    return [verdicts[job] if job else None for job in jobs]


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
    failed = {
        row["id"]: verdict.message
        for row, verdict in zip(rows, run_references(rows), strict=True)
        if verdict and verdict.status not in ("passed", "timeout")
    }
    if failed:
        shown = ", ".join(f"{name} ({message})" for name, message in failed.items())
        console.note(f"dropped {len(failed)} rows whose reference program fails its tests: {shown}")
    return [row for row in rows if row["id"] not in failed]


def gold(row: Mapping[str, Any]) -> str:
    """Return the row's reference program in a fenced block, in the format of its `prompt_style`."""
    program = write_completion("", row["answer"].strip("\n"), "code")
    style = row.get("prompt_style") or "code"
    return program if style == "code" else write_completion("The function is below.", program, style)
