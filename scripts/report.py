# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""Write a report on a run: `lora-grpo report` in a checkout; see --help."""

import sys

from lora_grpo.cli import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("report"))
