"""The short GPU check with a stand-in for the recipe, to be interrupted or killed.

python short_gpu_check.py RECIPE OUTPUT
"""

import importlib.util
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/

from helpers import stand_in_model

from lora_grpo.cli import run_command
from lora_grpo.gpu_check import measure
from lora_grpo.gpu_check.measure import EngineCase, Options

CASES = [EngineCase("peft", "transformers"), EngineCase("unsloth", "transformers"), EngineCase("unsloth", "vllm")]

if __name__ == "__main__":
    recipe, output = map(Path, sys.argv[1:])
    measure.build_command = stand_in_model.build_command
    measure._TRY_TORCH = ""
    measure.SHORT_CASES = CASES
    importlib.util.find_spec = lambda name: name  # no package is missing
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
    sys.exit(run_command(lambda: measure.check_gpu(Options(1.0, output, short=True), recipe)))
