"""Merging: a LoRA adapter into its base, tensor by tensor."""

from lora_grpo.merging.cli import Options, merge_and_report, merged_model
from lora_grpo.merging.report import REPORT, check_current, read_report

__all__ = ["REPORT", "Options", "check_current", "merge_and_report", "merged_model", "read_report"]
