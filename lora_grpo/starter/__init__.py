"""The embedded starter: a tiny language model and its problems, to run GRPO on a laptop without a download.

    problems.pool("train", 4000)                            # distinct word problems; deterministic
    code_problems.pool("eval", 1000)                        # problems about tiny Python functions, with unit tests
    AutoModelForCausalLM.from_pretrained(model_path())      # a model pretrained on them

families.py, problems.py            word problems: templates by family, and seeded generation
code_families.py, code_problems.py  the same for problems about tiny Python functions
pools.py                            splits by hash, and pools of distinct problems
model/                              the model, built by tools/build_starter.py
"""

from pathlib import Path

from lora_grpo.starter import code_problems, problems

__all__ = ["code_problems", "model_path", "problems"]


def model_path() -> Path:
    """Return the folder of the embedded model, for `AutoModelForCausalLM.from_pretrained`."""
    return Path(__file__).parent / "model"
