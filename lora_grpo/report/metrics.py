"""What a run's metrics hold: its training method, its rewards, and the values that can be shown."""

from collections.abc import Sequence
from typing import Any

from lora_grpo.runs import Line, RunFiles


def training_method(run: RunFiles) -> str:
    """Return `grpo` or `sft`."""
    return str(run.record["config"]["method"])


def reward_names(metrics: Sequence[Line]) -> list[str]:
    """Return the names of the rewards in lines of metrics.jsonl, in the order of their first occurrence."""
    names: dict[str, None] = {}  # an ordered set
    for line in metrics:
        for metric in line:
            if metric.startswith("rewards/") and metric.endswith("/mean"):
                names[metric.removeprefix("rewards/").removesuffix("/mean")] = None
    return list(names)


def reward_metric(name: str) -> str:
    """Return the metric with a reward's mean, before its weight."""
    return f"rewards/{name}/mean"


def is_number(value: Any) -> bool:
    """Return whether a value can be plotted. It is None if a reward graded no row of the step."""
    return isinstance(value, int | float) and not abs(value) > 1e99
