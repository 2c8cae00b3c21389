"""Previews a run before training: a few sampled groups with their rewards, and whether GRPO can learn from them.

    preview(config, data)     # --preview: samples 8 groups from the base model and prints a verdict with suggestions
    show_settings(config)     # --dry-run: settings, before anything is loaded
    dry_run(config, data)     # --dry-run: one prompt and the rewards of its reference answer; no weights

    prompts ──► base model ──► rewards ──► groups ──► Summary ──► Prediction: can learn, or what to change

run.py         samples groups from the base model, with the prompts of the first training steps; --dry-run
groups.py      a group, and the summary of all groups with 95% intervals
diagnosis.py   the verdict, its reason, and what to change
page.py        prints the preview and the forecast
"""

from lora_grpo.preview.run import dry_run, preview, show_settings

__all__ = ["dry_run", "preview", "show_settings"]
