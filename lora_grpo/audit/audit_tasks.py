"""Attacks the `check`, the `Environment` or the agent of a run's tasks, and reports what it wrongly accepts."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from lora_grpo import console
from lora_grpo.audit import attacks, policies, stand_ins
from lora_grpo.audit.attacks import (
    EMPTY_TEXT,
    GOLD,
    LEAKED_ANSWER,
    LONG_TEXT,
    MARKER,
    REPEATED_CALLS,
    Attack,
    Subject,
)
from lora_grpo.audit.calls import Call, Outcome, run_calls
from lora_grpo.audit.findings import FULL, QUICK, Findings, Limits, shorten, spread
from lora_grpo.config import RunConfig, SamplingConfig
from lora_grpo.data import Data
from lora_grpo.errors import RunError, UserError, suggestion
from lora_grpo.grading import Row
from lora_grpo.tasks import CODE_TASKS, EnvironmentClass, Task, TaskFile, get_task, is_users_task, task_title


def audit(config: RunConfig, data: Data, quick: bool = False) -> dict[str, Findings]:
    """Audit the tasks of a run, tell the findings, and return them by the name of the task.

    Args:
        quick: take a few seconds, skip built-in tasks, and tell warnings.

    Raises:
        UserError: `quick` is set and `check` rejects the file's own reference answer.
    """
    limits = QUICK if quick else FULL
    findings_by_task: dict[str, Findings] = {}
    for name in dict.fromkeys((config.data.task, config.data.evaluation_task)):
        title = task_title(name)
        if name in CODE_TASKS and not quick:
            console.result(f"audit of {title}: nothing to do; its rows are graded by unit tests")
        if name in CODE_TASKS or (quick and not is_users_task(name)):
            continue
        rows = [row for row in (*data.train, *data.eval) if row["task"] == name]
        findings = audit_task(name, rows, limits, config.sampling)
        if quick and GOLD in findings.problems:
            raise UserError(f"{name}: {findings.problems[GOLD]}; fix gold or {findings.grader}")
        findings_by_task[title] = findings
        _tell(title, findings, quick=quick)
    if quick and any(findings.problems for findings in findings_by_task.values()):
        console.note("warning: audit: a model may learn this instead of the task; see --audit")
    return findings_by_task


def refuse_problems(findings_by_task: Mapping[str, Findings]) -> None:
    """Raise a RunError if an audit has found problems that the task file does not ignore."""
    failed = {title: findings for title, findings in findings_by_task.items() if findings.problems}
    if failed:
        graders = " and ".join(sorted({findings.grader for findings in failed.values()}))
        tasks = ", ".join(f"{title} ({', '.join(findings.problems)})" for title, findings in failed.items())
        raise RunError(f"the audit found problems in {tasks}; fix {graders}, or see docs/your-task.md")


def _tell(title: str, findings: Findings, *, quick: bool) -> None:
    """Tell the result of an audit. It is what `--audit` was started for, and a note of a run."""
    tell: Callable[[str], None] = console.result
    note_label = "note: "
    problem_label = "FOUND "
    if quick:
        tell = console.note
        note_label = problem_label = "warning: audit: "
    for note in findings.notes:
        tell(f"{note_label}{note}")
    for problem in findings.problems.values():
        tell(f"{problem_label}{problem}")
    if not findings.problems:
        tell(f"audit of {title}: passed; {findings.size}")


def audit_task(
    name: str, rows: Sequence[Row], limits: Limits = FULL, sampling: SamplingConfig | None = None
) -> Findings:
    """Attack the checker, the environment or the agent of a task.

    Args:
        rows: the task's rows with their prompts, which contain what `reset` adds if the task has an Environment.
        sampling: the settings of the run, which an agent's requests have to agree with.
    """
    task = get_task(name)
    environment = task.environment
    if task.agent:
        from lora_grpo.audit.audit_agents import audit_agent  # loads a web server

        ignored = _ignored_attacks(name, task, stand_ins.NAMES)
        return audit_agent(task.agent, rows, limits, sampling or SamplingConfig(), ignored)
    findings = Findings(grader="check")
    attacked_rows = limits.attacked_rows
    seconds_per_call = limits.seconds_per_call
    if environment:
        findings.grader = "Environment"
        attacked_rows = max(attacked_rows, policies.MIN_ROWS)
        seconds_per_call *= 0.9  # less than the limit of a session, so that a tool that hangs is a finding
    ignored = _ignored_attacks(name, task, policies.NAMES if environment else attacks.NAMES)
    if not task.has_gold:
        findings.notes.append(f"{task_title(name)} defines no gold(row), so only texts without an answer are tried")

    # The references of many rows are checked, and some of these rows are attacked.
    number_of_rows = len(rows)
    rows = spread(rows, limits.gold_rows)
    golds: list[Any] = [None] * len(rows)
    if task.has_gold:
        golds = [task.gold(row) for row in rows]
    empty_golds = sum(_is_empty(gold) for gold in golds if gold is not None)
    if empty_golds:
        findings.problems[GOLD] = f"{GOLD}: it is empty for {empty_golds} of {len(rows)} rows"
    subjects = attacks.make_subjects(rows, golds, spread(range(len(rows)), attacked_rows))
    if LEAKED_ANSWER not in ignored:
        leaked = attacks.leaked_rows(subjects)
        if leaked:
            example = leaked[0].row["id"]
            problem = f"{LEAKED_ANSWER}: {len(leaked)} of {len(subjects)} rows, such as {example}"
            findings.problems[LEAKED_ANSWER] = problem

    # The calls, then the same again in reverse order, except for the long texts, which are last and slow.
    calls = [call for call in _calls(task, environment, rows, golds, subjects) if call.attack.name not in ignored]
    repeatable = [call for call in calls if call.attack.name != LONG_TEXT]
    deadline = time.monotonic() + limits.seconds
    outcomes = run_calls([*calls, *reversed(repeatable)], findings.grader, seconds_per_call, deadline)
    first_outcomes = outcomes[: len(calls)]
    repeated_outcomes = outcomes[len(calls) :]

    _report(findings, calls, first_outcomes)
    if REPEATED_CALLS not in ignored:
        _report_changes(findings, calls, first_outcomes, repeated_outcomes)
    if len(outcomes) < len(calls):
        unit = "conversations" if environment else "completions"
        findings.notes.append(f"{len(calls) - len(outcomes)} of {len(calls)} {unit} were not checked")
    made_attacks = {call.attack.name for call in calls[: len(outcomes)]} - {GOLD}
    findings.size = f"{len(made_attacks)} attacks on {len(subjects)} of {number_of_rows} rows"
    return findings


def _ignored_attacks(name: str, task: Task, attack_names: Sequence[str]) -> tuple[str, ...]:
    """Return the attacks that a task file ignores, or raise UserError for a name that is none.

    Args:
        attack_names: those that can be ignored.
    """
    if not isinstance(task, TaskFile):
        return ()
    for ignored in task.constants.AUDIT_IGNORE:
        if ignored not in attack_names:
            raise UserError(f"{name}: AUDIT_IGNORE has {ignored!r}; {suggestion(ignored, attack_names)}")
    return task.constants.AUDIT_IGNORE


def _is_empty(gold: Any) -> bool:
    """Return whether a reference is an empty text, or a conversation without messages."""
    if isinstance(gold, str):
        return not gold.strip()
    return not gold


def _calls(
    task: Task,
    environment: EnvironmentClass | None,
    rows: Sequence[Row],
    golds: Sequence[Any],
    subjects: Sequence[Subject],
) -> Iterator[Call]:
    """Yield the calls of all attacks. Those with reference answers are made for all rows.

    Each function that makes a call still takes one argument, `begin`; see `Call.make`.
    """
    all_attacks: Iterable[Attack] = attacks.ATTACKS
    check: Callable[..., Outcome] = partial(_check, task)
    check_reference: Callable[..., Outcome] = check
    if environment:
        all_attacks = policies.attacks(environment, rows, golds)
        check = partial(policies.play, environment)
        check_reference = partial(policies.play_reference, environment)
    for attack in all_attacks:
        if attack.name == GOLD:
            for row, gold in zip(rows, golds, strict=True):
                if gold:
                    yield Call(attack, row, partial(check_reference, row, gold))
        elif environment and attack.name == policies.SIDE_BY_SIDE:
            neighbors = [*subjects[1:], *subjects[:1]]
            for subject, neighbor in zip(subjects, neighbors, strict=True):
                yield Call(attack, subject.row, partial(policies.compare, environment, subject, neighbor))
        else:
            attacked = subjects
            if attack.name == LONG_TEXT:  # it is slow, and does not depend on the row
                attacked = subjects[:1]
            for subject in attacked:
                for attempt in attack.attempts(subject):
                    # A wrong text may happen to be the reference.
                    if attack.must_pass or attempt != subject.reference:
                        yield Call(attack, subject.row, partial(check, subject.row, attempt))


def _check(task: Task, row: Row, text: str, begin: Callable[[str], None]) -> Outcome:
    """Return the result of one call of `check`. A text also passes if it is code that ran."""
    begin(text)
    try:
        verdict = task.check(text, row)
        return Outcome(verdict.passed or MARKER.exists(), verdict.value)
    finally:
        MARKER.unlink(missing_ok=True)


class _MadeCall(NamedTuple):
    call: Call
    outcome: Outcome

    @property
    def has_wrong_verdict(self) -> bool:
        return self.outcome.passed != self.call.attack.must_pass


def _report(findings: Findings, calls: Sequence[Call], outcomes: Sequence[Outcome]) -> None:
    """Add a finding for each attack with an error or a wrong verdict. The last calls may have no outcome."""
    made_by_attack: dict[Attack, list[_MadeCall]] = {}
    for call, outcome in zip(calls, outcomes, strict=False):
        made_by_attack.setdefault(call.attack, []).append(_MadeCall(call, outcome))
    num_planned = Counter(call.attack for call in calls)

    for attack, made in made_by_attack.items():
        failed = [made_call for made_call in made if made_call.outcome.error]
        if not failed:
            failed = [made_call for made_call in made if made_call.has_wrong_verdict]
            if attack.may_pass_by_luck and 2 * len(failed) <= num_planned[attack]:
                continue
        if not failed:
            continue
        call, outcome = failed[0]
        if outcome.error and any(outcome.error in problem for problem in findings.problems.values()):
            continue  # the same exception, for example
        if outcome.error:
            result = outcome.error
        elif outcome.passed:
            result = "accepted"
        else:
            result = "rejected"
        rows = f"{_number_of_rows(failed)} of {_number_of_rows(made)} rows"
        problem = f"{attack.name}: {result} on {rows}, such as {call.row['id']}: {shorten(outcome.text)}"
        findings.problems.setdefault(attack.name, problem)

    # A wrong completion that is rewarded is worth a note.
    for name in (EMPTY_TEXT, policies.BEFORE_THE_END):
        scores = [0.0]
        for attack, made in made_by_attack.items():
            if attack.name == name:
                scores += [outcome.score for _, outcome in made if not outcome.passed]
        if max(scores) > 0:
            findings.notes.append(f"{name}: gets a score of up to {max(scores):g}, which a model is rewarded for")


def _number_of_rows(made: Sequence[_MadeCall]) -> int:
    return len({made_call.call.row["id"] for made_call in made})


def _report_changes(
    findings: Findings, calls: Sequence[Call], first_outcomes: Sequence[Outcome], repeated_outcomes: Sequence[Outcome]
) -> None:
    """Add a finding if calls had another outcome when they were repeated.

    Args:
        repeated_outcomes: those of the calls before the long texts, in reverse order; the last ones may be missing.
    """
    repeatable = [call for call in calls if call.attack.name != LONG_TEXT]
    if len(first_outcomes) < len(repeatable):  # the time was over, so that no call was repeated
        return
    first_reversed = reversed(first_outcomes[: len(repeatable)])
    changed = []
    for call, first, second in zip(reversed(repeatable), first_reversed, repeated_outcomes, strict=False):
        if (first.passed, first.fingerprint) != (second.passed, second.fingerprint):
            changed.append(_MadeCall(call, second))
    if changed:
        call, outcome = changed[0]
        findings.problems.pop(policies.SIDE_BY_SIDE, None)  # the same cause
        findings.problems[REPEATED_CALLS] = (
            f"{REPEATED_CALLS}: another result for the same text on {len(changed)} of {len(calls)} texts, such as row "
            f"{call.row['id']}: {shorten(outcome.text)}; {findings.grader} must not depend on chance or "
            "on earlier calls"
        )
