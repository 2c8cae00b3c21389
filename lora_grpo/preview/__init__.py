"""A few groups of completions before training, and what can be learned from them."""

from lora_grpo.preview.dry_run import dry_run
from lora_grpo.preview.run import preview

__all__ = ["dry_run", "preview"]
