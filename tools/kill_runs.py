"""Kill runs with SIGKILL at random moments, resume them, and compare them with a run that was not killed.

    python tools/kill_runs.py                    # every kind of run, 20 moments each; hours on two cores
    python tools/kill_runs.py sft --moments 5

`game` and `tools` continue from an adapter of SFT:

    python recipes/sft_lora.py --preset starter --task recipes/guess_lora.py --sampling.max-completion-tokens 160 \\
        --train.max-steps 100 --output-dir outputs/sft_guess
    python recipes/sft_lora.py --preset laptop --task recipes/sql_lora.py --train.prompts-per-step 4 \\
        --train.max-steps 32 --train.learning-rate 5e-4

A run passes if it ends with the same adapter and the same samples of the evaluation, to the byte, and the same metrics
of every step except times. It must also leave no temporary file. A run that is killed before it has written anything
starts again. The table has one row per kind, with the moments that failed.
"""

import argparse
import json
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lora_grpo.cli import run_command
from lora_grpo.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
_SHORT = "--train.checkpoint-steps 4 --eval.num-samples 1 --eval.k 1 --data.eval-limit 8"
_TINY = (
    f"{_SHORT} --train.max-steps 30 --train.prompts-per-step 2 --sampling.num-generations 4 --train.micro-batch-size 4 "
    "--train.completions-steps 1"
)
_TOOLS = (
    "--train.checkpoint-steps 1 --eval.num-samples 1 --eval.k 1 --data.eval-limit 2 --train.max-steps 3 "
    "--train.prompts-per-step 1 --sampling.num-generations 4 --train.micro-batch-size 4 --train.completions-steps 1"
)
KINDS = {
    "gsm8k": f"recipes/gsm8k_lora.py --preset starter {_TINY} --monitor.rows 16 --monitor.every-steps 6",
    "code": f"recipes/code_lora.py --preset starter {_TINY}",
    "filter": f"recipes/gsm8k_lora.py --preset starter {_TINY} --data.filter-by-difficulty",
    "game": f"recipes/guess_lora.py --preset starter {_TINY} --lora.from outputs/sft_guess",
    "sft": f"recipes/sft_lora.py --preset starter {_SHORT} --train.max-steps 30",
    "tools": f"recipes/sql_lora.py --preset laptop {_TOOLS} --lora.from outputs/sft_lora",
}
"""Recipes with short runs of the bundled model, and of SmolLM2-135M with tools, after its SFT."""
_TIMES = ("time", "runtime", "seconds", "per_second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        raise UserError(f"no kind {', '.join(sorted(unknown))}; expected {', '.join(KINDS)}")
    generator = random.Random(options.seed)
    print("| run | seconds | moments | killed in step | same to the byte |\n|---|---:|---:|---|---:|")
    for kind in options.kinds or KINDS:
        with tempfile.TemporaryDirectory(prefix="lora_grpo-kills-") as folder:
            whole = Path(folder) / "whole"
            *times, seconds = run(kind, whole)
            expected, ends, same = outcome(whole), [], 0
            for number in range(options.moments):
                killed, moment = Path(folder) / str(number), generator.uniform(0, seconds)
                step = sum(time <= moment for time in times)
                run(kind, killed, kill_at=(step, moment - max((0.0, *times[:step]))))
                ends.append(steps(killed))
                resumes = ["--resume"] if (killed / "run.json").exists() else []
                run(kind, killed, *resumes)
                wrong = [name for name, value in outcome(killed).items() if value != expected.get(name)]
                same += not wrong
                if wrong:
                    print(f"{kind}: killed in step {ends[-1]}, other {', '.join(wrong)}", file=sys.stderr, flush=True)
        shown = ", ".join(f"{step}: {ends.count(step)}" for step in sorted(set(ends)))
        print(f"| {kind} | {seconds:.0f} | {options.moments} | {shown} | {same} |", flush=True)


def run(kind: str, folder: Path, *more: str, kill_at: tuple[int, float] | None = None) -> list[float]:
    """Run a recipe to its end, or kill it some seconds after a step, and return the times of its steps and its end.

    A moment is given by a step, because other load changes the time that a run takes.
    """
    command = [sys.executable, *shlex.split(KINDS[kind]), "--output-dir", str(folder), *more]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        started, times = time.monotonic(), [0.0]
        while process.poll() is None:
            now = time.monotonic() - started
            times += [now] * (steps(folder) - len(times) + 1)
            if kill_at and len(times) > kill_at[0] and now > times[kill_at[0]] + kill_at[1]:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return times[1:]
            time.sleep(0.02)
        if process.returncode:
            errors.seek(0)
            raise UserError(f"`{shlex.join(command)}` failed: {errors.read().strip().splitlines()[-1:]}")
    return [*times[1:], time.monotonic() - started]


def steps(folder: Path) -> int:
    """Return the number of steps that a run has written. Called all the time, so it does not parse them."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of every step, without times."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [{name: value for name, value in json.loads(line).items() if not any(t in name for t in _TIMES)}
            for line in lines]  # fmt: skip


def outcome(folder: Path) -> dict[str, object]:
    """Return what must not depend on interruptions."""
    files = ["adapter/adapter_model.safetensors", *(f"evaluation/{name}" for name in samples(folder))]
    found: dict[str, object] = {name: (folder / name).read_bytes() for name in files}
    # Resources of the machine, such as memory, differ between runs.
    kept = [{name: value for name, value in step.items() if "memory" not in name} for step in metrics(folder)]
    left = sorted(path.name for path in folder.rglob("*") if path.name.endswith(".partial"))
    return found | {"metrics": kept, "temporary files": left}


def samples(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "evaluation").glob("*.samples.jsonl"))


if __name__ == "__main__":
    sys.exit(run_command(main))
