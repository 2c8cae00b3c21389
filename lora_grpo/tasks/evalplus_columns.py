"""The columns of a row of EvalPlus's data sets, HumanEval+ and MBPP+, for the sandbox."""

import re
from collections.abc import Callable
from typing import Any

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.grading import Row
from lora_grpo.tasks import sources

# A test program of EvalPlus's datasets on the Hub has `inputs = [...]` and, in a loop, `assertion(f(*inp), exp, atol)`.
_HUB_INPUTS = re.compile(r"^ *inputs = (\[.*\])$", re.MULTILINE)
_HUB_ATOL = re.compile(r"[,=] ([\d.e-]+)\)?$", re.MULTILINE)


def plus_columns(record: Row, where: str, reference: str, entry_point: str, convert: Callable[..., Any] = list) -> Row:
    """Return the columns `test`, `prelude` and `seconds` of a row of EvalPlus; `sandbox/evalplus.py` has the rules.

    Args:
        record: a row of EvalPlus's release, which has `base_input`, or of its dataset on the Hub, which has `test`.
        where: location of the record.
        reference: the reference program, which computes the expected values.
        convert: returns the arguments of a call for those in a release.
    """
    if "base_input" in record:
        parts, atol = (record["base_input"], record.get("plus_input") or []), record.get("atol", 0)
        are_lists = all(isinstance(part, list) and all(isinstance(call, list) for call in part) for part in parts)
        if not are_lists or not isinstance(atol, (int, float)):
            raise UserError(f"{where}: expected a number as 'atol' and lists of lists as 'base_input' and 'plus_input'")
        inputs = [repr([*map(convert, part)]) for part in parts if part]
    else:
        (program,) = sources.texts(record, ("test",), where)
        lists, numbers = _HUB_INPUTS.findall(program), _HUB_ATOL.findall(program)
        if len(lists) != 1 or not numbers:
            raise UserError(f"{where}: 'test' has no inputs or no tolerance; expected a row of EvalPlus's dataset")
        inputs, atol = lists, float(numbers[-1])
    prelude = ["from math import inf, nan", "from lora_grpo.sandbox.evalplus import Comparison"]
    test = []
    for number, source in enumerate(inputs):
        prelude.append(f"_inputs{number} = {source}")
        prelude.append(f"_tests{number} = Comparison({reference!r}, {entry_point!r}, {atol!r})")
        test.append(f"for _args in _inputs{number}:\n    assert _tests{number}.holds({entry_point}, _args), _args\n")
    return {"test": "".join(test), "prelude": "\n".join(prelude), "seconds": sandbox.LONGEST}
