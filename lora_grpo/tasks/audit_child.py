"""Calls `check` in a child process, which is killed if a call takes too long."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lora_grpo.errors import first_line
from lora_grpo.tasks.audit_attacks import CODE, Attack
from lora_grpo.tasks.registry import Task


@dataclass(frozen=True)
class Call:
    """One completion to check."""

    attack: Attack
    row: Mapping[str, Any]
    text: str
    marker: str


@dataclass(frozen=True)
class Outcome:
    """What a call returned."""

    passed: bool
    seconds: float
    score: float = 0.0
    error: str | None = None
    """The exception, or what else went wrong. The call did not pass."""


def run_calls(task: Task, calls: Sequence[Call], seconds: float, deadline: float) -> list[Outcome | None]:
    """Check the completions in order, each within a time limit.

    Args:
        deadline: value of `time.monotonic` at which to stop.

    Returns:
        An outcome per call; None for calls that were not made, because the deadline has passed or an earlier call of
        the same attack ended the child process.
    """
    outcomes: list[Outcome | None] = [None] * len(calls)
    ended: set[str] = set()
    following = 0
    while following < len(calls) and time.monotonic() < deadline:
        rest = [index for index in range(following, len(calls)) if calls[index].attack.name not in ended]
        if not rest:
            break
        context = multiprocessing.get_context("fork")
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(target=_serve, args=(task, [calls[index] for index in rest], writer), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if there are threads
            child.start()
        writer.close()
        try:
            for index in rest:
                following = index + 1
                limit = min(seconds, deadline - time.monotonic())
                try:
                    if reader.poll(max(limit, 0)):
                        outcomes[index] = reader.recv()
                        continue
                    outcomes[index] = Outcome(False, limit, error=f"check took more than {seconds:g} s")
                    if limit < seconds:  # the deadline ended the call, which may not be slow
                        outcomes[index] = None
                except EOFError:
                    outcomes[index] = Outcome(False, 0.0, error="check ended the process")
                ended.add(calls[index].attack.name)
                break
        finally:
            child.kill()
            child.join()
            reader.close()
    return outcomes


def _serve(task: Task, calls: Sequence[Call], writer: Connection) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):  # what a checker prints, a thousand times
        os.dup2(null, number)
    with ThreadPoolExecutor(1) as pool:
        for call in calls:
            writer.send(pool.submit(_check, task, call).result() if call.attack.in_thread else _check(task, call))


def _check(task: Task, call: Call) -> Outcome:
    start = time.perf_counter()
    passed, score, error = False, 0.0, None
    try:
        verdict = task.check(call.text, call.row)
        passed, score = verdict.passed, verdict.value
    except Exception as failure:  # noqa: BLE001 - an exception is a finding
        error = first_line(failure).split("; row ")[0]
    seconds = time.perf_counter() - start
    if call.attack is CODE:
        marker = Path(call.marker)
        passed, error = marker.exists(), None
        marker.unlink(missing_ok=True)
    return Outcome(passed, seconds, score, error)
