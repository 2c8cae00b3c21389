"""From arguments to a checked configuration, and from errors to exit codes."""

from lora_grpo.cli.arguments import parse
from lora_grpo.cli.main import run_command
from lora_grpo.cli.script_flags import read_flags

__all__ = ["parse", "read_flags", "run_command"]
