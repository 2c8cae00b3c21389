# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""Check whether this GPU can run lora_grpo: `lora-grpo check-gpu` in a checkout; see --help."""

import sys

from lora_grpo.cli import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("check-gpu"))
