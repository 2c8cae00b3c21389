"""The GPU check: measures the GPU, runs every row within the time limit, and keeps the table up to date."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_grpo import distributed, starter
from lora_grpo.config import nvidia_gpus, use_one_gpu
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import json_files
from lora_grpo.gpu_check import measured_command
from lora_grpo.gpu_check.random_model import QWEN, build_command
from lora_grpo.gpu_check.row import BACKENDS, ENGINES, CheckSettings, Row, run_row
from lora_grpo.gpu_check.table import write
from lora_grpo.planning import Limits
from lora_grpo.runs import git_revision, now, versions

_REQUIRED = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")
_LEAST_SECONDS = 20
"""A row is skipped if less time than this is left, because it would not finish its first step."""
_OUT_OF_TIME = {"status": "skipped", "reason": "no time left"}
_QUESTION_TOKENS = 440
"""Length of a question. With system prompt and chat template, it is close to the 512 prompt tokens of the presets."""
_MEASURE_SECONDS = 120
_MEASURE = "import json; from lora_grpo.planning.roofline import measure; print(json.dumps(measure()))"


@dataclass(frozen=True)
class Options:
    """Options of `check_gpu`."""

    minutes: float = 8.0
    """Time limit of the whole check, in minutes. Rows that do not start in time are reported as skipped."""
    output: Path = Path("outputs/check_gpu")
    """Folder for the table (results.md), the measurements (results.json) and the log of every row."""


def check_gpu(options: Options, recipe: Path) -> None:
    """Measure the GPU, run every row, and write and print the table.

    Args:
        options: the options.
        recipe: the script that each row runs.

    Raises:
        UserError: no GPU, a missing package, or an invalid option.
        RunError: a row failed, or no row ran.
    """
    started = time.monotonic()
    gpus, why_none = nvidia_gpus()
    if not gpus:
        raise UserError(
            f"no NVIDIA GPU found ({why_none}); run this where `nvidia-smi` lists one, or try the CPU: "
            "python recipes/gsm8k_lora.py --preset starter"
        )
    if not 0 < options.minutes < math.inf:
        raise UserError(f"--minutes is {options.minutes:g}; expected more than 0")
    if distributed.world_size() > 1:
        raise UserError(f"the check runs in one process, got WORLD_SIZE={distributed.world_size()}; start one process")
    if options.output.is_file():
        raise UserError(f"--output {options.output} is a file; expected a folder")
    if missing := [name for name in _REQUIRED if importlib.util.find_spec(name) is None]:
        raise UserError(f"training needs {', '.join(missing)}, not installed; run `pip install -e .[gpu]`")
    use_one_gpu()  # also applies to the processes started below
    measured = _measure_limits()
    if measured["device"] == "cpu":
        raise UserError(
            f"nvidia-smi lists {gpus[0].name}, but torch {versions()['torch']} sees no GPU; install torch's CUDA build "
            "or a newer driver"
        )
    machine = {
        "gpu": gpus[0].name,
        "memory_gib": round(gpus[0].memory_gib, 2),
        "measured": measured,
        "versions": versions(),
        "git_revision": git_revision(),
        "started": now(),
        "command": sys.argv,
    }
    limits = Limits(measured["copy_gb_per_second"], measured["matmul_tflops"])
    seconds = 60 * options.minutes - (time.monotonic() - started)
    results = run_rows(all_rows(), CheckSettings(recipe, options.output, seconds, machine=machine, limits=limits))
    print((options.output / "results.md").read_text(encoding="utf-8"))
    if failed := [result["row"] for result in results if result["status"] == "failed"]:
        raise RunError(f"{len(failed)} of {len(results)} rows failed ({', '.join(failed)}); see the logs in the table")
    if not any(result["status"] == "ran" for result in results):
        raise RunError("no row ran; the table lists the reasons")


def all_rows() -> list[Row]:
    """Return all combinations, the most informative first: the smallest model, then vLLM, then the rest."""
    rows = [Row(*model, engine, backend) for model in QWEN.items() for engine in ENGINES for backend in BACKENDS]
    smallest = next(iter(QWEN))
    return sorted(rows, key=lambda row: 0 if row.model == smallest else 1 + BACKENDS.index(row.backend))


def run_rows(rows: Sequence[Row], settings: CheckSettings) -> list[dict[str, Any]]:
    """Run the rows one after another. The files in the output folder always contain the results so far.

    Args:
        rows: the rows; a model is built before its first row and deleted after its last.
        settings: settings of the check.

    Returns:
        One result per row: `row`, `status` (ran, skipped or failed), `reason`, and the measurements.
    """
    deadline = time.monotonic() + settings.seconds
    results = [asdict(row) | {"row": row.name, "status": "not run", "reason": "interrupted"} for row in rows]
    settings.output.mkdir(parents=True, exist_ok=True)
    write(settings.output, settings.machine, results)
    with tempfile.TemporaryDirectory(prefix="lora_grpo-check-") as name:
        folder = Path(name)
        write_problems(folder)
        not_built: dict[str, dict[str, str]] = {}
        for index, (row, result) in enumerate(zip(rows, results, strict=True)):
            left, model = deadline - time.monotonic(), folder / f"random-{row.model}"
            if row.missing_packages:
                result |= {"status": "skipped", "reason": f"{' and '.join(row.missing_packages)} not installed"}
            elif left < min(_LEAST_SECONDS, settings.seconds / 10):
                result |= _OUT_OF_TIME
            else:
                print(f"{row.name}: {left:.0f} s left", file=sys.stderr)
                if not model.exists() and row.model not in not_built:
                    not_built |= _build(row, model, deadline)
                result |= not_built.get(row.model) or run_row(row, settings, folder, model, deadline)
            reason = f" ({result['reason']})" if result["reason"] else ""
            print(f"{row.name}: {result['status']}{reason}", file=sys.stderr)
            write(settings.output, settings.machine, results)
            if row.model not in {later.model for later in rows[index + 1 :]}:
                shutil.rmtree(model, ignore_errors=True)
    return results


def _build(row: Row, model: Path, deadline: float) -> dict[str, dict[str, str]]:
    """Build the row's model. If this fails, return the result for all rows of the model."""
    log = model.parent / "build.log"
    done = measured_command.run(build_command(model, row.config), log, deadline - time.monotonic())
    if done.exit_code == 0:
        return {}
    failed = {"status": "failed", "reason": f"the random model was not built: {done.message}"}
    return {row.model: _OUT_OF_TIME if done.exit_code is None else failed}


def _measure_limits() -> dict[str, Any]:
    """Measure the GPU's rates in a separate process, which frees its GPU memory when it exits."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=False, timeout=_MEASURE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"torch did not answer for {_MEASURE_SECONDS} s; is the GPU's driver hanging?") from None
    if done.returncode:
        raise UserError(f"torch cannot use the GPU: {(done.stderr.strip().splitlines() or ['no error output'])[-1]}")
    limits: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return limits


def write_problems(folder: Path) -> None:
    """Write training and evaluation rows in GSM8K's format, with questions as long as the memory plan assumes."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(starter.model_path() / "tokenizer.json"))
    for split, count in (("train", 64), ("eval", 2)):
        rows = []
        for problem in starter.problems("starter", split)[:count]:
            text = f"{problem['question']} " * (_QUESTION_TOKENS // 10)  # at least ten tokens each
            end = tokenizer.encode(text).offsets[_QUESTION_TOKENS][0]
            rows.append({"question": text[:end], "answer": problem["answer"]})
        (folder / f"{split}.jsonl").write_text(json_files.dump_lines(rows), encoding="utf-8")
