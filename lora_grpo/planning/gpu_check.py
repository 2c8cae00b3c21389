"""The GPU check: runs the recipe with every model, engine and sampling backend, and measures time and memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from lora_grpo.commands import command
from lora_grpo.config import nvidia_gpus, use_one_gpu
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import atomic, lock, markdown_table
from lora_grpo.flags import Flag
from lora_grpo.planning.random_model import QWEN, build_command
from lora_grpo.runs import git_revision, now, read_metrics, versions

ENGINES, BACKENDS = ("peft", "unsloth"), ("vllm", "transformers")
PROBLEMS = ("--data.task", "starter", "--data.train-limit", "64", "--data.few-shot", "6", "--data.eval-limit", "1")
"""Generated problems. With six examples, prompts have about 440 tokens, close to the 512 of the memory plan."""
REWARDS = ("--rewards", "correct_answer=2.0", "soft_xml_format=0.5", "pattern:x77[01][0-9][0-9]=1.0")
"""Random tokens earn none of the first two, and equal rewards have no gradient. About half of the completions with 512
tokens contain one of the pattern's 200 (of 151,936) tokens."""
_STEPS = {"vllm": 3, "transformers": 2}
"""Steps of a row. The first step is a warm-up; it is measured only if there is no other step."""
_ROW_SHARE = 1 / 3  # of the check's time, at most
_POLL_SECONDS = 0.25  # GPU memory peaks that are shorter can be missed
_TRY_TORCH = "import torch; torch.ones(1, device='cuda')"
_MEASURED = {
    "step_seconds": "step_time",
    "rollout_seconds": "time/rollouts",
    "reward_seconds": "time/rewards",
    "training_seconds": "time/training",
    "tokens_per_second": "rollouts/tokens_per_second",
}
"""Keys in a result, and the metrics of which they are the median."""
_COLUMNS = (
    ("model", "model", "{}"),
    ("engine", "engine", "{}"),
    ("sampling", "backend", "{}"),
    ("base bits", "bits", "{}"),
    ("step, s", "step_seconds", "{:.2f}"),
    ("rollouts", "rollout_seconds", "{:.2f}"),
    ("rewards", "reward_seconds", "{:.2f}"),
    ("training", "training_seconds", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("planned, GiB", "planned_gib", "{:.2f}"),
    ("torch peak", "torch_peak_gib", "{:.2f}"),
    ("GPU peak", "gpu_peak_gib", "{:.2f}"),
)
"""Column heading, key in a result, and format."""


@dataclass(frozen=True)
class Options:
    minutes: float = 8.0
    """Time limit for the whole check, in minutes. Rows that do not start in time are reported as skipped."""
    output: Annotated[Path, Flag("--output-dir", "--output")] = Path("outputs/check_gpu")
    """Folder for the table (results.md), the measurements (results.json) and the log of every row."""


@dataclass(frozen=True)
class CheckRow:
    model: str
    """Name of the shape, e.g. `0.5B`."""
    config: dict[str, Any]
    """config.json of the random model."""
    engine: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.engine}-{self.backend}"

    @property
    def missing_packages(self) -> list[str]:
        needed = [name for name in ("unsloth", "vllm") if name in (self.engine, self.backend)]
        return [name for name in needed if importlib.util.find_spec(name) is None]


def check_gpu(options: Options, recipe: Path) -> None:
    """Run the recipe for every row, write and print the table, and print a conclusion.

    Raises:
        UserError: torch cannot use the GPU.
        RunError: a row failed, or no row ran.
    """
    gpus, why_none = nvidia_gpus()
    if not gpus:
        starter = command("train gsm8k", "--preset", "starter")
        raise UserError(f"no NVIDIA GPU found ({why_none}); run this where `nvidia-smi` lists one, or try {starter}")
    with lock.holding(options.output):
        use_one_gpu()  # also applies to the processes started below
        gpu = f"{gpus[0].name} with {gpus[0].memory_gib:.0f} GiB"
        _progress(f"{gpu}\n")
        code, message, _ = run_measured([sys.executable, "-c", _TRY_TORCH], options.output / "torch.log", 120)
        if code != 0:
            torch = versions()["torch"]
            raise UserError(f"torch {torch} cannot use {gpu}: {message}; install torch's CUDA build or a newer driver")
        machine = {"gpu": gpu, "versions": versions(), "git_revision": git_revision(), "started": now()}
        results = run_rows(all_rows(), options, recipe, machine)
    print((options.output / "results.md").read_text(encoding="utf-8"))
    print(conclude(results))


def all_rows() -> list[CheckRow]:
    """Return all combinations, the most informative first: the smallest model, then vLLM, then the rest."""
    rows = [CheckRow(*model, engine, backend) for model in QWEN.items() for engine in ENGINES for backend in BACKENDS]
    smallest = next(iter(QWEN))
    return sorted(rows, key=lambda row: 0 if row.model == smallest else 1 + BACKENDS.index(row.backend))


def run_rows(
    rows: Sequence[CheckRow],
    options: Options,
    recipe: Path,
    machine: dict[str, Any],
    arguments: Sequence[str] = REWARDS,
) -> list[dict[str, Any]]:
    """Run the rows one after another, and return one result per row; see `run_row`.

    The files in the output folder always contain the results so far.

    Args:
        machine: further entries of results.json.
        arguments: further arguments of the recipe.
    """
    results = [asdict(row) | {"row": row.name, "status": "not run", "reason": "interrupted"} for row in rows]
    deadline = time.monotonic() + 60 * options.minutes
    (options.output / "logs").mkdir(parents=True, exist_ok=True)
    _write(options.output, machine, results)
    with tempfile.TemporaryDirectory(prefix="lora_grpo-check-") as folder:
        for row, result in zip(rows, results, strict=True):
            left = deadline - time.monotonic()
            _progress(f"{row.name} ({max(0.0, left):.0f} s left): ")
            if missing := row.missing_packages:
                result |= {"status": "skipped", "reason": f"{' and '.join(missing)} not installed"}
            elif left < 0:
                result |= {"status": "skipped", "reason": "no time left"}
            else:
                start = [sys.executable, str(recipe), *arguments]
                result |= run_row(row, start, options, Path(folder), deadline)
            _write(options.output, machine, results)
            rate = f"{result['step_seconds']:.2f} s per step" if result["status"] == "ran" else result["reason"]
            _progress(f"{result['status']}, {rate}\n")
    return results


def run_row(row: CheckRow, start: Sequence[str], options: Options, folder: Path, deadline: float) -> dict[str, Any]:
    """Run the recipe, whose command begins with `start`. Models are built in `folder` and remain for the next rows.

    Returns:
        `status` (ran, skipped or failed), `reason`, and for a recipe that was started `log` and the measurements.
    """
    model, run, logs = folder / row.model, folder / row.name, options.output / "logs"
    if not model.exists():
        log = logs / f"build-{row.model}.log"
        code, message, _ = run_measured(build_command(model, row.config), log, deadline - time.monotonic())
        if code != 0:
            shutil.rmtree(model, ignore_errors=True)
            status = "skipped" if code is None else "failed"
            return {"status": status, "reason": f"the random model was not built: {message} ({log})"}
    flags = [
        *("--output-dir", str(run), "--model.name", str(model)),
        *("--model.engine", row.engine, "--sampling.backend", row.backend),
        *("--train.max-steps", str(_STEPS[row.backend]), "--eval.num-samples", "0", *PROBLEMS),
    ]
    left, longest = deadline - time.monotonic(), 60 * options.minutes * _ROW_SHARE
    limit, log = min(left, longest), logs / f"{row.name}.log"
    code, message, peak = run_measured([*start, *flags], log, limit)
    found: dict[str, Any] = {"log": str(log), "gpu_peak_gib": peak}
    steps = [line for line in read_metrics(run) if "step_time" in line]
    if steps:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        memory = record.get("memory") or {}
        found |= {
            key: round(statistics.median(s[name] for s in steps[1:] or steps), 3) for key, name in _MEASURED.items()
        }
        found |= {
            "steps": len(steps),
            "bits": record["config"]["model"]["bits"],
            "micro_batch_size": memory.get("micro_batch_size", record["config"]["train"]["micro_batch_size"]),
            "completion_tokens": steps[-1]["completions/mean_length"],
            "torch_peak_gib": record.get("peak_gpu_memory_gib"),
            "planned_gib": max(memory.get("planned_phases_gib", {}).values(), default=None),
            "logprob_check": record.get("logprob_check"),
        }
    shutil.rmtree(run, ignore_errors=True)
    status, reason = "ran", None
    if code is None and steps:
        reason = f"stopped after {limit:.0f} s"
    elif code is None:
        status = "failed" if longest < left else "skipped"
        reason = f"no step within {limit:.0f} s; last: {message}"
    elif code == UserError.exit_code and " does not fit on " in message:  # rejected by the memory plan
        status, reason = "skipped", message.removeprefix("error: ").partition(";")[0]
    elif code or not any(step["grad_norm"] for step in steps):
        status, reason = "failed", f"{message if code else 'no step had a gradient'} ({log})"
    return found | {"status": status, "reason": reason}


def run_measured(arguments: Sequence[str], log: Path, seconds: float) -> tuple[int | None, str, float | None]:
    """Run a command without network access, and kill it and its child processes at the time limit.

    Returns:
        The exit code, or None at the time limit. The error at the end of the log, else its last line. The increase of
        used GPU memory in GiB, as reported by nvidia-smi: with the CUDA context and all that torch does not allocate;
        None without nvidia-smi.
    """
    deadline, before, peak = time.monotonic() + seconds, _used_gib(), 0.0
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=environment
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if before is not None:
                    peak = max(peak, (_used_gib() or 0.0) - before)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
            exit_code = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-30:] if line.startswith("error: ")]
    message = (errors or lines or ["the log is empty"])[-1][:300]
    return exit_code, message, None if before is None else round(peak, 2)


def conclude(results: Sequence[dict[str, Any]]) -> str:
    """Return which engines and backends work, in one sentence.

    Raises:
        RunError: a row failed, or no row ran.
    """
    ran, failed = ([each for each in results if each["status"] == status] for status in ("ran", "failed"))
    if not ran:
        first = (failed or results)[0]
        raise RunError(f"no row ran: {first['row']} {first['status']}, {first['reason']}; see results.md")
    # Each pair once; those without a failure first, because the first is advised.
    broken = {(each["engine"], each["backend"]) for each in failed}
    pairs = sorted(dict.fromkeys((each["engine"], each["backend"]) for each in ran), key=broken.__contains__)
    works = f"this GPU works with {', '.join(map(' + '.join, pairs))}"
    if not failed:
        return works
    first, (engine, backend) = failed[0], pairs[0]
    raise RunError(
        f"{works}; {len(failed)} of {len(results)} rows failed, the first is {first['row']}: {first['reason']}; "
        f"train with --model.engine {engine} --sampling.backend {backend}"
    )


def _used_gib() -> float | None:
    gpus, _ = nvidia_gpus(refresh=True)
    return gpus[0].memory_gib - gpus[0].free_gib if gpus else None


def _progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _write(folder: Path, machine: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """Write results.json, and results.md with a table of the rows that ran and the reasons of the other rows."""
    atomic.write_json(folder / "results.json", {**machine, "rows": list(results)})
    packages = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    ran = [result for result in results if result["status"] == "ran"]
    cells = [["–" if row[key] is None else form.format(row[key]) for _, key, form in _COLUMNS] for row in ran]
    table = markdown_table([heading for heading, *_ in _COLUMNS], cells, left=4)
    lines = [f"{machine['gpu']}; {packages}; {machine['started']}.", "", *table]
    lines += [f"- {each['row']}: {each['status']}, {each['reason']}" for each in results if each["reason"]]
    atomic.write_text(folder / "results.md", "\n".join(lines).rstrip() + "\n")
