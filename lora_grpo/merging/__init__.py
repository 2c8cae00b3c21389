"""Merges a LoRA adapter into its base, tensor by tensor, and reports what rounding cost.

    folder = merge(MergeOptions("outputs/gsm8k_lora"))     # outputs/gsm8k_lora/merged
    read_report(folder).retained.overall                   # 0.998: the share of the update that survived

    base + adapter ── base_weights, mapping ──► Plan: what happens to each tensor; no data is read
    Plan ── fidelity ──► bf16, fp16 or fp32: the smallest that keeps 99 % of the update
    Plan + dtype ── outputs, writer ──► shards, written block by block and resumable
    shards ── divergence ──► KL(adapter || merged) next to KL(adapter || base)

cli.py             the flags, and the merge from start to end
base_weights.py    the tensors to merge into: stored, or rounded to NF4 as 4-bit training used them
mapping.py         adapter keys -> outputs; tied.py: whether head and embedding stay one tensor
outputs.py         the arithmetic: LoRA, rsLoRA, DoRA, biases, trained tokens, replaced modules
fidelity.py        what each dtype keeps of the update
writer.py          shards, index and config, in a staging folder that survives a kill
divergence.py      which models and texts to compare; streamed_model.py: their forward pass from disk
report.py          merge_report.json
"""

from lora_grpo.merging.cli import MergeOptions, merge, merged_model
from lora_grpo.merging.report import REPORT, MergeReport, check_current, read_report

__all__ = ["REPORT", "MergeOptions", "MergeReport", "check_current", "merge", "merged_model", "read_report"]
