"""The GPU check: measures the GPU, runs every row within the time limit, keeps the table up to date, and concludes."""

from __future__ import annotations

import json
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
from lora_grpo.files import atomic, lock
from lora_grpo.planning import measured_command
from lora_grpo.planning.gpu_check_row import BACKENDS, ENGINES, CheckSettings, Row, run_row
from lora_grpo.planning.random_model import QWEN
from lora_grpo.planning.roofline import Limits
from lora_grpo.runs import git_revision, now, versions

_MEASURE_SECONDS = 120
_MEASURE = "import json; from lora_grpo.planning.roofline import measure; print(json.dumps(measure()))"

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
    ("of limit", "decoding_share", "{:.1%}"),
    ("training, of limit", "training_share", "{:.1%}"),
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
    """Measure the GPU, run the recipe for every row, write and print the table, and print a conclusion.

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
        _progress(f"{gpus[0].name} with {gpus[0].memory_gib:.0f} GiB\nmeasuring its rates: ")
        measured = _measure_gpu(options.output / "measure.log")
        rates = f"{measured['copy_gb_per_second']:,.0f} GB/s, {measured['matmul_tflops']:,.0f} TFLOP/s"
        _progress(f"{rates} in {measured['precision']}\n")
        machine = {
            "gpu": gpus[0].name,
            "memory_gib": round(gpus[0].memory_gib, 2),
            "measured": measured,
            "versions": versions(),
            "git_revision": git_revision(),
            "started": now(),
        }
        limits = Limits(measured["copy_gb_per_second"], measured["matmul_tflops"])
        seconds = 60 * options.minutes - (time.monotonic() - started)
        results = run_rows(all_rows(), CheckSettings(recipe, options.output, seconds, limits), machine)
    print((options.output / "results.md").read_text(encoding="utf-8"))
    sentence, works = conclude(results)
    if not works:
        raise RunError(sentence)
    print(sentence)


def conclude(results: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """Return which engines and backends work and what to do, in one sentence, and whether no row failed."""
    ran = {(each["engine"], each["backend"]) for each in results if each["status"] == "ran"}
    failed = [each for each in results if each["status"] == "failed"]
    if not ran and failed:
        first = failed[0]
        return f"this GPU does not work: {first['row']} failed, {first['reason']}; see results.md", False
    if not ran:
        could_start = [each for each in results if not each["reason"].endswith("not installed")]
        first = (could_start or results)[0]
        fix = "pass more --minutes, or stop other programs that use the GPU" if could_start else "run `make install`"
        return f"no row ran: {first['row']} {first['status']}, {first['reason']}; {fix}", False
    pairs = [pair for pair in _PREFERRED if pair in ran]
    never_failed = [pair for pair in pairs if pair not in {(each["engine"], each["backend"]) for each in failed}]
    pairs = never_failed or pairs
    works = f"this GPU works with {', '.join(map(' + '.join, pairs))}"
    if not failed:
        return works, True
    engine, backend = pairs[0]
    first = failed[0]
    return (
        f"{works}; {len(failed)} of {len(results)} rows failed, the first is {first['row']}: {first['reason']}; "
        f"train with --model.engine {engine} --sampling.backend {backend}",
        False,
    )


def _measure_gpu(log: Path) -> dict[str, Any]:
    """Measure the GPU's rates in a separate process, which frees its GPU memory when it exits."""
    done = measured_command.run([sys.executable, "-c", _MEASURE], log, _MEASURE_SECONDS)
    if done.exit_code != 0:
        raise UserError(f"torch cannot use the GPU within {_MEASURE_SECONDS} s: {done.message}; check the driver")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()  # the log also contains warnings
    try:
        measured: dict[str, Any] = json.loads([line for line in lines if line.startswith("{")][-1])
    except (IndexError, ValueError):
        raise RunError(f"the GPU measurement printed no result: {done.message}; {log} has all of it") from None
    if measured["device"] == "cpu":
        raise UserError(
            f"nvidia-smi lists a GPU, but torch {versions()['torch']} sees none; install torch's CUDA build or a newer "
            "driver"
        )
    return measured


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
    headings = " | ".join(heading for heading, *_ in _COLUMNS)
    measured = machine["measured"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    summary = (
        f"{machine['gpu']} with {machine['memory_gib']:.0f} GiB; measured {measured['copy_gb_per_second']:,.0f} GB/s "
        f"copying and {measured['matmul_tflops']:,.0f} TFLOP/s in {measured['precision']}; {packages}; "
        f"{machine['started']}."
    )
    lines = [summary, "", f"| {headings} |", "|---" * 4 + "|---:" * 10 + "|"]
    for result in results:
        if result["status"] == "ran":
            values = [(result[key], form) for _, key, form in _COLUMNS]
            cells = " | ".join("–" if value is None else form.format(value) for value, form in values)
            lines.append(f"| {cells} |")
    lines.append("")
    lines += [f"- {each['row']}: {each['status']}, {each['reason']}" for each in results if each["reason"]]
    atomic.write_text(folder / "results.md", "\n".join(lines).rstrip() + "\n")
