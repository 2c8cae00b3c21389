"""Write the bundled problems of the `starter` and `starter-code` tasks, as gzipped JSON Lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from starter_model import code_problems, problems

from lora_grpo import starter

SIZES = {"train": 4000, "eval": 1000}
"""Problems in each split of a task."""


def rows(task: str, split: str) -> list[dict[str, Any]]:
    """Generate the rows of a task and split. Ids are `<task>/<split>/<index>`."""
    if task == "starter":
        columns = [
            {
                "question": problem.question,
                "answer": problem.answer,
                "family": problem.family,
                "difficulty": problem.difficulty,
            }
            for problem in problems.pool(split, SIZES[split])
        ]
    else:
        columns = [
            {
                "question": problem.question,
                "answer": problem.solution,
                "entry_point": problem.function,
                "test": problem.tests,
                "prelude": "",
                "family": problem.family,
            }
            for problem in code_problems.pool(split, SIZES[split])
        ]
    return [{"id": f"{task}/{split}/{index:05d}", **row} for index, row in enumerate(columns)]


def main(folder: Path) -> None:
    """Write one file for each task and split."""
    folder.mkdir(exist_ok=True)
    for task in ("starter", "starter-code"):
        for split in SIZES:
            text = "".join(json.dumps(row) + "\n" for row in rows(task, split))
            (folder / f"{task}-{split}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(Path(starter.__file__).parent / "data")
