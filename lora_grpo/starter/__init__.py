"""The embedded starter: a tiny language model and its problems, so that GRPO runs on a laptop without a download.

families.py, problems.py            word problems: templates by family; seeded sampling, split by a hash
code_families.py, code_problems.py  the same for problems about tiny Python functions, with unit tests
pools.py                            as many distinct problems as requested
model/                              the model itself, built by tools/build_starter.py
"""

from pathlib import Path

from lora_grpo.starter import code_problems, problems

__all__ = ["code_problems", "model_path", "problems"]


def model_path() -> Path:
    """Return the folder of the embedded model, in the layout `AutoModelForCausalLM.from_pretrained` reads."""
    return Path(__file__).parent / "model"
