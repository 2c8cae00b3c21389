"""scripts/evaluate.py in small units, noting in a file what is sampled and what is run.

python tests/helpers/counted_evaluate.py NOTES COMPLETIONS-IN-A-UNIT FLAGS...
"""

import os
import runpy
import sys
from pathlib import Path

from lora_grpo import sandbox
from lora_grpo.evaluation import units
from lora_grpo.sampling.sampler import Sampler

notes = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
units.UNIT_SIZE = int(sys.argv[2])
stream, run = Sampler.stream, sandbox.run


def noted_stream(self, prompts, params, seeds):
    groups = list(stream(self, prompts, params, seeds))
    tokens = sum(len(each.token_ids) for _, group in groups for each in group)
    os.write(notes, f"completions {len(seeds)} tokens {tokens}\n".encode())
    return groups


def noted_run(programs):
    verdicts = run(programs)
    os.write(notes, f"programs {len(programs)}\n".encode())
    return verdicts


Sampler.stream, sandbox.run = noted_stream, noted_run
sys.argv = [str(Path(__file__).parents[2] / "scripts" / "evaluate.py"), *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
