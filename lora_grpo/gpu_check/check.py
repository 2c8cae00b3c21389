"""Does the real recipe run on this card, how fast, and did the memory plan tell the truth? One row an answer.

A row is a model's size, an engine and a sampling backend. It runs the recipe as a user would, as a command of its own,
on random weights and problems made here: nothing is downloaded.
"""

from __future__ import annotations

import contextlib
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
from lora_grpo.gpu_check import pretended_card, timed_command
from lora_grpo.gpu_check.random_model import QWEN, build_command
from lora_grpo.gpu_check.row import BACKENDS, ENGINES, Plan, Row, missing_packages, run_row
from lora_grpo.gpu_check.table import write
from lora_grpo.planning import Limits
from lora_grpo.runs import git_revision, now, versions
from lora_grpo.starter import problems

_NEEDED = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")
_LEAST_SECONDS = 20
"""No row is begun with less time than this: it would not reach its first step."""
_NO_TIME = {"status": "skipped", "reason": "the time is used up"}
_QUESTION_TOKENS = 440
"""With the system prompt and the template near the 512 tokens that the presets leave a prompt."""
_MEASURE_SECONDS = 120
_MEASURE = "import json; from lora_grpo.gpu_limits import measure; print(json.dumps(measure()))"


@dataclass(frozen=True)
class Options:
    """Flags."""

    minutes: float = 8.0
    """All of it ends in this time; rows that are left are named."""
    pretend_gb: float | None = None
    """Behave as a card with this much memory, less than there is."""
    output: Path = Path("outputs/check_gpu")
    """Folder of the table (results.md), the figures (results.json) and every row's log."""


def check_gpu(options: Options, recipe: Path) -> None:
    """Measure the card, run every row, and leave and print the table.

    Args:
        options: the flags.
        recipe: the script that each row runs.

    Raises:
        UserError: there is no GPU, the packages of a run are missing, or a flag has an impossible value.
        RunError: a row failed.
    """
    started = time.monotonic()
    gpus, why_none = nvidia_gpus()
    if not gpus:
        raise UserError(
            f"looked for an NVIDIA GPU with nvidia-smi and found none ({why_none}); run this where `nvidia-smi` lists "
            "one, or see the kit work without: python recipes/gsm8k_lora.py --preset starter"
        )
    if not 0 < options.minutes < math.inf:
        raise UserError(f"--minutes is {options.minutes:g}; expected more than 0")
    # A card of 16 GB reports a little less.
    if options.pretend_gb is not None and not 1 <= options.pretend_gb <= math.ceil(gpus[0].memory_gib):
        raise UserError(
            f"--pretend-gb is {options.pretend_gb:g}; expected 1 to the {gpus[0].memory_gib:.1f} of {gpus[0].name}"
        )
    if distributed.world_size() > 1:
        raise UserError(f"one process checks the card, and {distributed.world_size()} were started; start one")
    if options.output.is_file():
        raise UserError(f"--output {options.output} is a file; give a folder")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"training needs {', '.join(missing)}, not installed here; run `pip install -e .[gpu]`")
    use_one_gpu()  # and every process that is started here
    measured = _measured_limits()
    if measured["device"] == "cpu":
        raise UserError(
            f"nvidia-smi lists {gpus[0].name}, but torch {versions()['torch']} sees no GPU; install torch's CUDA build "
            "or a newer driver"
        )
    about = {
        "gpu": gpus[0].name,
        "memory_gib": round(gpus[0].memory_gib, 2),
        "pretended_gib": options.pretend_gb,
        "measured": measured,
        "versions": versions(),
        "git_revision": git_revision(),
        "started": now(),
        "command": sys.argv,
    }
    plan = Plan(
        recipe,
        options.output,
        60 * options.minutes - (time.monotonic() - started),
        pretend_gib=options.pretend_gb,
        about=about,
        limits=Limits(measured["copy_gb_per_second"], measured["matmul_tflops"]),
    )
    results = check(all_rows(), plan)
    print((options.output / "results.md").read_text(encoding="utf-8"))
    failed = [result["row"] for result in results if result["status"] == "failed"]
    if failed:
        raise RunError(f"{len(failed)} of {len(results)} rows failed ({', '.join(failed)}); their logs say why")
    if not any(result["status"] == "ran" for result in results):
        raise RunError("no row ran; the table says why")


def all_rows() -> list[Row]:
    """Return every combination in the order of what it tells: the smallest model in full, then vLLM, then the rest."""
    rows = [
        Row(model, sizes, engine, backend)
        for model, sizes in QWEN.items()
        for engine in ENGINES
        for backend in BACKENDS
    ]
    smallest = next(iter(QWEN))
    return sorted(rows, key=lambda row: 0 if row.model == smallest else 1 + BACKENDS.index(row.backend))


def check(rows: Sequence[Row], plan: Plan) -> list[dict[str, Any]]:
    """Run the rows in turn; what the results are so far stands in their files at any time.

    Args:
        rows: a model is built for the first of its rows and deleted after the last.
        plan: what is the same for all.

    Returns:
        A result a row: `row`, `status` (ran, skipped or failed), `reason`, and what was measured.

    Raises:
        RunError: the memory above the pretended could not be held.
    """
    ends = time.monotonic() + plan.seconds
    results = [asdict(row) | {"row": row.name, "status": "not run", "reason": "interrupted"} for row in rows]
    plan.output.mkdir(parents=True, exist_ok=True)
    write(plan.output, plan.about, results)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lora_grpo-check-")))
        if plan.pretend_gib:
            stack.enter_context(pretended_card.rest_held(plan.pretend_gib))
        write_problems(folder)
        built: dict[str, Path | dict[str, str]] = {}
        for place, (row, result) in enumerate(zip(rows, results, strict=True)):
            left = ends - time.monotonic()
            if missing := missing_packages(row):
                result |= {"status": "skipped", "reason": missing}
            elif left < min(_LEAST_SECONDS, plan.seconds / 10):
                result |= _NO_TIME
            else:
                print(f"{row.name}: {left:.0f} s are left", file=sys.stderr)
                model = _built(row, folder, built, ends)
                result |= run_row(row, plan, folder, model, ends) if isinstance(model, Path) else model
            print(f"{row.name}: {result['status']}{_because(result)}", file=sys.stderr)
            write(plan.output, plan.about, results)
            if row.model not in {later.model for later in rows[place + 1 :]}:
                shutil.rmtree(folder / f"random-{row.model}", ignore_errors=True)
    return results


def _because(result: dict[str, Any]) -> str:
    return f" ({result['reason']})" if result.get("reason") else ""


def _measured_limits() -> dict[str, Any]:
    """Measure in a process of its own, whose share of the card's memory ends with it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=False, timeout=_MEASURE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"torch did not answer for {_MEASURE_SECONDS} s; does the GPU's driver hang?") from None
    if done.returncode:
        raise UserError(f"torch cannot use the GPU: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_problems(folder: Path) -> None:
    """Write training and held-out rows in GSM8K's format, with questions as long as a plan of the memory assumes."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(starter.model_path() / "tokenizer.json"))
    for split, count in (("train", 64), ("eval", 2)):
        rows = []
        for problem in problems.pool(split, count):
            text = f"{problem.question} " * _QUESTION_TOKENS  # each has a token at least
            end = tokenizer.encode(text).offsets[_QUESTION_TOKENS][0]
            rows.append({"question": text[:end], "answer": problem.answer})
        (folder / f"{split}.jsonl").write_text(json_files.dump_lines(rows), encoding="utf-8")


def _built(row: Row, folder: Path, built: dict[str, Path | dict[str, str]], ends: float) -> Path | dict[str, str]:
    """Return the folder of the row's model, built now unless it is there, or the result of a row that has none."""
    if row.model not in built:
        path = folder / f"random-{row.model}"
        log = folder / "build.log"
        code, said = timed_command.run(build_command(path, row.sizes), log, ends - time.monotonic())
        built[row.model] = path
        if code != 0:
            reason = f"the random model was not built: {said}"
            built[row.model] = _NO_TIME if code is None else {"status": "failed", "reason": reason}
    return built[row.model]
