"""The GPU check: runs every row within the time limit, keeps the table up to date, and concludes."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from lora_grpo.commands import command
from lora_grpo.config import nvidia_gpus, use_one_gpu
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import atomic, lock, markdown_table
from lora_grpo.planning import measured_command
from lora_grpo.planning.gpu_check_row import BACKENDS, ENGINES, CheckSettings, Row, run_row
from lora_grpo.planning.random_model import QWEN
from lora_grpo.runs import git_revision, now, versions

_TRY_TORCH, _TRY_SECONDS = "import torch; torch.ones(1, device='cuda')", 120
"""Program that fails if torch cannot use the GPU, and its time limit."""
_PREFERRED = (("unsloth", "vllm"), ("peft", "vllm"), ("unsloth", "transformers"), ("peft", "transformers"))
"""Engines and backends, the ones that `auto` chooses first."""

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
    output: Annotated[Path, tyro.conf.arg(name="output-dir", aliases=["--output"])] = Path("outputs/check_gpu")
    """Folder for the table (results.md), the measurements (results.json) and the log of every row."""


def check_gpu(options: Options, recipe: Path) -> None:
    """Run the recipe for every row, write and print the table, and print a conclusion.

    Raises:
        UserError: torch cannot use the GPU.
        RunError: a row failed, or no row ran.
    """
    started = time.monotonic()
    gpus, why_none = nvidia_gpus()
    if not gpus:
        raise UserError(
            f"no NVIDIA GPU found ({why_none}); run this where `nvidia-smi` lists one, or try the CPU: "
            f"{command('train gsm8k', '--preset', 'starter')}"
        )
    if not options.minutes > 0:
        raise UserError(f"--minutes is {options.minutes:g}; expected more than 0")
    with lock.holding(options.output):
        use_one_gpu()  # also applies to the processes started below
        gpu = f"{gpus[0].name} with {gpus[0].memory_gib:.0f} GiB"
        _progress(f"{gpu}\n")
        tried = measured_command.run([sys.executable, "-c", _TRY_TORCH], options.output / "torch.log", _TRY_SECONDS)
        if tried.exit_code != 0:
            raise UserError(
                f"torch {versions()['torch']} cannot use {gpu}: {tried.message}; install torch's CUDA build or a "
                "newer driver"
            )
        machine = {"gpu": gpu, "versions": versions(), "git_revision": git_revision(), "started": now()}
        seconds = 60 * options.minutes - (time.monotonic() - started)
        results = run_rows(all_rows(), CheckSettings(recipe, options.output, seconds), machine)
    print((options.output / "results.md").read_text(encoding="utf-8"))
    print(conclude(results))


def conclude(results: Sequence[dict[str, Any]]) -> str:
    """Return which engines and backends work, in one sentence.

    Raises:
        RunError: a row failed, or no row ran. The message says what to do.
    """
    ran = {(each["engine"], each["backend"]) for each in results if each["status"] == "ran"}
    failed = [each for each in results if each["status"] == "failed"]
    if not ran:
        could_start = [each for each in results if not each["reason"].endswith("not installed")]
        first = (failed or could_start or results)[0]
        fix = "pass more --minutes, or stop other programs that use the GPU" if could_start else "run `make install`"
        fix = "see results.md" if failed else fix
        raise RunError(f"no row ran: {first['row']} {first['status']}, {first['reason']}; {fix}")
    with_failures = {(each["engine"], each["backend"]) for each in failed}
    pairs = [pair for pair in _PREFERRED if pair in ran - with_failures] or [pair for pair in _PREFERRED if pair in ran]
    works = f"this GPU works with {', '.join(map(' + '.join, pairs))}"
    if not failed:
        return works
    first, (engine, backend) = failed[0], pairs[0]
    raise RunError(
        f"{works}; {len(failed)} of {len(results)} rows failed, the first is {first['row']}: {first['reason']}; "
        f"train with --model.engine {engine} --sampling.backend {backend}"
    )


def all_rows() -> list[Row]:
    """Return all combinations, the most informative first: the smallest model, then vLLM, then the rest."""
    rows = [Row(*model, engine, backend) for model in QWEN.items() for engine in ENGINES for backend in BACKENDS]
    smallest = next(iter(QWEN))
    return sorted(rows, key=lambda row: 0 if row.model == smallest else 1 + BACKENDS.index(row.backend))


def run_rows(rows: Sequence[Row], settings: CheckSettings, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the rows one after another, and return one result per row; see `run_row`.

    The files in the output folder always contain the results so far.
    """
    deadline = time.monotonic() + settings.seconds
    results = [asdict(row) | {"row": row.name, "status": "not run", "reason": "interrupted"} for row in rows]
    (settings.output / "logs").mkdir(parents=True, exist_ok=True)
    _write(settings.output, machine, results)
    with tempfile.TemporaryDirectory(prefix="lora_grpo-check-") as folder:
        for row, result in zip(rows, results, strict=True):
            _progress(f"{row.name} ({max(0, deadline - time.monotonic()):.0f} s left): ")
            result |= run_row(row, settings, Path(folder), deadline)
            _write(settings.output, machine, results)
            rate = f"{result['step_seconds']:.2f} s per step" if result["status"] == "ran" else result["reason"]
            _progress(f"{result['status']}, {rate}\n")
    return results


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
