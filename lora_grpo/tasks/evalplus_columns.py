"""The columns of a row of EvalPlus's data sets, HumanEval+ and MBPP+, for the sandbox."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.grading import Row
from lora_grpo.tasks import sources

# A test program of EvalPlus's datasets on the Hub has `inputs = [...]` and, in a loop, `assertion(f(*inp), exp, atol)`.
_HUB_INPUTS = re.compile(r"^ *inputs = (\[.*\])$", re.MULTILINE)
_HUB_TOLERANCE = re.compile(r"[,=] ([\d.e-]+)\)?$", re.MULTILINE)


@dataclass(frozen=True)
class _Inputs:
    """What the tests of a problem call its function with."""

    lists: Sequence[str]
    """Lists of calls, as Python code. A call is the list of its arguments. A release has two lists: the original
    inputs, and those that EvalPlus added."""
    tolerance: float
    """Absolute tolerance of floats."""


def plus_columns(
    record: sources.Record,
    reference: str,
    entry_point: str,
    convert: Callable[[list[Any]], list[Any]] = list,
) -> Row:
    """Return the columns `test`, `prelude` and `seconds` of a row of EvalPlus; `sandbox/evalplus.py` has the rules.

    Args:
        record: of EvalPlus's release, which has `base_input`, or of its dataset on the Hub, which has `test`.
        reference: the reference program, which computes the expected values.
        entry_point: the function that is called.
        convert: returns the arguments of a call for those in a release.
    """
    inputs = _inputs(record, convert)

    # The prelude is trusted: a program can read neither the inputs nor what they are compared with.
    prelude = ["from math import inf, nan", "from lora_grpo.sandbox.evalplus import Comparison"]
    test = []
    for number, calls in enumerate(inputs.lists):
        prelude.append(f"_inputs{number} = {calls}")
        prelude.append(f"_tests{number} = Comparison({reference!r}, {entry_point!r}, {inputs.tolerance!r})")
        test.append(f"for _args in _inputs{number}:\n    assert _tests{number}.holds({entry_point}, _args), _args\n")
    return {"test": "".join(test), "prelude": "\n".join(prelude), "seconds": sandbox.MAX_PROGRAM_SECONDS}


def _inputs(record: sources.Record, convert: Callable[[list[Any]], list[Any]]) -> _Inputs:
    if "base_input" not in record.columns:
        return _inputs_of_hub_row(record)
    original = record.columns["base_input"]
    added = record.columns.get("plus_input") or []
    tolerance = record.columns.get("atol", 0)
    if not _are_calls(original) or not _are_calls(added) or not isinstance(tolerance, (int, float)):
        raise UserError(
            f"{record.where}: expected a number as 'atol' and lists of lists as 'base_input' and 'plus_input'"
        )
    lists = []
    for calls in (original, added):
        if calls:
            lists.append(repr([convert(call) for call in calls]))
    return _Inputs(lists, tolerance)


def _are_calls(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(call, list) for call in value)


def _inputs_of_hub_row(record: sources.Record) -> _Inputs:
    [program] = sources.texts(record.columns, ["test"], record.where)
    lists = _HUB_INPUTS.findall(program)
    tolerances = _HUB_TOLERANCE.findall(program)
    if len(lists) != 1 or not tolerances:
        raise UserError(f"{record.where}: 'test' has no inputs or no tolerance; expected a row of EvalPlus's dataset")
    return _Inputs(lists, float(tolerances[-1]))
