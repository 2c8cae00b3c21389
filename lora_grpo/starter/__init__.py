"""The embedded starter: a tiny language model and its problems, so that GRPO runs on a laptop without a download.

families.py     how a question and its solution are worded, family by family
problems.py     seeded grade-school word problems; train and eval cannot share one
corpus.py       what the model was pretrained on: careful, careless and unformatted answers to train problems
pretraining.py  how the model was made of it: tokenizer, shape, phases
model/          the model itself, built by scripts/build_starter.py
"""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """Return the folder of the embedded model, in the layout `AutoModelForCausalLM.from_pretrained` reads."""
    return Path(__file__).parent / "model"
