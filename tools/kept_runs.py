"""Runs that a tool trains once: a repeated command keeps those that are complete, and starts the others again."""

import json
import subprocess
import sys
from pathlib import Path

from benchmark_step import ROOT, environment


def train(run: Path, recipe: str, *flags: object) -> None:
    """Train a run, or the control that its folder is named after, unless it is complete."""
    record = run / "run.json"
    if record.is_file() and json.loads(record.read_text(encoding="utf-8"))["status"] == "complete":
        return
    print(f"{run.name}: {recipe}", *flags, flush=True)
    execute(ROOT, [f"recipes/{recipe}.py", "--output-dir", run.resolve(), "--overwrite", *flags])


def execute(tree: Path, command: list) -> None:
    """Run a Python file of a tree with the tree's package, or exit with its errors."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=tree, env=environment(tree), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"exit code {done.returncode} from {' '.join(map(str, command))}\n{done.stderr}")
