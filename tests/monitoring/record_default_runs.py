"""Record the monitored metrics of real runs, for test_alarms.py.

    python tests/monitoring/record_default_runs.py RUN0 RUN1 ...

The runs are those of `python recipes/gsm8k_lora.py --preset starter --seed N --output-dir RUN_N`.
"""

import gzip
import json
import sys
from pathlib import Path

KEYS = ("step", "loss", "grad_norm", "reward", "frac_reward_zero_std", "entropy", "completions/clipped_ratio")
KEYS += ("sampling/sampling_logp_difference/mean",)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def recorded(run):
    """Yield the steps and validation passes of a run in the order in which the monitor processed them."""
    seed = json.loads((run / "run.json").read_text(encoding="utf-8"))["seed"]
    passes = {int(path.stem.removeprefix("step-")): lines(path) for path in (run / "validation").glob("step-*.jsonl")}
    for step in [{"step": 0}, *lines(run / "metrics.jsonl")]:
        if step["step"]:
            yield {"seed": seed} | {name: step[name] for name in KEYS}
        if rows := passes.get(step["step"]):
            passed = {row["id"]: row["passed"] for row in rows}
            yield {"seed": seed, "step": step["step"], "rewards": [row["reward"] for row in rows], "passed": passed}


if __name__ == "__main__":
    text = "".join(json.dumps(line) + "\n" for run in sys.argv[1:] for line in recorded(Path(run)))
    target = Path(__file__).parent / "default_runs.jsonl.gz"
    target.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{target}: {len(sys.argv) - 1} runs, {target.stat().st_size} bytes")
