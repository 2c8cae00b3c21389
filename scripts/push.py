"""Push a run to the Hugging Face Hub, private at first, with a card of what was measured.

    python scripts/push.py outputs/gsm8k_lora YOU/gsm8k-lora --dry-run       # every file and the card; sends nothing
    python scripts/push.py outputs/gsm8k_lora YOU/gsm8k-lora
    python scripts/push.py outputs/gsm8k_lora YOU/gsm8k-merged --what merged

The token is that of `hf auth login`, or HF_TOKEN; never an argument. All files appear in one change. Interrupted, the
same command goes on and sends what is missing.
"""

import sys

from lora_grpo.cli import read_flags, run_command
from lora_grpo.hub import Options, push_to_hub, refuse_tokens_in


def main() -> None:
    refuse_tokens_in(sys.argv[1:])
    push_to_hub(read_flags(Options, sys.argv[1:], prog="push.py", description=str(__doc__)))


if __name__ == "__main__":
    sys.exit(run_command(main))
