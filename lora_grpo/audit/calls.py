"""Makes the calls of an audit in a process that is killed at the first one that takes too long."""

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from lora_grpo.audit.attacks import Attack
from lora_grpo.errors import first_line


class Outcome(NamedTuple):
    """The result of a call."""

    passed: bool
    score: float = 0.0
    error: str | None = None
    """The exception or another error. The call did not pass."""
    fingerprint: int = 0
    """Hash of everything else that must be the same when the call is repeated."""
    text: str = ""
    """The completion or the conversation; after an error, the text with which the failed step began."""


class Call(NamedTuple):
    """A completion to check, or a conversation to play."""

    attack: Attack
    row: Mapping[str, Any]
    make: Callable[[Callable[[str], None]], Outcome]
    """Makes the call. At the beginning of each step, it calls its argument with a text. This restarts the time limit,
    and the text is shown if the step fails."""


def run_calls(calls: Sequence[Call], grader: str, seconds: float, deadline: float) -> list[Outcome]:
    """Make the calls in order, in a child process, and return the outcomes of those that were made.

    Args:
        grader: what is called, the subject of the error messages.
        seconds: the process is killed at the first step that takes longer.
        deadline: the process is killed at this value of `time.monotonic`, too.
    """
    outcomes: list[Outcome] = []
    step = ""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(calls, writer), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if there are threads
        child.start()
    writer.close()
    try:
        while len(outcomes) < len(calls):
            seconds_left = deadline - time.monotonic()
            if not reader.poll(max(0, min(seconds, seconds_left))):
                if seconds < seconds_left:  # otherwise the deadline ended the call, which may not be slow
                    outcomes.append(Outcome(False, error=f"{grader} took more than {seconds:g} s", text=step))
                break
            received = reader.recv()
            if isinstance(received, str):  # a step begins
                step = received
                continue
            if not received.text:
                received = received._replace(text=step)
            outcomes.append(received)
    except EOFError:
        outcomes.append(Outcome(False, error=f"{grader} ended the process", text=step))
    finally:
        child.kill()
        child.join()
        reader.close()
    return outcomes


def _serve(calls: Sequence[Call], writer: Connection) -> None:
    """Make the calls in the child process, and discard the output of the user's code."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(null, number)
    for call in calls:
        try:
            outcome = call.make(writer.send)
        except Exception as failure:  # noqa: BLE001 - an exception is a finding
            message, _, _ = first_line(failure).partition("; row ")  # the same error on two rows has the same text
            outcome = Outcome(False, error=message)
        writer.send(outcome)
