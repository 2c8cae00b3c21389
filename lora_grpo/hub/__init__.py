"""Pushes a run to the Hugging Face Hub: its adapter, its merged model or its GGUF files, with a model card.

    push_to_hub(PushOptions("outputs/gsm8k_lora", "you/gsm8k-lora", dry_run=True))    # prints files and card

    RUN ── files ──► what to upload ──┐
        ── facts ──► what is known ───┼─► push ── one commit ──► the repository
                       └── card ──────┘

Repositories are private unless `--public` is passed. The commit makes all files visible at once; before it nobody sees
any. A card states only what was measured of these weights, and no token or path of this machine is uploaded.

push.py           the command, and the one commit
files.py          which files are uploaded, and which are refused
token.py          the Hub's token, and keeping it secret
facts.py          the base model, its license, the run
evaluations.py    the evaluations that are of these weights
card.py           README.md, from card.md.jinja
metadata.py       the card's front matter and the Hub's evaluation results
"""

from lora_grpo.hub.push import PushOptions, push_to_hub
from lora_grpo.hub.token import refuse_tokens_in

__all__ = ["PushOptions", "push_to_hub", "refuse_tokens_in"]
