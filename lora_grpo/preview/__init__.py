"""Looks at a run before it trains: a few groups with their rewards, and whether GRPO can learn from them.

    preview(config, data)     # --preview: samples 8 groups from the base model, and prints a verdict with suggestions
    dry_run(config, data)     # --dry-run: settings, one prompt and the rewards of its reference answer; no weights

    prompts ──► base model ──► rewards ──► groups ──► Summary ──► Prediction: can learn, or what to change

run.py         samples the groups of the first training steps
groups.py      a group, and what all groups add up to, with 95 % intervals
diagnosis.py   the verdict, its reason, and what to change
page.py        the preview as text
dry_run.py     everything that can be shown without the model's weights
"""

from lora_grpo.preview.dry_run import dry_run
from lora_grpo.preview.run import preview

__all__ = ["dry_run", "preview"]
