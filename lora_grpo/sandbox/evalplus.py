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

_LOADING_SECONDS = 3.0
"""Time limit of the candidate's source."""
_MIN_CALL_SECONDS = 1.0
_CALL_TIME_FACTOR = 4.0
"""Time limit of a call, in multiples of the reference program's time, if that is more than `_MIN_CALL_SECONDS`."""

_RTOL = 1e-7
_ATOL_OF_FLOATS = 1e-6
"""Absolute tolerance from the first expected float on, if a problem has none."""

_ONLY_NONE_COUNTS = {"check_str", "text_match_three", "text_starta_endb"}
"""Functions that may return any object; only whether it is None counts."""
_ANY_ORDER = {
    "similar_elements",
    "find_char_long",
    "common_in_nested_lists",
    "extract_singly",
    "larg_nnum",
    "intersection_array",
    "find_dissimilar",
    "Diff",
}
"""Functions whose results may have any order."""


class Comparison:
    """The tests of a list of inputs, as `assert comparison.holds(candidate, arguments)` for each of them.

    A call of the candidate may take a second, or four times as long as the reference program if that is more. Its
    source may run for three seconds.

    Args:
        reference: source of the reference program.
        entry_point: the function that is compared.
        atol: absolute tolerance; with 0, results are compared exactly until the first expected float.
    """

    def __init__(self, reference: str, entry_point: str, atol: float) -> None:
        namespace: dict[str, Any] = {"__name__": "reference"}
        exec(reference, namespace)
        self._name = entry_point
        self._reference = namespace[entry_point]
        self._atol = atol
        signal.signal(signal.SIGALRM, _end_tests)
        _set_alarm(_LOADING_SECONDS)

    def holds(self, candidate: Any, arguments: list[Any]) -> bool:
        """Return whether the result of the candidate is right."""
        _set_alarm(0)
        started = time.perf_counter()
        expected = self._reference(*deepcopy(arguments))
        reference_seconds = time.perf_counter() - started

        _set_alarm(max(_MIN_CALL_SECONDS, _CALL_TIME_FACTOR * reference_seconds))
        try:
            result = candidate(*deepcopy(arguments))
        finally:
            _set_alarm(0)
        return self._accepts(result, expected, arguments)

    def _accepts(self, result: Any, expected: Any, arguments: list[Any]) -> bool:
        same = bool(result == expected)

        # Problems with rules of their own.
        match self._name:
            case "find_zero":  # HumanEval/32: any zero of the polynomial
                value = sum(coefficient * math.pow(result, power) for power, coefficient in enumerate(arguments[0]))
                return abs(value) <= self._atol
            case "are_equivalent":  # 164: its reference program is wrong
                same = True
            case "sum_div":  # 295
                same = same or result == 0
            case "surface_Area":  # 581: the height may be that of the pyramid
                base, height = arguments
                area = round(base**2 + 2 * base * math.sqrt((base / 2) ** 2 + height**2))
                same = same or abs(result - area) <= self._atol
            case "digit_distance_nums":  # 558: the shorter number may be padded
                same = same or result == _digit_distance(*arguments)
            case name if name in _ANY_ORDER:
                same = set(result) == set(expected)
            case name if name in _ONLY_NONE_COUNTS:
                expected = expected is not None
                if not isinstance(result, bool):
                    result = result is not None
                same = result == expected

        # A problem without a tolerance gets one with the first expected floats, also for the inputs that follow.
        if self._atol == 0 and _has_only_floats(expected):
            self._atol = _ATOL_OF_FLOATS
        if same or self._atol == 0:
            return same
        return type(result) is type(expected) and _close(result, expected, self._atol)


def _set_alarm(seconds: float) -> None:
    """Let `_end_tests` run after some seconds; 0 turns the alarm off."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _end_tests(*_: object) -> None:
    raise Gone("timeout", "a call, or the program itself, takes too long")


def _digit_distance(first: int, second: int) -> int:
    """Return the sum of the differences between the digits of two numbers, with zeros before the shorter one."""
    width = max(len(str(first)), len(str(second)))
    pairs = zip(str(first).zfill(width), str(second).zfill(width), strict=True)
    return sum(abs(int(first_digit) - int(second_digit)) for first_digit, second_digit in pairs)


def _has_only_floats(value: Any) -> bool:
    """Return whether a value is a float, or a list or tuple of one or more floats."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _close(result: Any, expected: Any, atol: float) -> bool:
    """Compare numbers, or nested lists of one shape, as `numpy.allclose` does. Other values are not close."""
    try:
        shape, numbers = _array(result)
        expected_shape, expected_numbers = _array(expected)
    except TypeError:
        return False
    if shape != expected_shape:
        return False
    for number, expected_number in zip(numbers, expected_numbers, strict=True):
        if number == expected_number:  # also infinity
            continue
        is_close = abs(number - expected_number) <= atol + _RTOL * abs(expected_number)
        if not is_close or abs(expected_number) == math.inf:
            return False
    return True


def _array(value: Any, is_item: bool = False) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape and the numbers of what NumPy 2 reads as an array of numbers, or raise TypeError."""
    if isinstance(value, (list, tuple)):
        shapes: set[tuple[int, ...]] = set()
        numbers: list[Any] = []
        for item in value:
            item_shape, item_numbers = _array(item, is_item=True)
            shapes.add(item_shape)
            numbers += item_numbers
        if len(shapes) > 1:
            raise TypeError
        return (len(value), *max(shapes, default=())), numbers
    too_large = is_item and isinstance(value, int) and not -(2**63) <= value < 2**64
    if isinstance(value, (int, float, complex)) and not too_large:
        return (), [value]
    raise TypeError
