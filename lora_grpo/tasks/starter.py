"""The starter task: bundled grade-school word problems, graded like GSM8K."""

from __future__ import annotations

import functools

from lora_grpo.tasks import sources
from lora_grpo.tasks.gsm8k import gold_completion, grade

__all__ = ["gold_completion", "grade", "load"]

load = functools.partial(sources.load_bundled, "starter")
