"""What all parts of report.json have in common."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]
"""Lower and upper bound of a 95% interval, as fractions."""


class Schema(BaseModel):
    """Part of report.json: strict types, finite numbers, unknown keys ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)


def percent(value: float, interval: Sequence[float], sign: str = "") -> str:
    """Format a fraction and its interval as percentages, such as "37.5 [12.0, 61.3]".

    Args:
        sign: "+" to show the sign of positive numbers too.
    """
    low, high = interval
    return f"{100 * value:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
