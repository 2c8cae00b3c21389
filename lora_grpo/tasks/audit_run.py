"""Selects rows, runs the attacks, and reports what passed although it must not, and the reverse."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_grpo.config import RunConfig
from lora_grpo.errors import RunError, UserError, suggestion
from lora_grpo.tasks.audit_attacks import (
    ATTACKS,
    CODE,
    EMPTY,
    GOLD,
    LEAK,
    LONG,
    NAMES,
    REPEAT,
    Subject,
    leaked_rows,
    make_subjects,
)
from lora_grpo.tasks.audit_child import Call, Outcome, run_calls
from lora_grpo.tasks.loading import Data
from lora_grpo.tasks.registry import CODE_TASKS, Row, get_task, grade_all, is_task_file, task_title
from lora_grpo.tasks.task_file import TaskFile

_SLOW = 0.05
"""Mean seconds of a call from which `check` is reported as slow."""
_REPEATS = 20
_CHARACTERS = 160


@dataclass(frozen=True)
class Size:
    """How much an audit does."""

    gold_rows: int = 500
    attacked_rows: int = 16
    long_rows: int = 1
    seconds_per_call: float = 10.0
    seconds: float = 1800.0


FULL = Size()
QUICK = Size(gold_rows=16, attacked_rows=4, seconds_per_call=3.0, seconds=5.0)


@dataclass
class Findings:
    """The result of an audit."""

    problems: dict[str, str] = field(default_factory=dict)
    """What is wrong, by the name of the attack."""
    notes: list[str] = field(default_factory=list)
    timing: list[str] = field(default_factory=list)
    """What a slow `check` means for the audit and for training."""
    attacks: int = 0
    rows: int = 0


def audit(config: RunConfig, data: Data) -> None:
    """Audit the tasks of a run and print the findings.

    Raises:
        RunError: there are findings that the task file does not ignore.
    """
    failed = []
    for name, rows in _tasks(config, data):
        findings = find(name, rows, FULL)
        for note in (*findings.notes, *findings.timing):
            print(f"note: {note}")
        for problem in findings.problems.values():
            print(f"FOUND {problem}")
        title = task_title(name)
        if findings.problems:
            failed.append(f"{title} ({', '.join(findings.problems)})")
        else:
            print(f"audit of {title}: passed; {findings.attacks} attacks on {findings.rows} of {len(rows)} rows")
    if failed:
        raise RunError(f"the audit found problems in {', '.join(failed)}; fix check, or see docs/your-task.md")


def quick_audit(config: RunConfig, data: Data) -> None:
    """Audit the task files of a run in a few seconds and print warnings.

    Raises:
        UserError: `check` rejects the file's own gold.
    """
    for name, rows in _tasks(config, data):
        if not is_task_file(name):
            continue
        findings = find(name, rows, QUICK)
        if GOLD.name in findings.problems:
            raise UserError(f"{name}: {findings.problems[GOLD.name]}; fix gold or check")
        for problem in (*findings.problems.values(), *findings.timing):
            print(f"warning: audit: {problem}", file=sys.stderr)
        if findings.problems:
            print(f"warning: audit: a model may learn this instead of {task_title(name)}; see --audit", file=sys.stderr)
        else:
            print(f"audit: {findings.attacks} attacks on {findings.rows} rows found no problem", file=sys.stderr)


def _tasks(config: RunConfig, data: Data) -> list[tuple[str, list[Row]]]:
    names = dict.fromkeys((config.data.task, config.data.evaluation_task))
    return [(name, [row for row in (*data.train, *data.eval) if row["task"] == name]) for name in names]


def find(name: str, rows: Sequence[Row], size: Size) -> Findings:
    """Attack the checker of a task."""
    task, programs, findings = get_task(name), name in CODE_TASKS, Findings()
    ignored = _ignored(task) if isinstance(task, TaskFile) else ()
    has_gold = not isinstance(task, TaskFile) or task.has_gold
    rows = _spread(rows, size.gold_rows)
    golds = [task.gold(row) if has_gold else row["answer"] or None for row in rows]
    chosen = _spread(range(len(rows)), size.attacked_rows)
    attacks = [each for each in ATTACKS if each.name not in ignored]
    if programs:  # they run in the sandbox, which has its own time limit
        attacks = [each for each in attacks if not each.in_thread and each is not CODE]
    if not has_gold:
        findings.notes.append(f"{task_title(name)} defines no gold(row), so only texts without an answer are tried")
        attacks = [each for each in attacks if each.expected is False]
    with tempfile.TemporaryDirectory() as folder:
        marker = str(Path(folder) / "ran")
        subjects = make_subjects(rows, golds, chosen, marker, programs=programs)
        if not has_gold:  # the column `answer` need not be a completion
            subjects = [Subject(each.row, None, None, each.others, marker=marker) for each in subjects]
        calls = [Call(GOLD, row, gold, marker) for row, gold in zip(rows, golds, strict=True) if has_gold and gold]
        for attack in attacks:
            for subject in subjects[: size.long_rows] if attack is LONG else subjects:
                calls += [Call(attack, subject.row, text, marker) for text in attack.write(subject)]
        if programs:
            verdicts = grade_all(name, [call.text for call in calls], [call.row for call in calls])
            outcomes: list[Outcome | None] = [Outcome(verdict.passed, 0.0) for verdict in verdicts]
        else:
            deadline = time.monotonic() + size.seconds
            again = [index for index, call in enumerate(calls) if call.attack is not LONG][::-1]
            ordered = [*calls, *(calls[index] for index in again)]
            both = run_calls(task, ordered, size.seconds_per_call, deadline)
            outcomes = both[: len(calls)]
            pairs = list(zip(again, both[len(calls) :], strict=True))
            if REPEAT not in ignored:
                changed = [index for index, second in pairs if _differ(outcomes[index], second)]
                _report_changed(findings, calls, changed)
    made = {call.attack.name for call, outcome in zip(calls, outcomes, strict=True) if outcome}
    findings.attacks, findings.rows = len(made - {GOLD.name}), len(subjects)
    _report_outcomes(findings, calls, outcomes)
    empty = sum(not (gold or "").strip() for gold in golds) if has_gold else 0
    if empty:
        findings.problems.setdefault(GOLD.name, f"{GOLD.name}: it is empty for {empty} of {len(rows)} rows")
    leaked = [] if LEAK in ignored else leaked_rows(subjects)
    if leaked:
        row = leaked[0].row
        findings.problems[LEAK] = f"{LEAK}: {len(leaked)} of {len(subjects)} rows, such as {row['id']}"
    timed = [outcome.seconds for outcome in outcomes if outcome]
    if timed and (mean := sum(timed) / len(timed)) > _SLOW:
        findings.timing.append(f"check is slow: {mean:.2f} s per completion on average, {max(timed):.2f} s at most")
    return findings


def _ignored(task: TaskFile) -> tuple[str, ...]:
    for name in task.audit_ignore:
        if name not in NAMES:
            raise UserError(f"{task.path}: AUDIT_IGNORE has {name!r}; {suggestion(name, NAMES)}")
    return task.audit_ignore


def _report_outcomes(findings: Findings, calls: Sequence[Call], outcomes: Sequence[Outcome | None]) -> None:
    grouped: dict[str, list[tuple[Call, Outcome]]] = defaultdict(list)
    for call, outcome in zip(calls, outcomes, strict=True):
        if outcome:
            grouped[call.attack.name].append((call, outcome))
    skipped = sum(outcome is None for outcome in outcomes)
    if skipped:
        findings.timing.append(f"{skipped} of {len(calls)} completions were not checked for lack of time")
    for name, results in grouped.items():
        expected = results[0][0].attack.expected
        num_rows = len({call.row["id"] for call, _ in results})
        failed = [each for each in results if each[1].error] or [
            each for each in results if each[1].passed != (expected or False)
        ]
        scores = [outcome.score for call, outcome in results if call.attack is EMPTY and not outcome.passed]
        if max(scores, default=0.0) > 0:
            findings.notes.append(f"{name}: gets a score of up to {max(scores):g}, which a model is rewarded for")
        if not failed:
            continue
        call, outcome = failed[0]
        where = f"{len({call.row['id'] for call, _ in failed})} of {num_rows} rows, such as {call.row['id']}"
        result = outcome.error or ("accepted" if outcome.passed else "rejected")
        line = f"{name}: {result} on {where}: {_shorten(call.text)}"
        if expected is None and not outcome.error:
            findings.notes.append(line)
        else:
            findings.problems[name] = line


def _report_changed(findings: Findings, calls: Sequence[Call], changed: Sequence[int]) -> None:
    if changed:
        call = calls[changed[0]]
        findings.problems[REPEAT] = (
            f"{REPEAT}: another verdict for the same completion on {len(changed)} of {len(calls)} completions, such as "
            f"row {call.row['id']}: {_shorten(call.text)}; check must not depend on chance or on earlier calls"
        )


def _differ(first: Outcome | None, second: Outcome | None) -> bool:
    return first is not None and second is not None and first.passed != second.passed


def _spread(rows: Sequence, number: int) -> list:
    """Return at most `number` rows, evenly spaced."""
    return [rows[index * len(rows) // number] for index in range(number)] if len(rows) > number else list(rows)


def _shorten(text: str) -> str:
    shown = repr(text[:_CHARACTERS])
    return shown if len(text) <= _CHARACTERS else f"{shown}... ({len(text):,} characters)"
