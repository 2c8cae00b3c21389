"""Grades code tasks: the program in a completion runs against its row's tests, in the sandbox."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.tasks.chat import write_completion
from lora_grpo.tasks.code_extraction import extract_program
from lora_grpo.tasks.registry import CODE_TASKS, Row, Verdict

NO_CODE = "no_code"
"""The reason of a completion that holds no program; every other reason is the sandbox's status."""

_FUTURE = re.compile(r"^from __future__ import .*\n", re.M)
"""Python allows it on the first lines alone, which are the prompt's."""


class Outcome(NamedTuple):
    """One completion's program, and what became of it."""

    program: str | None
    """None where the completion holds no code."""
    verdict: sandbox.Verdict | None
    """None where nothing ran."""


def grade(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade one completion; `grade_many` is faster for several."""
    return grade_many([completion], [row])[0]


def grade_many(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Grade completions by their rows' tests, all in one call of the sandbox.

    Args:
        completions: B texts.
        rows: B rows of a code task.

    Returns:
        B verdicts; `reason` is the sandbox's status or `no_code`, `extracted` the program that ran.

    Raises:
        UserError: a row has no tests.
        RunError: a row's tests cannot run whatever the candidate, or the sandbox cannot start.
    """
    verdicts = []
    for program, verdict in run_tests(completions, rows):
        if verdict is None:
            verdicts.append(Verdict(False, NO_CODE))
        else:
            verdicts.append(Verdict(verdict.passed, verdict.status, program, detail=verdict.message or None))
    return verdicts


def run_tests(
    completions: Sequence[str], rows: Sequence[Mapping[str, Any]], *, count_tests: bool = False
) -> list[Outcome]:
    """Run each completion's program against its row's tests.

    Args:
        completions: B texts.
        rows: B rows with `id`, `entry_point`, `test`, `prelude`, and `completion_prefix` where a prompt begins the
            program.
        count_tests: go on after a test that fails, and count those that hold.

    Raises:
        UserError, RunError: see `grade_many`.
    """
    sources = [_program_of(completion, _tested(row)) for completion, row in zip(completions, rows, strict=True)]
    return run_sources(sources, rows, count_tests=count_tests)


def run_sources(
    sources: Sequence[str | None], rows: Sequence[Mapping[str, Any]], *, count_tests: bool = False
) -> list[Outcome]:
    """Run programs as they stand, None where there is none; what occurs twice runs once. Else as `run_tests`."""
    programs = [
        None if source is None else _program(source, row, count_tests)
        for source, row in zip(sources, rows, strict=True)
    ]
    different = list(dict.fromkeys(program for program in programs if program is not None))
    verdicts = dict(zip(different, sandbox.run(different), strict=True)) if different else {}
    return [Outcome(program.source, verdicts[program]) if program else Outcome(None, None) for program in programs]


def check_tests(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse rows whose tests could not decide about any program, before there is one.

    Raises:
        UserError: tests are missing, are not Python, assert nothing, or use a name that nobody defines.
    """
    for row in rows:
        try:
            sandbox.prepare(_program("", row))
        except sandbox.BrokenTest as error:
            raise UserError(f"{error}; mend the row or leave it out") from None


def solvable(rows: Sequence[Row]) -> list[Row]:
    """Leave out rows whose own program fails their tests, and name them; they could teach nothing.

    One that only takes too long stays: on another day, or another machine, it may not.
    """
    check_tests(rows)
    outcomes = run_sources([row["answer"] for row in rows], rows)
    wrong = [
        (row["id"], outcome.verdict)
        for row, outcome in zip(rows, outcomes, strict=True)
        if outcome.verdict and outcome.verdict.status not in ("passed", "timeout")
    ]
    if wrong:
        named = ", ".join(f"{name} ({verdict.message})" for name, verdict in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        print(f"left {len(wrong)} rows out, whose own program fails its tests: {named}{more}", file=sys.stderr)
    unsolvable = {name for name, _ in wrong}
    return [row for row in rows if row["id"] not in unsolvable]


def gold_completion(row: Mapping[str, Any]) -> str:
    """Return the row's own program in a fenced block, within the tags of its `prompt_style`."""
    program = write_completion("", row["answer"].strip("\n"), "code")
    style = row.get("prompt_style") or "code"
    return program if style == "code" else write_completion("The function is below.", program, style)


def _program_of(completion: str, row: Mapping[str, Any]) -> str | None:
    """Return the program that a completion means, after its prompt where it has one.

    HumanEval's own harness puts the prompt before whatever it is given. Here too, so that it runs what is run here.
    """
    prefix = row.get("completion_prefix") or ""
    program = extract_program(completion, row["entry_point"], prefix)
    if program is None or program.startswith(prefix):
        return program
    return f"{prefix}\n{_FUTURE.sub('', program)}"


def _program(source: str, row: Mapping[str, Any], count_tests: bool = False) -> sandbox.Program:
    return sandbox.Program(
        source,
        _tested(row)["test"],
        functions=tuple(row.get("functions") or [row["entry_point"]]),
        prelude=row.get("prelude") or "",
        count_tests=count_tests,
        name=str(row.get("id", "a program")),
    )


def _tested(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row if it has tests, else refuse it."""
    if not row.get("entry_point") or not row.get("test"):
        raise UserError(
            f"row {row.get('id', '?')} has no unit tests ('entry_point' and 'test'); "
            f"expected a row of a code task: {', '.join(CODE_TASKS)}"
        )
    return row
