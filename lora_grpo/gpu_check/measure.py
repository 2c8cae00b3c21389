"""The GPU check: runs the recipe with each engine and sampling backend, and measures time and memory.

The fastest is saved, and new runs use it for `auto` (hardware/measured_engine.py). The model is built on this machine,
with random weights.
"""

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from lora_grpo.commands import command, recipe_file
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import lock
from lora_grpo.flags import Flag
from lora_grpo.gpu_check.findings import Result, check_results, conclude, fastest, write_table
from lora_grpo.gpu_check.random_model import LARGER_QWEN, QWEN, build_command
from lora_grpo.hardware import driver_problem, nvidia_gpus, use_one_gpu
from lora_grpo.runs import git_revision, now, read_metrics, versions
from lora_grpo.sandbox import die_with_parent


@dataclass(frozen=True)
class EngineCase:
    """A run of the recipe, and a row of the table."""

    engine: str = "unsloth"
    backend: str = "vllm"
    bits: int = 4
    resumes: bool = False
    """Whether a finished run is resumed for one more step."""

    @property
    def name(self) -> str:
        return f"{self.engine} + {self.backend}{', 16 bits' * (self.bits == 16)}{', resumed' * self.resumes}"


_ENGINES = (EngineCase("peft", "transformers"), EngineCase("peft", "vllm"), EngineCase("unsloth", "vllm"))
_16_BITS, _RESUMED = EngineCase(bits=16), EngineCase(resumes=True)  # of the fastest engine and backend so far
CASES = (*_ENGINES, _16_BITS, _RESUMED)
"""In order of start-up time. Compilation takes minutes, so each run may take all the time that is left."""
SHORT_CASES = (_ENGINES[2], _16_BITS, _ENGINES[1], _ENGINES[0], _RESUMED)
"""In order of value, the default first. Each run has a time limit."""
_SHORT_SECONDS = 300.0
_STEPS = 4
"""Steps of a row. The first one compiles, and it is measured only if there is no other."""
PROBLEMS = ("--data.task", "starter", "--data.train-limit", "64", "--data.few-shot", "6", "--data.eval-limit", "1")
"""Generated problems. With six examples, prompts have about 440 tokens, close to the limit of 512."""
REWARDS = ("--rewards", "correct_answer=2.0", "soft_xml_format=0.5", "pattern:x77[01][0-9][0-9]=1.0")
"""Random tokens earn none of the first two, and equal rewards have no gradient. About half of the completions with 512
tokens contain one of the pattern's 200 (of 151,936) tokens."""
_TO_RESUME = ("--train.checkpoint-steps", "1", "--train.lr-scheduler", "constant")
"""A constant learning rate allows a resumed run to have more steps."""
_LARGER_FROM_GIB = 0.9 * 12
"""Smaller GPUs are tested with the model of the preset `8gb`, all others with that of `12gb` and `16gb`."""
_POLL_SECONDS = 0.25  # GPU memory peaks that are shorter can be missed
_TRY_TORCH = "import torch; torch.ones(1, device='cuda')"
_METRICS = ("step_time", "time/rollouts", "time/rewards", "time/training", "rollouts/tokens_per_second")
_MISMATCH = "sampling/sampling_logp_difference/mean"


@dataclass(frozen=True)
class Options:
    minutes: float = 30.0
    """Time limit for the whole check, in minutes."""
    output: Annotated[Path, Flag("--output-dir", "--output")] = Path("outputs/check_gpu")
    """Folder for the table (results.md), the measurements (results.json) and a log of every run."""
    short: bool = False
    """Test the default engine first, and stop each run after 5 minutes."""


def check_gpu(options: Options, recipe: Path | None = None) -> None:
    """Run the recipe with each engine and backend, write and print the table, and save the fastest for `auto`.

    The table is also printed if the check is interrupted.

    Raises:
        UserError: torch cannot use the GPU.
        RunError: a run failed or had no time to finish a step, or none ran.
    """
    gpus, why_none = nvidia_gpus()
    if not gpus:
        on_cpu = command("train gsm8k", "--preset", "starter")
        raise UserError(f"no NVIDIA GPU found ({why_none}); run this where `nvidia-smi` lists one, or try {on_cpu}")
    if problem := driver_problem(gpus[0]):
        raise UserError(problem)
    recipe = recipe or recipe_file("gsm8k")
    with lock.holding(options.output):
        for left in options.output.glob(".check-*"):  # models of checks that were killed
            shutil.rmtree(left)
        use_one_gpu()  # also applies to the processes started below
        gpu = f"{gpus[0].name} with {gpus[0].memory_gib:.0f} GiB"
        _progress(f"{gpu}\n")
        code, message, _ = run_measured([sys.executable, "-c", _TRY_TORCH], options.output / "torch.log", 120)
        if code != 0:
            torch = versions()["torch"]
            raise UserError(f"torch {torch} cannot use {gpu}: {message}; install torch's CUDA build or a newer driver")
        packages = {"driver": gpus[0].driver, **versions()}
        machine = {"gpu": gpu, "versions": packages, "git_revision": git_revision(), "started": now()}
        model = LARGER_QWEN if gpus[0].memory_gib >= _LARGER_FROM_GIB else QWEN
        try:
            results = run_cases(SHORT_CASES if options.short else CASES, model, options, recipe, machine)
        finally:
            if (options.output / "results.md").exists():
                print((options.output / "results.md").read_text(encoding="utf-8"), flush=True)
    print("\n".join(conclude(results, gpus[0].name)))
    check_results(results)


def run_cases(
    rows: Sequence[EngineCase],
    config: dict[str, Any],
    options: Options,
    recipe: Path,
    machine: dict[str, Any],
    arguments: Sequence[str] = REWARDS,
) -> list[Result]:
    """Run the recipe for each row, on a random model, and return one result per row.

    The files in the output folder always contain the results so far. A result has a `name`, a `status` (ran, failed,
    not finished, skipped or not run), its `reason` and, if the recipe was started, the measurements.

    Args:
        config: config.json of the random model.
        machine: further entries of results.json.
        arguments: further arguments of the recipe.
    """
    deadline, logs = time.monotonic() + 60 * options.minutes, options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results = [_described(row) for row in rows]
    write_table(options.output, machine, results)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=options.output) as folder:
        model = Path(folder) / "model"
        code, message, _ = run_measured(build_command(model, config), logs / "build.log", 60 * options.minutes)
        if code != 0:
            raise RunError(f"the random model was not built: {message} ({logs / 'build.log'})")
        flags = ["--model.name", str(model), *PROBLEMS, "--eval.num-samples", "0", *_TO_RESUME, *arguments]
        for row, result in zip(rows, results, strict=True):
            best, seconds = fastest(results), deadline - time.monotonic()
            if best and row in (_16_BITS, _RESUMED):
                row = replace(row, engine=best["engine"], backend=best["backend"])
                result |= _described(row)
            seconds = min(seconds, _SHORT_SECONDS) if options.short else seconds
            _progress(f"{row.name} (at most {max(0.0, seconds):.0f} s): ")
            packages = [name for name in (row.engine, row.backend) if name in ("unsloth", "vllm")]
            try:
                if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
                    result |= {"status": "skipped", "reason": f"{' and '.join(missing)} not installed"}
                elif row in (_16_BITS, _RESUMED) and not best:
                    result |= {"status": "skipped", "reason": "no engine ran"}
                elif seconds > 0:
                    _run_row(row, result, [sys.executable, str(recipe), *flags], Path(folder), logs, seconds)
                else:
                    result["reason"] = "no time left; pass more --minutes"
            finally:
                write_table(options.output, machine, results)
            rate = f"{result['step_time']:.2f} s per step" if result["status"] == "ran" else result["reason"]
            _progress(f"{result['status']}, {rate}\n")
    return results


def _described(row: EngineCase) -> Result:
    return {"name": row.name, **asdict(row), "status": "not run", "reason": None}


def _run_row(
    row: EngineCase, result: Result, arguments: Sequence[str], folder: Path, logs: Path, seconds: float
) -> None:
    """Run the recipe, and add its status and measurements to the result, even if the check is interrupted."""
    may_refuse = not row.resumes and (row.bits == 16 or row == _ENGINES[1])  # memory for 16 bits; vLLM's dtype on a T4
    run = folder / f"{row.engine}-{row.backend}-{row.bits}"
    log = logs / f"{run.name}{'-resumed' if row.resumes else ''}.log"
    before = len(read_metrics(run))
    flags = ["--model.engine", row.engine, "--sampling.backend", row.backend, "--model.bits", str(row.bits)]
    flags += ["--output-dir", str(run), "--train.max-steps", str(before + 1 if row.resumes else _STEPS)]
    result |= {"status": "not finished", "reason": "interrupted", "log": str(log)}
    started = time.monotonic()
    try:
        command_line = [*arguments, *flags, *["--resume"] * row.resumes]
        code, message, result["gpu_peak_gib"] = run_measured(command_line, log, seconds)
    finally:
        result |= {"seconds": round(time.monotonic() - started, 1), **_measurements(run, log, before)}
    if code is None and "step_time" not in result:
        more = "leave out --short, or pass more --minutes"
        result["reason"] = f"no step within {seconds:.0f} s ({more}); last: {message}"
    elif code == UserError.exit_code and may_refuse:
        result |= {"status": "skipped", "reason": message}
    elif code:
        result |= {"status": "failed", "reason": f"{message} ({log})"}
    elif not result.get("grad_norm"):
        result |= {"status": "failed", "reason": f"no step had a gradient ({log})"}
    else:
        result |= {"status": "ran", "reason": f"stopped after {seconds:.0f} s" if code is None else None}


def _measurements(run: Path, log: Path, before: int) -> Result:
    """Return what the log and the folder of a run tell about its steps after the first `before`."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found: Result = {"packing": [*dict.fromkeys(re.findall(r"\[Unsloth\] GRPO (.+)", text))]}
    if not (run / "run.json").exists():
        return found
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    memory = record.get("memory") or {}
    found |= {
        "micro_batch_size": memory.get("micro_batch_size", record["config"]["train"]["micro_batch_size"]),
        "planned_gib": max(memory.get("planned_phases_gib", {}).values(), default=None),
        "torch_peak_gib": record.get("peak_gpu_memory_gib"),
        "logprob_check": record.get("logprob_check") or {},
    }
    if steps := [line for line in read_metrics(run) if "step_time" in line][before:]:
        later = steps[1:] or steps
        found |= {name: round(statistics.median(step[name] for step in later), 3) for name in _METRICS}
        found |= {
            "steps": len(steps),
            "compilation": steps[0]["step_time"] - found["step_time"] if steps[1:] else None,
            "grad_norm": max(step["grad_norm"] for step in steps),
            "completion_tokens": steps[-1]["completions/mean_length"],
            "logprob_mismatch": max((step[_MISMATCH] for step in steps if _MISMATCH in step), default=None),
        }
    return found


def run_measured(arguments: Sequence[str], log: Path, seconds: float) -> tuple[int | None, str, float | None]:
    """Run a command without network access, and kill it and its child processes at the time limit.

    Returns:
        The exit code, or None at the time limit. The error at the end of the log, else its last line. The increase of
        used GPU memory in GiB, as reported by nvidia-smi, including the CUDA context and memory outside of torch;
        None without nvidia-smi.
    """
    deadline, peak = time.monotonic() + seconds, 0.0
    # Unsloth (2026.10.7) then logs its checks of packed batches. It also has Triton compile every kernel again, so the
    # first step takes as long as on a machine that has never compiled them.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "UNSLOTH_ENABLE_LOGGING": "1"}
    with log.open("wb") as file:
        before = _used_gib()
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=environment,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # a killed check must not leave a run behind
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


def _used_gib() -> float | None:
    gpus, _ = nvidia_gpus(refresh=True)
    return gpus[0].memory_gib - gpus[0].free_gib if gpus else None


def _progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
