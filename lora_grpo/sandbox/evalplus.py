"""EvalPlus's rules: which results of a candidate are as good as those of the reference program, and in which time.

Rows of HumanEval+ and MBPP+ have inputs, but no expected values. The reference program runs in the tests' process, so
the candidate sees neither it nor its results.

Source: evalplus 0.3.1, https://github.com/evalplus/evalplus: `unsafe_execute` in evalplus/eval/__init__.py,
evalplus/eval/_special_oracle.py, and `trusted_exec` in evalplus/gen/util. The comments give MBPP's numbers of tasks.
docs/decisions/0031-verdicts-of-published-graders.md lists the differences.
"""

import math
import signal
import time
from copy import deepcopy
from typing import Any

from lora_grpo.sandbox.link import Gone

_MIN_SECONDS, _FACTOR, _LOADING_SECONDS = 1.0, 4.0, 3.0
_RTOL, _FLOAT_ATOL = 1e-7, 1e-6
_NOT_NONE = {"check_str", "text_match_three", "text_starta_endb"}
"""Functions that may return any object; only whether it is None counts."""
_SETS = {
    *("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum"),
    *("intersection_array", "find_dissimilar", "Diff"),
}
"""Functions whose results may have any order."""


class Comparison:
    """The tests of a list of inputs, as `assert comparison.holds(candidate, arguments)` for each of them.

    A call of the candidate may take a second, or four times as long as the reference program if that is more. Its
    source may run for three seconds.

    Args:
        reference: source of the reference program.
        atol: absolute tolerance; with 0, results are compared exactly until the first expected float.
    """

    def __init__(self, reference: str, entry_point: str, atol: float) -> None:
        namespace: dict[str, Any] = {"__name__": "reference"}
        exec(reference, namespace)
        self._name, self._reference, self._atol = entry_point, namespace[entry_point], atol
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, _LOADING_SECONDS)

    def holds(self, candidate: Any, arguments: list[Any]) -> bool:
        """Return whether the result of the candidate is right."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        started = time.perf_counter()
        expected = self._reference(*deepcopy(arguments))
        signal.setitimer(signal.ITIMER_REAL, max(_MIN_SECONDS, _FACTOR * (time.perf_counter() - started)))
        try:
            result = candidate(*deepcopy(arguments))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self._accepts(result, expected, arguments)

    def _accepts(self, result: Any, expected: Any, arguments: list[Any]) -> bool:
        same = bool(result == expected)
        match self._name:
            case "find_zero":  # HumanEval/32: any zero of the polynomial
                return abs(sum(part * math.pow(result, i) for i, part in enumerate(arguments[0]))) <= self._atol
            case "are_equivalent":  # 164: its reference program is wrong
                same = True
            case "sum_div":  # 295
                same = same or result == 0
            case "surface_Area":  # 581: the height may be that of the pyramid
                base, height = arguments
                area = round(base**2 + 2 * base * math.sqrt((base / 2) ** 2 + height**2))
                same = same or abs(result - area) <= self._atol
            case "digit_distance_nums":  # 558: the shorter number may be padded
                width = max(len(str(number)) for number in arguments)
                digits = [map(int, str(number).zfill(width)) for number in arguments]
                same = same or result == sum(abs(one - other) for one, other in zip(*digits, strict=True))
            case name if name in _SETS:
                same = set(result) == set(expected)
            case name if name in _NOT_NONE:
                expected = expected is not None
                same = (result if isinstance(result, bool) else result is not None) == expected
        items = expected if isinstance(expected, (list, tuple)) and expected else [expected]
        if self._atol == 0 and all(isinstance(item, float) for item in items):
            self._atol = _FLOAT_ATOL  # also for the inputs that follow
        if same or self._atol == 0:
            return same
        return type(result) is type(expected) and _close(result, expected, self._atol)


def _stop(*_: object) -> None:
    raise Gone("timeout", "a call, or the program itself, takes too long")


def _close(result: Any, expected: Any, atol: float) -> bool:
    """Compare numbers, or nested lists of one shape, as `numpy.allclose` does. Other values are not close."""
    try:
        (shape, numbers), (expected_shape, expected_numbers) = _array(result), _array(expected)
    except TypeError:
        return False
    return shape == expected_shape and all(
        one == other or (abs(one - other) <= atol + _RTOL * abs(other) and abs(other) != math.inf)
        for one, other in zip(numbers, expected_numbers, strict=True)
    )


def _array(value: Any, is_item: bool = False) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape and the numbers of what NumPy 2 reads as an array of numbers, or raise TypeError."""
    too_large = is_item and isinstance(value, int) and not -(2**63) <= value < 2**64
    if isinstance(value, (int, float, complex)) and not too_large:
        return (), [value]
    parts = [_array(item, True) for item in value] if isinstance(value, (list, tuple)) else []
    shapes = {shape for shape, _ in parts}
    if len(shapes) > 1 or not isinstance(value, (list, tuple)):
        raise TypeError
    return (len(parts), *max(shapes, default=())), [number for _, numbers in parts for number in numbers]
