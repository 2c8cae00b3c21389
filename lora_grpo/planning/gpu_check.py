"""The GPU check: runs the recipe with every engine and sampling backend, and measures time and memory.

The model has the published shape of Qwen2.5-0.5B and random weights, and is built on this machine. All tokens are about
equally likely, so almost every completion has the maximum length: the worst case for memory and time.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lora_grpo import starter
from lora_grpo.commands import command
from lora_grpo.config import driver_problem, nvidia_gpus, use_one_gpu
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import atomic, json_files, lock, markdown_table
from lora_grpo.flags import Flag
from lora_grpo.models import KNOWN_MODELS
from lora_grpo.runs import git_revision, now, read_metrics, versions

ROWS = (("peft", "transformers"), ("unsloth", "transformers"), ("peft", "vllm"), ("unsloth", "vllm"))
"""Engines and sampling backends in order of start-up time, so that the slow ones get the remaining time."""
PROBLEMS = ("--data.task", "starter", "--data.train-limit", "64", "--data.few-shot", "6", "--data.eval-limit", "1")
"""Generated problems. With six examples, prompts have about 440 tokens, close to the 512 of the memory plan."""
REWARDS = ("--rewards", "correct_answer=2.0", "soft_xml_format=0.5", "pattern:x77[01][0-9][0-9]=1.0")
"""Random tokens earn none of the first two, and equal rewards have no gradient. About half of the completions with 512
tokens contain one of the pattern's 200 (of 151,936) tokens."""
_BUILD = """
import json, sys
from pathlib import Path
from lora_grpo.planning.gpu_check import build
build(Path(sys.argv[1]), json.loads(sys.argv[2]))
"""
QWEN = {**KNOWN_MODELS["Qwen/Qwen2.5-0.5B-Instruct"], "eos_token_id": 2, "pad_token_id": 0}
"""config.json of Qwen2.5-0.5B, with the special tokens of the bundled tokenizer."""
_STEPS = {"vllm": "3", "transformers": "2"}
"""Steps of a row. The first step is a warm-up; it is measured only if there is no other step."""
_POLL_SECONDS = 0.25  # GPU memory peaks that are shorter can be missed
_TRY_TORCH = "import torch; torch.ones(1, device='cuda')"
_METRICS = ("step_time", "time/rollouts", "time/rewards", "time/training", "rollouts/tokens_per_second")
_COLUMNS = (
    ("engine", "engine", "{}"),
    ("sampling", "backend", "{}"),
    ("base bits", "bits", "{}"),
    ("step, s", "step_time", "{:.2f}"),
    ("rollouts", "time/rollouts", "{:.2f}"),
    ("rewards", "time/rewards", "{:.2f}"),
    ("training", "time/training", "{:.2f}"),
    ("tokens/s", "rollouts/tokens_per_second", "{:,.0f}"),
    ("planned, GiB", "planned_gib", "{:.2f}"),
    ("torch peak", "torch_peak_gib", "{:.2f}"),
    ("GPU peak", "gpu_peak_gib", "{:.2f}"),
)
"""Column heading, key in a result, and format."""


@dataclass(frozen=True)
class Options:
    minutes: float = 8.0
    """Time limit for the whole check, in minutes."""
    output: Annotated[Path, Flag("--output-dir", "--output")] = Path("outputs/check_gpu")
    """Folder for the table (results.md), the measurements (results.json) and a log of every engine and backend."""


def check_gpu(options: Options, recipe: Path) -> None:
    """Run the recipe with every engine and backend, write and print the table, and print a conclusion.

    Raises:
        UserError: torch cannot use the GPU.
        RunError: an engine failed, or none ran.
    """
    gpus, why_none = nvidia_gpus()
    if not gpus:
        on_cpu = command("train gsm8k", "--preset", "starter")
        raise UserError(f"no NVIDIA GPU found ({why_none}); run this where `nvidia-smi` lists one, or try {on_cpu}")
    if problem := driver_problem(gpus[0]):
        raise UserError(problem)
    with lock.holding(options.output):
        use_one_gpu()  # also applies to the processes started below
        gpu = f"{gpus[0].name} with {gpus[0].memory_gib:.0f} GiB"
        _progress(f"{gpu}\n")
        code, message, _ = run_measured([sys.executable, "-c", _TRY_TORCH], options.output / "torch.log", 120)
        if code != 0:
            torch = versions()["torch"]
            raise UserError(f"torch {torch} cannot use {gpu}: {message}; install torch's CUDA build or a newer driver")
        machine = {"gpu": gpu, "versions": versions(), "git_revision": git_revision(), "started": now()}
        results = run_rows(ROWS, QWEN, options, recipe, machine)
    print((options.output / "results.md").read_text(encoding="utf-8"))
    print(conclude(results))


def run_rows(
    rows: Sequence[tuple[str, str]],
    config: dict[str, Any],
    options: Options,
    recipe: Path,
    machine: dict[str, Any],
    arguments: Sequence[str] = REWARDS,
) -> list[dict[str, Any]]:
    """Run the recipe for each engine and backend, on a random model, and return one result per row.

    The files in the output folder always contain the results so far. A result has a `status` (ran, skipped or failed),
    the `reason` and, if the recipe was started, the measurements.

    Args:
        config: config.json of the random model.
        machine: further entries of results.json.
        arguments: further arguments of the recipe.
    """
    results = [{"engine": each, "backend": other, "status": "not run", "reason": "interrupted"} for each, other in rows]
    deadline, logs = time.monotonic() + 60 * options.minutes, options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _write(options.output, machine, results)
    with tempfile.TemporaryDirectory(prefix="lora_grpo-check-") as folder:
        model = Path(folder) / "model"
        code, message, _ = run_measured(build_command(model, config), logs / "build.log", 60 * options.minutes)
        if code != 0:
            raise RunError(f"the random model was not built: {message} ({logs / 'build.log'})")
        for number, result in enumerate(results):
            seconds = (deadline - time.monotonic()) / (len(results) - number)
            _progress(f"{result['engine']} + {result['backend']} (at most {seconds:.0f} s): ")
            names = {result["engine"], result["backend"]} & {"unsloth", "vllm"}
            if missing := sorted(name for name in names if importlib.util.find_spec(name) is None):
                result |= {"status": "skipped", "reason": f"{' and '.join(missing)} not installed"}
            else:
                flags = ["--model.name", str(model), *PROBLEMS, "--eval.num-samples", "0", *arguments]
                result |= _run_row(result, [sys.executable, str(recipe), *flags], logs, Path(folder), seconds)
            _write(options.output, machine, results)
            rate = f"{result['step_time']:.2f} s per step" if result["status"] == "ran" else result["reason"]
            _progress(f"{result['status']}, {rate}\n")
    return results


def _run_row(row: dict[str, Any], arguments: Sequence[str], logs: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Run the recipe with an engine and a backend, and return its status and measurements."""
    engine, backend = row["engine"], row["backend"]
    run, log = folder / f"{engine}-{backend}", logs / f"{engine}-{backend}.log"
    flags = ["--model.engine", engine, "--sampling.backend", backend, "--train.max-steps", _STEPS[backend]]
    code, message, peak = run_measured([*arguments, *flags, "--output-dir", str(run)], log, seconds)
    found: dict[str, Any] = {"log": str(log), "gpu_peak_gib": peak, "status": "ran", "reason": None}
    steps = [line for line in read_metrics(run) if "step_time" in line]
    if steps:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        memory = record.get("memory") or {}
        found |= {name: round(statistics.median(step[name] for step in steps[1:] or steps), 3) for name in _METRICS}
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
    if code is None and steps:
        return found | {"reason": f"stopped after {seconds:.0f} s"}
    if code is None:
        return found | {"status": "failed", "reason": f"no step within {seconds:.0f} s; last: {message}"}
    if code or not any(step["grad_norm"] for step in steps):
        return found | {"status": "failed", "reason": f"{message if code else 'no step had a gradient'} ({log})"}
    return found


def build_command(folder: Path, config: dict[str, Any]) -> list[str]:
    """Return the command that runs `build` in its own process, so that this one does not load torch."""
    return [sys.executable, "-c", _BUILD, str(folder), json.dumps(config)]


def build(folder: Path, config: dict[str, Any]) -> None:
    """Write a model with a config.json: bfloat16 weights, the bundled tokenizer and its chat template.

    The tokenizer gets a token for every id, so that any completion can be decoded. No merge produces the added tokens,
    so the encoding of texts does not change.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    source = starter.model_path()
    shutil.copy(source / "chat_template.jinja", folder)
    settings = json_files.read_object(source / "tokenizer_config.json")
    atomic.write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": 32_768})
    tokenizer = json_files.read_object(source / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"x{number}": number for number in range(config["vocab_size"]) if number not in taken}
    atomic.write_json(folder / "tokenizer.json", tokenizer)


def run_measured(arguments: Sequence[str], log: Path, seconds: float) -> tuple[int | None, str, float | None]:
    """Run a command without network access, and kill it and its child processes at the time limit.

    Returns:
        The exit code, or None at the time limit. The error at the end of the log, else its last line. The increase of
        used GPU memory in GiB, as reported by nvidia-smi, including the CUDA context and memory outside of torch;
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
    """Return which engines and backends work, in one sentence, or raise a RunError if one failed or none ran."""
    ran = [f"{each['engine']} + {each['backend']}" for each in results if each["status"] == "ran"]
    works = f"this GPU works with {', '.join(ran) or 'no engine and backend'}"
    broken = [each for each in results if each["status"] == "failed" or not ran]
    if broken:
        failures = [f"{each['engine']} + {each['backend']} {each['status']}, {each['reason']}" for each in broken]
        raise RunError(f"{works}: {'; '.join(failures)}")
    return works


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
    table = markdown_table([heading for heading, *_ in _COLUMNS], cells, left=3)
    lines = [f"{machine['gpu']}; {packages}; {machine['started']}.", "", *table]
    lines += [f"- {r['engine']} + {r['backend']}: {r['status']}, {r['reason']}" for r in results if r["reason"]]
    atomic.write_text(folder / "results.md", "\n".join(lines).rstrip() + "\n")
