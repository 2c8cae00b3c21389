"""What a stand-in for a recipe does in a case of the GPU check, without a model: it reads flags and leaves files.

from helpers.stand_in_recipe import finish, flags, hang

if flags.bits == "16":
    sys.exit("error: it does not fit")
finish()
"""

import argparse
import json
import os
import time
from pathlib import Path

_parser = argparse.ArgumentParser()
_parser.add_argument("--model.engine", dest="engine")
_parser.add_argument("--sampling.backend", dest="backend")
_parser.add_argument("--model.bits", dest="bits")
_parser.add_argument("--output-dir", dest="output_dir", type=Path)
_parser.add_argument("--resume", dest="resumes", action="store_true")
flags, _ = _parser.parse_known_args()

_STEP_SECONDS = {1: 50.0, 2: 10.0, 3: 12.0, 4: 11.0}
"""By step. The first one compiles. The median of the others is 11 s."""
_RESUMED_STEP_SECONDS = {5: 40.0}


def finish(gradient=0.25, slowness=1.0):
    """Leave the files of a run of four steps, or of one more.

    Args:
        gradient: norm of the gradient in each step.
        slowness: what the seconds of a step are multiplied by.
    """
    flags.output_dir.mkdir(exist_ok=flags.resumes)
    record = {
        "config": {"train": {"micro_batch_size": None}},
        "memory": {"micro_batch_size": 16, "planned_phases_gib": {"sampling": 3.5, "training": 4.25}},
        "logprob_check": {"difference": 0.0123, "tolerance": 0.05, "moved": 0.3},
        "torch_peak_gib": 3.0 if flags.bits == "4" else 3.6,
    }
    (flags.output_dir / "run.json").write_text(json.dumps(record))
    print("[Unsloth] GRPO seq-packing (grad) verify: T=132 maxseg=66 packed-vs-perrow max|d|=0.0312", flush=True)
    with (flags.output_dir / "metrics.jsonl").open("a") as file:
        for step, seconds in (_RESUMED_STEP_SECONDS if flags.resumes else _STEP_SECONDS).items():
            file.write(json.dumps(_metrics(step, seconds * slowness, gradient)) + "\n")


def _metrics(step, seconds, gradient):
    return {
        "step": step,
        "step_time": seconds,
        "time/rollouts": seconds / 2,
        "time/rewards": 0.5,
        "time/training": 4.0,
        "rollouts/tokens_per_second": 66000 / seconds,
        "grad_norm": gradient,
        "completions/mean_length": 512.0,
        "sampling/sampling_logp_difference/mean": 0.02,
    }


def hang(pid_file=None):
    """Write the id of this process to a file, and do not end."""
    if pid_file:
        Path(pid_file).write_text(str(os.getpid()))
    time.sleep(600)
