"""Push a run to the Hugging Face Hub, with a model card that reports the measured results.

    python scripts/push.py outputs/gsm8k_lora YOU/gsm8k-lora --dry-run       # list files, print the card
    python scripts/push.py outputs/gsm8k_lora YOU/gsm8k-lora
    python scripts/push.py outputs/gsm8k_lora YOU/gsm8k-merged --what merged

The repository is private unless --public is passed. The token comes from `hf auth login` or HF_TOKEN, never from an
argument. All files are uploaded in a single commit. If the upload is interrupted, run the same command to upload the
missing files.
"""

import sys

from lora_grpo.cli import read_flags, run_command
from lora_grpo.hub import PushOptions, push_to_hub, refuse_tokens_in


def main() -> None:
    refuse_tokens_in(sys.argv[1:])
    push_to_hub(read_flags(PushOptions, sys.argv[1:], prog="push.py", description=str(__doc__)))


if __name__ == "__main__":
    sys.exit(run_command(main))
