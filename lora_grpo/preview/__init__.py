"""What a run would do, before it trains: `--preview` with the base model's answers, `--dry-run` without weights.

    preview(config, data).diagnosis      # samples 8 groups from the base model
    dry_run(config, data, tokenizer)     # one prompt, and the rewards of its reference answer

sample_groups.py  samples groups with the prompts of the first training steps, and prints them
diagnosis.py      the summary of all groups with 95% intervals, the verdict, its reason, and suggested changes
dry_run.py        prints the settings, one prompt and the rewards of its reference answer, without weights
"""

from lora_grpo.preview.dry_run import dry_run, show_settings
from lora_grpo.preview.sample_groups import Preview, preview
