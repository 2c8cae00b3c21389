"""The starter code task: bundled problems about tiny Python functions, graded with unit tests."""

from __future__ import annotations

import functools

from lora_grpo.tasks import sources
from lora_grpo.tasks.code_grading import check, check_many, gold

__all__ = ["check", "check_many", "gold", "load"]

load = functools.partial(sources.load_bundled, "starter-code")
