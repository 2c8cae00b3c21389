"""Push a run to the Hugging Face Hub: its adapter, merged model, or GGUF files, with a model card.

    push_to_hub(PushOptions("outputs/gsm8k_lora", "you/gsm8k-lora", dry_run=True))    # prints files and card

    RUN ── files ──► what to upload ─────┐
        ── facts ──► facts ── card ──────┴─► push ── one commit ──► the repository

Repositories are private unless `--public` is passed. A single commit makes all files visible at once. A card includes
only results that were measured on these weights. Tokens and local paths are never uploaded.

push.py           the command and the commit
uploads.py        the kinds of models, with their files in a repository
files.py          selects the files of a folder and rejects damaged ones
private_paths.py  settings without paths of this machine; refuses other text that has one
token.py          finds the Hub token and keeps it secret
facts.py          the base model and its license, the run, the merge, and the evaluations of these weights
card.py           renders README.md: front matter, and text from card.md.jinja
"""

from lora_grpo.hub.push import PushedFiles, PushOptions, push_to_hub
from lora_grpo.hub.token import refuse_tokens_in
