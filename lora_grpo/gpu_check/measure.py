"""The GPU check: runs the recipe with each engine and sampling backend, and measures time and memory.

The fastest is saved, and new runs use it for `auto` and say so (hardware/measured_engine.py). The model is built on
this machine, with random weights.
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
    def uses_fastest(self) -> bool:
        """Whether it runs with the fastest engine and backend so far in place of its own."""
        return self.bits == 16 or self.resumes

    @property
    def name(self) -> str:
        name = f"{self.engine} + {self.backend}"
        if self.bits == 16:
            name += ", 16 bits"
        if self.resumes:
            name += ", resumed"
        return name


_PEFT = EngineCase("peft", "transformers")
_PEFT_VLLM = EngineCase("peft", "vllm")
_UNSLOTH_VLLM = EngineCase("unsloth", "vllm")
_16_BITS = EngineCase(bits=16)
_RESUMED = EngineCase(resumes=True)
CASES = (_PEFT, _PEFT_VLLM, _UNSLOTH_VLLM, _16_BITS, _RESUMED)
"""In order of start-up time. Compilation takes minutes, so each run may take all the time that is left."""
SHORT_CASES = (_UNSLOTH_VLLM, _16_BITS, _PEFT_VLLM, _PEFT, _RESUMED)
"""In order of value, the default first. Each run has a time limit."""
_SHORT_SECONDS = 300.0
_STEPS = 4
"""Steps of a case. The first one compiles, and it is measured only if there is no other."""
PROBLEMS = ("--data.task", "starter", "--data.train-limit", "64", "--data.few-shot", "6", "--data.eval-limit", "1")
"""Generated problems. With six examples, prompts have about 440 tokens, close to the limit of 512."""
REWARDS = ("--rewards", "correct_answer=2.0", "soft_xml_format=0.5", "pattern:x77[01][0-9][0-9]=1.0")
"""Random tokens earn none of the first two, and equal rewards have no gradient. About half of the completions with 512
tokens contain one of the pattern's 200 (of 151,936) tokens."""
_TO_RESUME = ("--train.checkpoint-steps", "1", "--train.lr-scheduler", "constant")
"""A constant learning rate allows a resumed run to have more steps."""
_LARGER_FROM_GIB = 0.9 * 12
"""Smaller GPUs are tested with the model of the preset `8gb`, all others with that of `12gb` and `16gb`."""
_FOLDER_PREFIX = ".check-"
"""Of the folder with the model and the runs of a check, within its output folder."""
_TUNING_SECONDS = 300.0
"""Time limit of the search for the launch settings of vLLM's LoRA kernel; at most a quarter of the check's time."""
_POLL_SECONDS = 0.25
"""Seconds between two looks at the GPU's memory. Shorter peaks can be missed."""
_TRY_TORCH = "import torch; torch.ones(1, device='cuda')"
"""A program that fails if torch cannot use the GPU."""
_METRICS = ("step_time", "time/rollouts", "time/rewards", "time/training", "rollouts/tokens_per_second")
"""Metrics of a step whose medians are measured."""
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
    gpu = gpus[0]
    problem = driver_problem(gpu)
    if problem:
        raise UserError(problem)
    with lock.holding(options.output):
        _remove_models_of_killed_checks(options.output)
        use_one_gpu()  # also applies to the processes started below
        gpu_text = f"{gpu.name} with {gpu.memory_gib:.0f} GiB"
        _progress(f"{gpu_text}\n")
        _try_torch(gpu_text, options.output)
        machine = {
            "gpu": gpu_text,
            "versions": {"driver": gpu.driver, **versions()},
            "git_revision": git_revision(),
            "started": now(),
        }
        if not options.short:
            started = time.monotonic()
            _tune_kernels(options.output, seconds=min(_TUNING_SECONDS, 60 * options.minutes / 4))
            options = replace(options, minutes=options.minutes - (time.monotonic() - started) / 60)
        cases = SHORT_CASES if options.short else CASES
        model = LARGER_QWEN if gpu.memory_gib >= _LARGER_FROM_GIB else QWEN
        try:
            results = run_cases(cases, model, options, recipe or recipe_file("gsm8k"), machine)
        finally:
            table = options.output / "results.md"
            if table.exists():
                print(table.read_text(encoding="utf-8"), flush=True)
    print("\n".join(conclude(results, gpu.name)))
    check_results(results)


def _remove_models_of_killed_checks(output: Path) -> None:
    for folder in output.glob(f"{_FOLDER_PREFIX}*"):
        shutil.rmtree(folder)


def _try_torch(gpu: str, output: Path) -> None:
    """Raise a UserError if the installed torch cannot compute on the GPU."""
    measured = run_measured([sys.executable, "-c", _TRY_TORCH], output / "torch.log", 120)
    if measured.exit_code != 0:
        torch = versions()["torch"]
        fix = "install torch's CUDA build or a newer driver"
        raise UserError(f"torch {torch} cannot use {gpu}: {measured.message}; {fix}")


def _tune_kernels(output: Path, seconds: float) -> None:
    """Find the fastest launch settings of vLLM's LoRA kernel, which the runs of this check and later ones use."""
    if importlib.util.find_spec("vllm") is None:
        return
    _progress("LoRA kernels: ")
    search_seconds = 0.6 * seconds  # the rest is for imports, the kernel that is being compiled, and saving
    tuning = [sys.executable, "-m", "lora_grpo.gpu_check.tune_kernels", f"{search_seconds:.0f}"]
    measured = run_measured(tuning, output / "kernels.log", seconds)
    outcome = "not tuned, " if measured.exit_code != 0 else "tuned, "
    _progress(f"{outcome}{measured.message}\n")


@dataclass(frozen=True)
class _Workspace:
    """What all runs of a check have in common."""

    recipe: Sequence[str]
    """The command that runs the recipe on the random model."""
    runs: Path
    """Folder of the runs, which is deleted after the check."""
    logs: Path


def run_cases(
    cases: Sequence[EngineCase],
    config: dict[str, Any],
    options: Options,
    recipe: Path,
    machine: dict[str, Any],
    arguments: Sequence[str] = REWARDS,
) -> list[Result]:
    """Run the recipe for each case, on a random model, and return one result per case.

    The files in the output folder always contain the results so far. A result has a `name`, a `status` (ran, failed,
    not finished, skipped or not run), its `reason` and, if the recipe was started, the measurements.

    Args:
        config: config.json of the random model.
        machine: further entries of results.json.
        arguments: further arguments of the recipe.
    """
    deadline = time.monotonic() + 60 * options.minutes
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results = [_described(case) for case in cases]
    write_table(options.output, machine, results)

    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=options.output) as folder:
        model = Path(folder) / "model"
        log = logs / "build.log"
        built = run_measured(build_command(model, config), log, 60 * options.minutes)
        if built.exit_code != 0:
            raise RunError(f"the random model was not built: {built.message} ({log})")
        flags = ["--model.name", str(model), *PROBLEMS, "--eval.num-samples", "0", *_TO_RESUME, *arguments]
        workspace = _Workspace([sys.executable, str(recipe), *flags], Path(folder), logs)

        for case, result in zip(cases, results, strict=True):
            best = fastest(results)
            if best and case.uses_fastest:
                case = replace(case, engine=best["engine"], backend=best["backend"])
                result.update(_described(case))
            seconds = deadline - time.monotonic()
            if options.short:
                seconds = min(seconds, _SHORT_SECONDS)
            _progress(f"{case.name} (at most {max(0.0, seconds):.0f} s): ")
            try:
                skipped = _why_skipped(case, best)
                if skipped:
                    result.update(status="skipped", reason=skipped)
                elif seconds > 0:
                    _run_case(case, result, workspace, seconds)
                else:
                    result["reason"] = "no time left; pass more --minutes"
            finally:
                write_table(options.output, machine, results)
            outcome = result["reason"]
            if result["status"] == "ran":
                outcome = f"{result['step_time']:.2f} s per step"
            _progress(f"{result['status']}, {outcome}\n")
    return results


def _described(case: EngineCase) -> Result:
    """Return the result of a case that was not run."""
    return {"name": case.name, **asdict(case), "status": "not run", "reason": None}


def _why_skipped(case: EngineCase, best: Result | None) -> str:
    """Return why a case cannot run, empty if it can. `best` is the fastest engine and backend so far."""
    packages = [name for name in (case.engine, case.backend) if name in ("unsloth", "vllm")]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if case.uses_fastest and not best:
        return "no engine ran"
    return ""


def _run_case(case: EngineCase, result: Result, workspace: _Workspace, seconds: float) -> None:
    """Run the recipe, and add its status and measurements to the result, even if the check is interrupted."""
    # A resumed run has the folder of the run before it.
    run = workspace.runs / f"{case.engine}-{case.backend}-{case.bits}"
    log = workspace.logs / f"{run.name}.log"
    steps_before = len(read_metrics(run))
    max_steps = _STEPS
    if case.resumes:
        log = workspace.logs / f"{run.name}-resumed.log"
        max_steps = steps_before + 1
    arguments = [
        *workspace.recipe,
        *("--model.engine", case.engine),
        *("--sampling.backend", case.backend),
        *("--model.bits", str(case.bits)),
        *("--output-dir", str(run)),
        *("--train.max-steps", str(max_steps)),
    ]
    if case.resumes:
        arguments.append("--resume")

    result.update(status="not finished", reason="interrupted", log=str(log))
    started = time.monotonic()
    try:
        measured = run_measured(arguments, log, seconds)
        result["gpu_peak_gib"] = measured.gpu_peak_gib
    finally:
        result["seconds"] = round(time.monotonic() - started, 1)
        result.update(_measurements(run, log, steps_before))

    is_out_of_time = measured.exit_code is None
    # The recipe may refuse 16 bits, which need more memory, and vLLM beside PEFT, because of its dtype on a T4.
    may_refuse = not case.resumes and (case.bits == 16 or case == _PEFT_VLLM)
    if is_out_of_time and "step_time" not in result:
        fix = "leave out --short, or pass more --minutes"
        result["reason"] = f"no step within {seconds:.0f} s ({fix}); last: {measured.message}"
    elif measured.exit_code == UserError.exit_code and may_refuse:
        result.update(status="skipped", reason=measured.message)
    elif measured.exit_code:
        result.update(status="failed", reason=f"{measured.message} ({log})")
    elif not result.get("grad_norm"):
        result.update(status="failed", reason=f"no step had a gradient ({log})")
    else:
        result.update(status="ran", reason=f"stopped after {seconds:.0f} s" if is_out_of_time else None)


def _measurements(run: Path, log: Path, steps_before: int) -> Result:
    """Return what the log and the folder of a run tell about its steps after the first `steps_before`."""
    text = log.read_text(encoding="utf-8", errors="replace")
    packing = re.findall(r"\[Unsloth\] GRPO (.+)", text)
    measurements: Result = {"packing": list(dict.fromkeys(packing))}
    if not (run / "run.json").exists():
        return measurements

    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    memory = record.get("memory") or {}
    measurements |= {
        "micro_batch_size": memory.get("micro_batch_size", record["config"]["train"]["micro_batch_size"]),
        "planned_gib": max(memory.get("planned_phases_gib", {}).values(), default=None),
        "torch_peak_gib": record.get("torch_peak_gib"),
        "logprob_check": record.get("logprob_check") or {},
    }
    steps = [line for line in read_metrics(run) if "step_time" in line][steps_before:]
    if not steps:
        return measurements

    compiled_steps = steps[1:]
    for name in _METRICS:
        median = statistics.median(step[name] for step in compiled_steps or steps)
        measurements[name] = round(median, 3)
    compilation = None
    if compiled_steps:
        compilation = steps[0]["step_time"] - measurements["step_time"]
    mismatches = [step[_MISMATCH] for step in steps if _MISMATCH in step]
    return measurements | {
        "steps": len(steps),
        "compilation": compilation,
        "grad_norm": max(step["grad_norm"] for step in steps),
        "completion_tokens": steps[-1]["completions/mean_length"],
        "logprob_mismatch": max(mismatches, default=None),
    }


@dataclass(frozen=True)
class Measured:
    """How a command ended, and its memory."""

    exit_code: int | None
    """None if it was killed at the time limit."""
    message: str
    """The error at the end of the log, else its last line."""
    gpu_peak_gib: float | None
    """Increase of used GPU memory in GiB, as reported by nvidia-smi, including the CUDA context and memory outside of
    torch; None without nvidia-smi."""


def run_measured(arguments: Sequence[str], log: Path, seconds: float) -> Measured:
    """Run a command without network access, and kill it and its child processes at the time limit."""
    deadline = time.monotonic() + seconds
    peak_gib = 0.0
    # Unsloth (2026.10.9) then logs its checks of packed batches. It also has Triton compile every kernel again, so the
    # first step takes as long as on a machine that has never compiled them.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "UNSLOTH_ENABLE_LOGGING": "1"}
    with log.open("wb") as file:
        used_before = _used_gib()
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
                if used_before is not None:
                    increase = (_used_gib() or 0.0) - used_before
                    peak_gib = max(peak_gib, increase)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
            exit_code = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    gpu_peak_gib = None if used_before is None else round(peak_gib, 2)
    return Measured(exit_code, _last_message(log), gpu_peak_gib)


def _last_message(log: Path) -> str:
    """Return the error at the end of a log, else its last line."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[-30:] if line.startswith("error: ")]
    if errors:
        message = errors[-1]
    elif lines:
        message = lines[-1]
    else:
        message = "the log is empty"
    return message[:300]


def _used_gib() -> float | None:
    """Return the used memory of the GPU; None without nvidia-smi."""
    gpus, _ = nvidia_gpus(refresh=True)
    if not gpus:
        return None
    return gpus[0].memory_gib - gpus[0].free_gib


def _progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
