"""Attacks the `check` or the `Environment` of a run's tasks, and reports what it wrongly accepts or rejects."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lora_grpo import console
from lora_grpo.audit import attacks, policies
from lora_grpo.audit.attacks import EMPTY, GOLD, LEAK, LONG, MARKER, REPEAT, Attack, Subject
from lora_grpo.audit.calls import Call, Outcome, run_calls
from lora_grpo.config import RunConfig
from lora_grpo.data import Data
from lora_grpo.errors import RunError, UserError, suggestion
from lora_grpo.grading import Row
from lora_grpo.tasks import CODE_TASKS, Task, TaskFile, get_task, is_users_task, task_title

QUICK: dict[str, Any] = {"gold_rows": 16, "attacked_rows": 4, "seconds_per_call": 3.0, "seconds": 5.0}
"""The limits of the audit before a run."""


@dataclass
class Findings:
    """The result of an audit."""

    grader: str
    """What was attacked: "check" or "Environment"."""
    problems: dict[str, str] = field(default_factory=dict)
    """The findings, by the name of the attack."""
    notes: list[str] = field(default_factory=list)
    size: str = ""
    """The numbers of attacks and rows."""


def audit(config: RunConfig, data: Data, quick: bool = False) -> dict[str, Findings]:
    """Audit the tasks of a run, tell the findings, and return them by the name of the task.

    Args:
        quick: take a few seconds, skip built-in tasks, and tell warnings.

    Raises:
        UserError: `quick` is set and `check` rejects the file's own reference answer.
    """
    found: dict[str, Findings] = {}
    for name in dict.fromkeys((config.data.task, config.data.evaluation_task)):
        title = task_title(name)
        if name in CODE_TASKS and not quick:
            console.result(f"audit of {title}: nothing to do; its rows are graded by unit tests")
        if name in CODE_TASKS or (quick and not is_users_task(name)):
            continue
        rows = [row for row in (*data.train, *data.eval) if row["task"] == name]
        findings = find(name, rows, **(QUICK if quick else {}))
        if quick and GOLD in findings.problems:
            raise UserError(f"{name}: {findings.problems[GOLD]}; fix gold or {findings.grader}")
        found[title] = findings
        if quick:
            _tell_before_run(title, findings)
        else:
            _tell(title, findings)
    if quick and any(findings.problems for findings in found.values()):
        console.note("warning: audit: a model may learn this instead of the task; see --audit")
    return found


def refuse_problems(found: Mapping[str, Findings]) -> None:
    """Raise a RunError if an audit has found problems that the task file does not ignore."""
    failed = {title: findings for title, findings in found.items() if findings.problems}
    if failed:
        graders = " and ".join(sorted({findings.grader for findings in failed.values()}))
        tasks = ", ".join(f"{title} ({', '.join(findings.problems)})" for title, findings in failed.items())
        raise RunError(f"the audit found problems in {tasks}; fix {graders}, or see docs/your-task.md")


def _tell(title: str, findings: Findings) -> None:
    """Tell the result of an audit."""
    for note in findings.notes:
        console.result(f"note: {note}")
    for problem in findings.problems.values():
        console.result(f"FOUND {problem}")
    if not findings.problems:
        console.result(f"audit of {title}: passed; {findings.size}")


def _tell_before_run(title: str, findings: Findings) -> None:
    """Tell the result of the quick audit before a run."""
    for note in findings.notes:
        console.note(f"warning: audit: {note}")
    for problem in findings.problems.values():
        console.note(f"warning: audit: {problem}")
    if not findings.problems:
        console.note(f"audit of {title}: passed; {findings.size}")


def find(
    name: str,
    rows: Sequence[Row],
    gold_rows: int = 500,
    attacked_rows: int = 16,
    seconds_per_call: float = 10.0,
    seconds: float = 1800.0,
) -> Findings:
    """Attack the checker or the environment of a task.

    Args:
        rows: the task's rows with their prompts. If the task has an Environment, these are the results of its `open`.
        gold_rows: maximum number of rows whose reference answer is tried.
        attacked_rows: maximum number of rows on which each attack is tried.
        seconds_per_call: time limit of a call of `check`, or of a turn of an environment.
    """
    task = get_task(name)
    environment = task.environment
    findings = Findings(grader="Environment" if environment else "check")
    ignored = _ignored_attacks(name, task, has_environment=environment is not None)
    if not task.has_gold:
        findings.notes.append(f"{task_title(name)} defines no gold(row), so only texts without an answer are tried")

    # The references of many rows are checked, and some of these rows are attacked.
    number_of_rows = len(rows)
    rows = _spread(rows, gold_rows)
    golds = [task.gold(row) if task.has_gold else None for row in rows]
    empty_golds = sum(_is_empty(gold) for gold in golds if gold is not None)
    if empty_golds:
        findings.problems[GOLD] = f"{GOLD}: it is empty for {empty_golds} of {len(rows)} rows"
    if environment:
        attacked_rows = max(attacked_rows, policies.MIN_ROWS)
    subjects = attacks.make_subjects(rows, golds, _spread(range(len(rows)), attacked_rows))
    if LEAK not in ignored:
        leaked = attacks.leaked_rows(subjects)
        if leaked:
            example = leaked[0].row["id"]
            findings.problems[LEAK] = f"{LEAK}: {len(leaked)} of {len(subjects)} rows, such as {example}"

    # The calls, then the same again in reverse order, except for the long texts, which are last and slow.
    calls = [call for call in _calls(task, environment, rows, golds, subjects) if call.attack.name not in ignored]
    repeated = [call for call in reversed(calls) if call.attack.name != LONG]
    if environment:
        seconds_per_call *= 0.9  # less than the limit of a session, so that a tool that hangs is a finding
    outcomes = run_calls([*calls, *repeated], findings.grader, seconds_per_call, time.monotonic() + seconds)

    _report(findings, calls, outcomes)
    if REPEAT not in ignored:
        _report_changes(findings, repeated, outcomes, len(calls))
    if len(outcomes) < len(calls):
        unit = "conversations" if environment else "completions"
        findings.notes.append(f"{len(calls) - len(outcomes)} of {len(calls)} {unit} were not checked")
    tried = {call.attack.name for call in calls[: len(outcomes)]} - {GOLD}
    findings.size = f"{len(tried)} attacks on {len(subjects)} of {number_of_rows} rows"
    return findings


def _ignored_attacks(name: str, task: Task, *, has_environment: bool) -> tuple[str, ...]:
    """Return the attacks that a task file ignores, or raise UserError for a name that is none."""
    ignored = task.constants.AUDIT_IGNORE if isinstance(task, TaskFile) else ()
    attack_names = policies.NAMES if has_environment else attacks.NAMES
    for wrong in set(ignored) - {*attack_names}:
        raise UserError(f"{name}: AUDIT_IGNORE has {wrong!r}; {suggestion(wrong, attack_names)}")
    return ignored


def _is_empty(gold: Any) -> bool:
    """Return whether a reference is an empty text, or a conversation without messages."""
    return not (gold.strip() if isinstance(gold, str) else gold)


def _calls(
    task: Task, environment: Any, rows: Sequence[Row], golds: Sequence[Any], subjects: Sequence[Subject]
) -> Iterator[Call]:
    """Yield the calls of all attacks. Those with reference answers are made for all rows."""
    check: Callable[..., Outcome] = partial(_check, task)
    check_reference: Callable[..., Outcome] = check
    attempted: Iterable[Attack] = attacks.ATTACKS
    if environment:
        check = partial(policies.play, environment)
        check_reference = partial(policies.play_reference, environment)
        attempted = policies.attacks(environment, golds)
    for attack in attempted:
        if attack.name == GOLD:
            for row, gold in zip(rows, golds, strict=True):
                if gold:
                    yield Call(attack, row, partial(check_reference, row, gold))
        elif attack.name == policies.SIDE:
            neighbors = [*subjects[1:], *subjects[:1]]
            for subject, neighbor in zip(subjects, neighbors, strict=True):
                yield Call(attack, subject.row, partial(policies.compare, environment, subject, neighbor))
        attacked = subjects[:1] if attack.name == LONG else subjects
        for subject in attacked:
            for text in attack.write(subject):
                if attack.passes or text != subject.gold:
                    yield Call(attack, subject.row, partial(check, subject.row, text))


def _check(task: Task, row: Row, text: str, begin: Callable[[str], None]) -> Outcome:
    """Return the result of one call of `check`. A text also passes if it is code that ran."""
    begin(text)
    try:
        verdict = task.check(text, row)
        return Outcome(verdict.passed or MARKER.exists(), verdict.value)
    finally:
        MARKER.unlink(missing_ok=True)


def _report(findings: Findings, calls: Sequence[Call], outcomes: Sequence[Outcome]) -> None:
    """Add a finding for each attack with an error or a wrong verdict."""
    made_by_attack: dict[Attack, list[tuple[Call, Outcome]]] = {}
    for call, outcome in zip(calls, outcomes, strict=False):
        made_by_attack.setdefault(call.attack, []).append((call, outcome))
    planned = Counter(call.attack for call in calls)

    for attack, made in made_by_attack.items():
        errors = [(call, outcome) for call, outcome in made if outcome.error]
        failed = errors or [(call, outcome) for call, outcome in made if outcome.passed != attack.passes]
        is_luck = attack.luck and not errors and 2 * len(failed) <= planned[attack]
        if not failed or is_luck:
            continue
        call, outcome = failed[0]
        if outcome.error and any(outcome.error in problem for problem in findings.problems.values()):
            continue  # the same exception, for example
        result = outcome.error or ("accepted" if outcome.passed else "rejected")
        rows = f"{_number_of_rows(failed)} of {_number_of_rows(made)} rows"
        problem = f"{attack.name}: {result} on {rows}, such as {call.row['id']}: {_shorten(outcome.text)}"
        findings.problems.setdefault(attack.name, problem)

    # A wrong completion that is rewarded is worth a note.
    for name in (EMPTY, policies.BEFORE):
        scores = [0.0]
        for attack, made in made_by_attack.items():
            if attack.name == name:
                scores += [outcome.score for _, outcome in made if not outcome.passed]
        if max(scores) > 0:
            findings.notes.append(f"{name}: gets a score of up to {max(scores):g}, which a model is rewarded for")


def _number_of_rows(made: Sequence[tuple[Call, Outcome]]) -> int:
    return len({call.row["id"] for call, _ in made})


def _report_changes(
    findings: Findings, repeated: Sequence[Call], outcomes: Sequence[Outcome], number_of_calls: int
) -> None:
    """Add a finding if calls had another outcome when they were repeated.

    Args:
        repeated: the calls that were made again, in reverse order.
        outcomes: the outcomes of the first calls, then those of the repeated calls.
        number_of_calls: number of the first calls.
    """
    first_outcomes = reversed(outcomes[: len(repeated)])
    second_outcomes = outcomes[number_of_calls:]
    changed = []
    for call, first, second in zip(repeated, first_outcomes, second_outcomes, strict=False):
        if (first.passed, first.seen) != (second.passed, second.seen):
            changed.append((call, second))
    if changed:
        call, outcome = changed[0]
        findings.problems.pop(policies.SIDE, None)  # the same cause
        findings.problems[REPEAT] = (
            f"{REPEAT}: another result for the same text on {len(changed)} of {number_of_calls} texts, such as row "
            f"{call.row['id']}: {_shorten(outcome.text)}; {findings.grader} must not depend on chance or "
            "on earlier calls"
        )


def _spread(rows: Sequence, number: int) -> list:
    """Return at most `number` rows, evenly spaced."""
    return [rows[index * len(rows) // number] for index in range(number)] if len(rows) > number else list(rows)


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= 160 else f"{text[:160]!r}... ({len(text):,} characters)"
