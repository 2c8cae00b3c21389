"""Merge a LoRA adapter into its base model tensor by tensor, and measure the rounding error.

    folder = merge(MergeOptions("outputs/gsm8k_lora"))     # outputs/gsm8k_lora/merged
    read_report(folder).retained.overall                   # 0.998: the fraction of the update that survived

    base + adapter ── base_weights, mapping ──► MergePlan: the change of each tensor; reads no data
    MergePlan ── fidelity ──► the smallest of bf16, fp16, and fp32 that keeps 99% of the update
    MergePlan + dtype ── outputs, writer ──► shards, written block by block
    shards ── divergence ──► KL(adapter || merged), compared with KL(adapter || base)

merge_model.py     `lora-grpo merge`: its flags, and the whole merge from the plan to the report
base_weights.py    the base's modules, and its tensors as stored or rounded to NF4 to match 4-bit training
mapping.py         maps adapter keys to output tensors, and decides whether head and embedding stay tied
outputs.py         the arithmetic of one tensor: LoRA, rsLoRA, DoRA
fidelity.py        the fraction of the update that each dtype keeps
writer.py          writes shards, index, config, and generation config
divergence.py      computes the KL divergences of a merge, with weights read from disk
report.py          merge_report.json, and the adapter that it names
"""

from lora_grpo.merging.base_weights import empty_model
from lora_grpo.merging.merge_model import MergeOptions, merge, merged_model
from lora_grpo.merging.report import MADE_FROM, REPORT, MergeReport, check_current, read_report, source_adapter
