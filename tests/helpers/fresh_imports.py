"""Run code in a fresh interpreter and see which heavy packages it loads."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

RECIPES = sorted((ROOT / "recipes").glob("*.py"))

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
)


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT
    )


RUN_RECIPE = (
    "import runpy, sys\n"
    "recipe, heavy = sys.argv[1], sys.argv[2].split(',')\n"
    "sys.argv = [recipe, *sys.argv[3:]]\n"
    "try:\n"
    "    runpy.run_path(recipe, run_name='__main__')\n"
    "except SystemExit as ended:\n"
    "    code = ended.code\n"
    "print('loaded', [package for package in heavy if package in sys.modules], 'code', code)\n"
)
