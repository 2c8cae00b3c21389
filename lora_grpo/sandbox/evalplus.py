"""EvalPlus's rules: which results of a candidate are as good as those of the reference program, and in which time.

Rows of HumanEval+ and MBPP+ have inputs, but no expected values. The reference program runs in the tests' process, so
the candidate sees neither it nor its results.

Source: the rules of evalplus 0.3.1, https://github.com/evalplus/evalplus: evalplus/eval/__init__.py
(`unsafe_execute`), evalplus/eval/_special_oracle.py, evalplus/gen/util (`trusted_exec`). The comments name MBPP's
tasks. docs/decisions/0031-verdicts-of-published-graders.md lists the differences.
"""

import math
import signal
import time
from copy import deepcopy
from typing import Any

from lora_grpo.sandbox.link import Gone

_MIN_SECONDS, _FACTOR = 1.0, 4.0
_LOADING_SECONDS = 3.0
_RTOL, _FLOAT_ATOL = 1e-7, 1e-6
_NOT_NONE = {"check_str", "text_match_three", "text_starta_endb"}
"""Functions of MBPP that may return any object: only whether it is None counts."""
_SETS = {
    *("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum"),
    *("intersection_array", "find_dissimilar", "Diff"),
}
"""Functions of MBPP whose results may have any order."""


class Comparison:
    """The tests of one set of inputs. They use it as `assert comparison.holds(candidate, arguments)`.

    One call of the candidate may take a second, or four times as long as the reference program if that is more, and
    its source may run for three seconds.
    """

    def __init__(self, reference: str, entry_point: str, atol: float) -> None:
        """Run the source of the reference program.

        Args:
            atol: absolute tolerance; with 0, results are compared exactly until the first expected float.
        """
        namespace: dict[str, Any] = {"__name__": "reference"}
        exec(reference, namespace)
        self._reference, self._atol = namespace[entry_point], atol
        self._name = entry_point
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, _LOADING_SECONDS)

    def holds(self, candidate: Any, arguments: list[Any]) -> bool:
        """Return whether the result of the candidate is right."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        started = time.perf_counter()
        expected = self._reference(*deepcopy(arguments))
        seconds = max(_MIN_SECONDS, _FACTOR * (time.perf_counter() - started))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            result = candidate(*deepcopy(arguments))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self._accepts(result, expected, arguments)

    def _accepts(self, result: Any, expected: Any, arguments: list[Any]) -> bool:
        same = bool(result == expected)
        match self._name:
            case "find_zero":  # HumanEval/32: any zero of the polynomial
                zero = sum(number * math.pow(result, power) for power, number in enumerate(arguments[0]))
                return abs(zero) <= self._atol
            case "are_equivalent":  # 164: its reference program is wrong
                same = True
            case "sum_div":  # 295
                same = same or result == 0
            case "surface_Area":  # 581: the height may be that of the pyramid
                same = same or abs(result - _surface_area(*arguments)) <= self._atol
            case "digit_distance_nums":  # 558: numbers of different lengths may be padded
                same = same or result == _digit_distance(*arguments)
            case name if name in _SETS:
                same = set(result) == set(expected)
            case name if name in _NOT_NONE:
                expected = expected is not None
                same = (result if isinstance(result, bool) else result is not None) == expected
        if self._atol == 0 and _is_floats(expected):
            self._atol = _FLOAT_ATOL  # also for the inputs that follow
        if same or self._atol == 0:
            return same
        return type(result) is type(expected) and _close(result, expected, self._atol)


def _stop(*_: object) -> None:
    raise Gone("timeout", "a call, or the program itself, takes too long")


def _surface_area(base: float, height: float) -> int:
    return round(base**2 + 2 * base * math.sqrt((base / 2) ** 2 + height**2))


def _digit_distance(first: int, second: int) -> int:
    width = max(len(str(first)), len(str(second)))
    pairs = zip(str(first).zfill(width), str(second).zfill(width), strict=True)
    return sum(abs(int(one) - int(other)) for one, other in pairs)


def _is_floats(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) and value else [value]
    return all(isinstance(item, float) for item in items)


def _close(result: Any, expected: Any, atol: float) -> bool:
    """Compare numbers, or nested lists of one shape, as `numpy.allclose` does. Other values are not close."""
    try:
        (shape, numbers), (other_shape, others) = _array(result), _array(expected)
    except (TypeError, ValueError):
        return False
    return shape == other_shape and all(
        one == other or (abs(one - other) <= atol + _RTOL * abs(other) and abs(other) != math.inf)
        for one, other in zip(numbers, others, strict=True)
    )


def _array(value: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape and the numbers of a value that NumPy reads as an array of numbers."""
    if isinstance(value, (float, complex)) or (isinstance(value, int) and -(2**63) <= value < 2**64):
        return (), [value]
    if not isinstance(value, (list, tuple)):
        raise TypeError
    parts = [_array(item) for item in value]
    if len({shape for shape, _ in parts}) > 1:
        raise ValueError
    return (len(parts), *(parts[0][0] if parts else ())), [number for _, numbers in parts for number in numbers]
