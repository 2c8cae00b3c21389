"""The starter task: bundled grade-school word problems, graded like GSM8K."""

from __future__ import annotations

import functools

from lora_grpo.tasks import sources
from lora_grpo.tasks.gsm8k import check, gold

__all__ = ["check", "gold", "load"]

load = functools.partial(sources.load_bundled, "starter")
