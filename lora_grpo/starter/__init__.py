"""The bundled starter: a tiny language model and its problems, to run GRPO on a laptop without a download.

    problems("starter", "train")                            # word problems with worked solutions
    problems("starter-code", "eval")                        # tiny Python functions with unit tests
    AutoModelForCausalLM.from_pretrained(model_path())      # a model pretrained on them

data/     4,000 training and 1,000 evaluation problems of each task; no problem is in both splits
model/    the model

Both were made in tools/: `build_starter_data.py` generates the problems, and `build_starter.py` trains the model.
"""

import gzip
import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


def model_path() -> Path:
    """Return the folder of the bundled model, for `AutoModelForCausalLM.from_pretrained`."""
    return _FOLDER / "model"


def problems(task: str, split: str) -> list[dict[str, Any]]:
    """Return the rows of a task ("starter" or "starter-code") and split ("train" or "eval")."""
    path = _FOLDER / "data" / f"{task}-{split}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
