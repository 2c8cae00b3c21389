# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""Evaluate a run, an adapter, a model or a file of samples: `lora-grpo evaluate` in a checkout; see --help."""

import sys

from lora_grpo.cli import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("evaluate"))
