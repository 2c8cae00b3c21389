"""Selects rows, runs the attacks, and reports what passed although it must not, and the reverse."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Size:
    """The limits of an audit."""

    gold_rows: int = 500
    attacked_rows: int = 16
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
        findings, title = find(name, rows, FULL), task_title(name)
        for note in (*findings.notes, *findings.timing):
            print(f"note: {note}")
        for problem in findings.problems.values():
            print(f"FOUND {problem}")
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


def find(name: str, rows: Sequence[Row], size: Size) -> Findings:
    """Attack the checker of a task."""
    task, programs, findings = get_task(name), name in CODE_TASKS, Findings()
    ignored = _ignored(task) if isinstance(task, TaskFile) else ()
    has_gold = not isinstance(task, TaskFile) or task.has_gold
    attacks = [each for each in ATTACKS if each.name not in ignored]
    if programs:  # they run in the sandbox, which has its own time limit
        attacks = [each for each in attacks if not each.in_thread and each is not CODE]
    if not has_gold:
        findings.notes.append(f"{task_title(name)} defines no gold(row), so only texts without an answer are tried")
        attacks = [each for each in attacks if each.expected is False]
    rows = _spread(rows, size.gold_rows)
    golds = [task.gold(row) if has_gold else row["answer"] or None for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        marker = str(Path(folder) / "ran")
        subjects = make_subjects(rows, golds, _spread(range(len(rows)), size.attacked_rows), marker, programs=programs)
        if not has_gold:  # the column `answer` need not be a completion
            subjects = [Subject(each.row, None, None, each.others, marker=marker) for each in subjects]
        calls = [Call(GOLD, row, gold, marker) for row, gold in zip(rows, golds, strict=True) if has_gold and gold]
        for attack in attacks:
            for subject in subjects[:1] if attack is LONG else subjects:
                texts = [text for text in attack.write(subject) if attack.expected or text != subject.gold]
                calls += [Call(attack, subject.row, text, marker) for text in texts]
        if programs:
            verdicts = grade_all(name, [call.text for call in calls], [call.row for call in calls])
            made = [(call, Outcome(verdict.passed, 0.0)) for call, verdict in zip(calls, verdicts, strict=True)]
        else:
            # The calls, then the same again in reverse order, except for the long texts, which are last and slow.
            again = [call for call in calls if call.attack is not LONG]
            deadline = time.monotonic() + size.seconds
            outcomes = run_calls(task, [*calls, *again[::-1]], size.seconds_per_call, deadline)
            made = [(call, outcome) for call, outcome in zip(calls, outcomes, strict=False) if outcome]
            if skipped := len(calls) - len(made):
                findings.timing.append(f"{skipped} of {len(calls)} completions were not checked for lack of time")
            pairs = zip(again, outcomes, outcomes[: len(calls) - 1 : -1], strict=False)
            changed = [call for call, first, second in pairs if first and second and first.passed != second.passed]
            if changed and REPEAT not in ignored:
                findings.problems[REPEAT] = (
                    f"{REPEAT}: another verdict for the same completion on {len(changed)} of {len(calls)} completions, "
                    f"such as row {changed[0].row['id']}: {_shorten(changed[0].text)}; check must not depend on chance "
                    "or on earlier calls"
                )
    findings.attacks, findings.rows = len({call.attack.name for call, _ in made} - {GOLD.name}), len(subjects)
    for name in dict.fromkeys(call.attack.name for call, _ in made):
        _report(findings, [each for each in made if each[0].attack.name == name])
    empty = sum(not (gold or "").strip() for gold in golds) if has_gold else 0
    if empty:
        findings.problems.setdefault(GOLD.name, f"{GOLD.name}: it is empty for {empty} of {len(rows)} rows")
    if leaked := [] if LEAK in ignored else leaked_rows(subjects):
        row = leaked[0].row
        findings.problems[LEAK] = f"{LEAK}: {len(leaked)} of {len(subjects)} rows, such as {row['id']}"
    seconds = [outcome.seconds for _, outcome in made]
    if seconds and (mean := sum(seconds) / len(seconds)) > _SLOW:
        findings.timing.append(f"check is slow: {mean:.2f} s per completion on average, {max(seconds):.2f} s at most")
    return findings


def _tasks(config: RunConfig, data: Data) -> Iterator[tuple[str, list[Row]]]:
    for name in dict.fromkeys((config.data.task, config.data.evaluation_task)):
        yield name, [row for row in (*data.train, *data.eval) if row["task"] == name]


def _ignored(task: TaskFile) -> tuple[str, ...]:
    for name in task.audit_ignore:
        if name not in NAMES:
            raise UserError(f"{task.path}: AUDIT_IGNORE has {name!r}; {suggestion(name, NAMES)}")
    return task.audit_ignore


def _report(findings: Findings, results: Sequence[tuple[Call, Outcome]]) -> None:
    """Add the results of one attack to the findings."""
    attack = results[0][0].attack
    failed = [each for each in results if each[1].error]
    failed = failed or [each for each in results if each[1].passed != bool(attack.expected)]
    score = max(0.0 if outcome.passed else outcome.score for _, outcome in results)
    if attack is EMPTY and score > 0:
        findings.notes.append(f"{attack.name}: gets a score of up to {score:g}, which a model is rewarded for")
    if not failed:
        return
    call, outcome = failed[0]
    num_failed, num_rows = (len({each.row["id"] for each, _ in some}) for some in (failed, results))
    result = outcome.error or ("accepted" if outcome.passed else "rejected")
    line = (
        f"{attack.name}: {result} on {num_failed} of {num_rows} rows, such as {call.row['id']}: {_shorten(call.text)}"
    )
    if attack.expected is None and not outcome.error:
        findings.notes.append(line)
    else:
        findings.problems[attack.name] = line


def _spread(rows: Sequence, number: int) -> list:
    """Return at most `number` rows, evenly spaced."""
    return [rows[index * len(rows) // number] for index in range(number)] if len(rows) > number else list(rows)


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= 160 else f"{text[:160]!r}... ({len(text):,} characters)"
