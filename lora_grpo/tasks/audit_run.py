"""Attacks the `check` of a run's tasks, and reports texts that it wrongly accepts or rejects."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from lora_grpo.config import RunConfig
from lora_grpo.errors import RunError, UserError, first_line, suggestion
from lora_grpo.tasks.audit_attacks import (
    ATTACKS,
    CODE,
    EMPTY,
    GOLD,
    LEAK,
    LONG,
    MARKER,
    NAMES,
    REPEAT,
    Attack,
    leaked_rows,
    make_subjects,
)
from lora_grpo.tasks.loading import Data
from lora_grpo.tasks.registry import CODE_TASKS, Row, Task, get_task, is_task_file, task_title
from lora_grpo.tasks.task_file import TaskFile

QUICK: dict[str, Any] = {"gold_rows": 16, "attacked_rows": 4, "seconds_per_call": 3.0, "seconds": 5.0}
"""The limits of the audit before a run."""


@dataclass
class Findings:
    """The result of an audit."""

    problems: dict[str, str] = field(default_factory=dict)
    """The findings, by the name of the attack."""
    notes: list[str] = field(default_factory=list)
    size: str = ""
    """The numbers of attacks and rows."""


class Call(NamedTuple):
    """One completion to check."""

    attack: Attack
    row: Mapping[str, Any]
    text: str


class Outcome(NamedTuple):
    """The result of a call."""

    passed: bool
    score: float = 0.0
    error: str | None = None
    """The exception or another error. The call did not pass."""


def audit(config: RunConfig, data: Data, quick: bool = False) -> None:
    """Audit the tasks of a run and print the findings.

    Args:
        quick: take a few seconds, skip built-in tasks, and print warnings.

    Raises:
        UserError: `quick` is set and `check` rejects the file's own reference answer.
        RunError: `quick` is not set and there are findings that the task file does not ignore.
    """
    failed = []
    stream = sys.stderr if quick else sys.stdout
    for name in dict.fromkeys((config.data.task, config.data.evaluation_task)):
        title = task_title(name)
        if name in CODE_TASKS and not quick:
            print(f"audit of {title}: nothing to do; its rows are graded by unit tests")
        if name in CODE_TASKS or (quick and not is_task_file(name)) or getattr(get_task(name), "environment", None):
            continue
        rows = [row for row in (*data.train, *data.eval) if row["task"] == name]
        findings = find(name, rows, **(QUICK if quick else {}))
        if quick and GOLD.name in findings.problems:
            raise UserError(f"{name}: {findings.problems[GOLD.name]}; fix gold or check")
        for note in findings.notes:
            print(f"{'warning: audit' if quick else 'note'}: {note}", file=stream)
        for problem in findings.problems.values():
            print(f"{'warning: audit:' if quick else 'FOUND'} {problem}", file=stream)
        if findings.problems:
            failed.append(f"{title} ({', '.join(findings.problems)})")
        else:
            print(f"audit of {title}: passed; {findings.size}", file=stream)
    if failed and not quick:
        raise RunError(f"the audit found problems in {', '.join(failed)}; fix check, or see docs/your-task.md")
    if failed:
        print("warning: audit: a model may learn this instead of the task; see --audit", file=stream)


def find(
    name: str,
    rows: Sequence[Row],
    gold_rows: int = 500,
    attacked_rows: int = 16,
    seconds_per_call: float = 10.0,
    seconds: float = 1800.0,
) -> Findings:
    """Attack the checker of a task."""
    task, findings = get_task(name), Findings()
    ignored = task.audit_ignore if isinstance(task, TaskFile) else ()
    for wrong in set(ignored) - {*NAMES}:
        raise UserError(f"{name}: AUDIT_IGNORE has {wrong!r}; {suggestion(wrong, NAMES)}")
    has_gold = getattr(task, "has_gold", True)
    if not has_gold:
        findings.notes.append(f"{task_title(name)} defines no gold(row), so only texts without an answer are tried")
    num_rows, rows = len(rows), _spread(rows, gold_rows)
    golds = [task.gold(row) if has_gold else None for row in rows]
    if empty := sum(not gold.strip() for gold in golds if gold is not None):
        findings.problems[GOLD.name] = f"{GOLD.name}: it is empty for {empty} of {len(rows)} rows"
    subjects = make_subjects(rows, golds, _spread(range(len(rows)), attacked_rows))
    if LEAK not in ignored and (leaked := leaked_rows(subjects)):
        example = leaked[0].row["id"]
        findings.problems[LEAK] = f"{LEAK}: {len(leaked)} of {len(subjects)} rows, such as {example}"
    calls = [Call(GOLD, row, gold) for row, gold in zip(rows, golds, strict=True) if gold]
    for attack in ATTACKS:
        if attack.name not in ignored:
            for subject in subjects[:1] if attack is LONG else subjects:
                texts = attack.write(subject)
                calls += [Call(attack, subject.row, text) for text in texts if attack.passes or text != subject.gold]
    # The calls, then the same again in reverse order, except for the long texts, which are last and slow.
    again = [call for call in calls if call.attack is not LONG]
    outcomes = _run_calls(task, [*calls, *again[::-1]], seconds_per_call, time.monotonic() + seconds)
    repeats = zip(again[::-1], outcomes[: len(again)][::-1], outcomes[len(calls) :], strict=False)
    changed = [call for call, first, second in repeats if first.passed != second.passed]
    if changed and REPEAT not in ignored:
        findings.problems[REPEAT] = (
            f"{REPEAT}: another verdict for the same completion on {len(changed)} of {len(calls)} completions, such as "
            f"row {changed[0].row['id']}: {_shorten(changed[0].text)}; check must not depend on chance or on earlier "
            "calls"
        )
    results: dict[str, list[tuple[Call, Outcome]]] = {}
    for call, outcome in zip(calls, outcomes, strict=False):
        results.setdefault(call.attack.name, []).append((call, outcome))
    for attack_name, made in results.items():
        failed = [each for each in made if each[1].error]
        failed = failed or [(call, outcome) for call, outcome in made if outcome.passed != call.attack.passes]
        if failed:
            call, outcome = failed[0]
            count, most = (len({call.row["id"] for call, _ in some}) for some in (failed, made))
            result = outcome.error or ("accepted" if outcome.passed else "rejected")
            findings.problems[attack_name] = (
                f"{attack_name}: {result} on {count} of {most} rows, such as {call.row['id']}: {_shorten(call.text)}"
            )
    score = max((outcome.score for _, outcome in results.get(EMPTY.name, ()) if not outcome.passed), default=0.0)
    if score > 0:
        findings.notes.append(f"{EMPTY.name}: gets a score of up to {score:g}, which a model is rewarded for")
    if len(outcomes) < len(calls):
        findings.notes.append(f"{len(calls) - len(outcomes)} of {len(calls)} completions were not checked")
    findings.size = f"{len(results.keys() - {GOLD.name})} attacks on {len(subjects)} of {num_rows} rows"
    return findings


def _spread(rows: Sequence, number: int) -> list:
    """Return at most `number` rows, evenly spaced."""
    return [rows[index * len(rows) // number] for index in range(number)] if len(rows) > number else list(rows)


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= 160 else f"{text[:160]!r}... ({len(text):,} characters)"


def _run_calls(task: Task, calls: Sequence[Call], seconds: float, deadline: float) -> list[Outcome]:
    """Check the completions in order, in a child process that is killed at the first call that takes too long.

    Args:
        deadline: value of `time.monotonic` at which to stop.

    Returns:
        The outcomes of the calls that were made.
    """
    outcomes: list[Outcome] = []
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(task, calls, writer), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if there are threads
        child.start()
    writer.close()
    try:
        while len(outcomes) < len(calls):
            left = deadline - time.monotonic()
            if not reader.poll(max(0, min(seconds, left))):
                if seconds < left:  # otherwise the deadline ended the call, which may not be slow
                    outcomes.append(Outcome(False, error=f"check took more than {seconds:g} s"))
                break
            outcomes.append(reader.recv())
    except EOFError:
        outcomes.append(Outcome(False, error="check ended the process"))
    finally:
        child.kill()
        child.join()
        reader.close()
    return outcomes


def _serve(task: Task, calls: Sequence[Call], writer: Connection) -> None:
    """Check the completions in the child process, and discard the output of the checker."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(null, number)
    for attack, row, text in calls:
        passed, score, error = False, 0.0, None
        try:
            verdict = task.check(text, row)
            passed, score = verdict.passed, verdict.value
        except Exception as failure:  # noqa: BLE001 - an exception is a finding
            error = first_line(failure).split("; row ")[0]
        if attack is CODE:
            passed, error = MARKER.exists(), None
            MARKER.unlink(missing_ok=True)
        writer.send(Outcome(passed, score, error))
