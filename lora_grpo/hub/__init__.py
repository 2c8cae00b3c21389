"""The Hub: files, model card and push."""

from lora_grpo.hub.cli import Options, push
from lora_grpo.hub.token import refuse_tokens_in

__all__ = ["Options", "push", "refuse_tokens_in"]
