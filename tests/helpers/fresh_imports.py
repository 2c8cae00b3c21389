"""Run code in a fresh interpreter and see which heavy packages it loads."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LESSON = ROOT / "recipes" / "grpo_from_scratch.py"  # a program of its own, which trains without the pipeline

RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.py") if path != LESSON)

HEAVY = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "bitsandbytes",
    "vllm",
    "unsloth",
    "accelerate",
    "matplotlib",
    "starlette",
    "uvicorn",
)


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT
    )


_RUN_RECIPE = """
import json, runpy, sys
recipe, heavy, *command_lines = sys.argv[1:]
for line in command_lines:
    sys.argv = [recipe, *json.loads(line)]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    print("loaded", [package for package in heavy.split(",") if package in sys.modules], "code", code)
"""


def run_recipe(recipe, *command_lines, heavy=HEAVY):
    """Run a recipe once for each list of arguments, all in one fresh interpreter.

    After each, print which heavy packages are loaded and the exit code.
    """
    return run(_RUN_RECIPE, recipe, ",".join(heavy), *(json.dumps(arguments) for arguments in command_lines))
