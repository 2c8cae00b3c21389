# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""Verify that a merged model, a file or a server uses an adapter: `lora-grpo verify` in a checkout; see --help."""

import sys

from lora_grpo.cli import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("verify"))
