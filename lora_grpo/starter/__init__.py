"""The embedded starter: a tiny language model and its problems, so that GRPO runs on a laptop without a download.

families.py, problems.py            word problems: how they are worded, family by family; seeded draws, split by a hash
code_families.py, code_problems.py  the same for problems about tiny Python functions, with unit tests
pools.py                            as many of either as are asked for, no question twice
code_slips.py                       what commonly goes wrong in such a function
code_manners.py                     how the model answers code problems: careful, careless or unformatted
corpus.py                           how it answers word problems, and all that it was pretrained on: train problems only
pretraining.py                      how the model was made of it: tokenizer, shape, phases
model/                              the model itself, built by scripts/build_starter.py
"""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """Return the folder of the embedded model, in the layout `AutoModelForCausalLM.from_pretrained` reads."""
    return Path(__file__).parent / "model"
