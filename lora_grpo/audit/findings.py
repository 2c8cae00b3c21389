"""How much an audit tries, and what it finds."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """How much an audit tries."""

    gold_rows: int = 500
    """Maximum number of rows whose reference answer is tried."""
    attacked_rows: int = 16
    """Maximum number of rows on which each attack is tried."""
    seconds_per_call: float = 10.0
    """Time limit of a call of `check`, or of a turn of an environment."""
    seconds: float = 1800.0
    """Time limit of all calls, or of all episodes of an agent."""


FULL = Limits()
"""The limits of `--audit`."""
QUICK = Limits(gold_rows=16, attacked_rows=4, seconds_per_call=3.0, seconds=5.0)
"""The limits of the audit before a run."""


@dataclass
class Findings:
    """The result of an audit."""

    grader: str
    """What was attacked: "check", "Environment", "agent" or "AGENT"."""
    problems: dict[str, str] = field(default_factory=dict)
    """The findings, by the name of the attack."""
    notes: list[str] = field(default_factory=list)
    size: str = ""
    """The numbers of attacks and rows."""


def spread(rows: Sequence, number: int) -> list:
    """Return at most `number` rows, evenly spaced."""
    if len(rows) <= number:
        return list(rows)
    return [rows[index * len(rows) // number] for index in range(number)]


def shorten(text: str) -> str:
    if len(text) <= 160:
        return repr(text)
    return f"{text[:160]!r}... ({len(text):,} characters)"
