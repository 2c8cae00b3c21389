# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""Push a run to the Hugging Face Hub: `lora-grpo push` in a checkout; see --help."""

import sys

from lora_grpo.cli import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("push"))
