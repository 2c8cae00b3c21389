"""Does the real recipe run on this card, how fast, and did the memory plan tell the truth? One row an answer.

A row is a model's size, an engine and a sampling backend. It runs the recipe as a user would, as a command of its own,
on random weights and problems made here: nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lora_grpo import json_lines, pretended_card, starter
from lora_grpo.card_memory import MemoryWatch
from lora_grpo.errors import RunError, UserError
from lora_grpo.gpu_check_table import write
from lora_grpo.gpu_limits import Limits, StepWork
from lora_grpo.hardware import nvidia_gpus
from lora_grpo.memory import Shape
from lora_grpo.random_model import QWEN, Sizes, build_command
from lora_grpo.run_record import git_revision, now, versions
from lora_grpo.starter.problems import pool

ENGINES, BACKENDS = ("peft", "unsloth"), ("vllm", "transformers")
_NEEDED = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")
_STEPS = {"vllm": 3, "transformers": 2}
"""Of each row; the first is for warming up and counts only where there is no other."""
_ROW_SHARE = 1 / 3
"""Of all the time, for one row."""
_LEAST_SECONDS = 20
"""No row is begun with less time than this: it would not reach its first step."""
_QUESTION_TOKENS = 440
"""With the system prompt and the template near the 512 tokens that the presets leave a prompt."""
_REWARDS = ("correct_answer=2.0", "soft_xml_format=0.5")
_COIN = "pattern:x77[01][0-9][0-9]=1.0"
"""Random words earn nothing of the others, and equal rewards have no gradient. About half of the completions of 512
words have one of these 200 of 151,936."""
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


@dataclass(frozen=True)
class Row:
    """One combination."""

    model: str
    """Name of the sizes, e.g. `0.5B`."""
    sizes: Sizes
    engine: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.engine}-{self.backend}"


@dataclass(frozen=True)
class Plan:
    """What is the same for every row."""

    recipe: Path
    """The script."""
    output: Path
    """Folder of the results."""
    seconds: float
    """For everything."""
    arguments: tuple[str, ...] = ()
    """More arguments for the recipe, the last to be given."""
    coin: str = _COIN
    """A reward that about half of the random completions earn."""
    pretend_gib: float | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """What the results say of the machine."""
    limits: Limits | None = None


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
    if options.pretend_gb is not None and not 1 <= options.pretend_gb <= gpus[0].memory_gib:
        raise UserError(
            f"--pretend-gb is {options.pretend_gb:g}; expected 1 to the {gpus[0].memory_gib:.0f} of {gpus[0].name}"
        )
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"training needs {', '.join(missing)}, not installed here; run `pip install -e .[gpu]`")
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
    """Run the rows in turn and write the results after each, and also where it is interrupted.

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
    with contextlib.ExitStack() as stack:
        stack.callback(write, plan.output, plan.about, results)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lora_grpo-check-")))
        if plan.pretend_gib:
            stack.enter_context(pretended_card.rest_held(plan.pretend_gib))
        write_problems(folder)
        built: dict[str, Path | str] = {}
        for place, (row, result) in enumerate(zip(rows, results, strict=True)):
            left = ends - time.monotonic()
            reason = _missing(row) or ("the time is used up" if left < min(_LEAST_SECONDS, plan.seconds / 10) else None)
            if reason is None:
                print(f"{row.name}: {left:.0f} s are left", file=sys.stderr)
                model = _built(row, folder, built, ends)
                if isinstance(model, Path):
                    result |= _run(row, plan, folder, model, min(ends - time.monotonic(), plan.seconds * _ROW_SHARE))
                else:
                    result |= {"status": "failed", "reason": model}
            else:
                result |= {"status": "skipped", "reason": reason}
            print(f"{row.name}: {result['status']}{_because(result)}", file=sys.stderr)
            write(plan.output, plan.about, results)
            if row.model not in {later.model for later in rows[place + 1 :]}:
                shutil.rmtree(folder / f"random-{row.model}", ignore_errors=True)
    return results


def _because(result: dict[str, Any]) -> str:
    return f" ({result['reason']})" if result.get("reason") else ""


def _missing(row: Row) -> str | None:
    """Say which package a row lacks."""
    needed = (["unsloth"] if row.engine == "unsloth" else []) + (["vllm"] if row.backend == "vllm" else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def _measured_limits() -> dict[str, Any]:
    """Measure in a process of its own, whose share of the card's memory ends with it."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=False)
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
        for problem in pool(split, count):
            text = f"{problem.question} " * _QUESTION_TOKENS  # each has a token at least
            end = tokenizer.encode(text).offsets[_QUESTION_TOKENS][0]
            rows.append({"question": text[:end], "answer": problem.answer})
        (folder / f"{split}.jsonl").write_text(json_lines.dump(rows), encoding="utf-8")


def _built(row: Row, folder: Path, built: dict[str, Path | str], ends: float) -> Path | str:
    """Return the folder of the row's model, built now unless it is there, or why it could not be built."""
    if row.model not in built:
        path = folder / f"random-{row.model}"
        code, said = _command(build_command(path, row.sizes), folder / "build.log", ends - time.monotonic())
        built[row.model] = path if code == 0 else f"the random model was not built: {said or 'no time was left'}"
    return built[row.model]


def _run(row: Row, plan: Plan, folder: Path, model: Path, seconds: float) -> dict[str, Any]:
    """Run one row and return what its result adds."""
    logs = plan.output / "logs"
    logs.mkdir(exist_ok=True)
    log, run = logs / f"{row.name}.log", folder / row.name
    with MemoryWatch() as watch:
        started = time.monotonic()
        code, last = _command(_recipe_command(row, plan, folder, model, run), log, seconds)
        took = time.monotonic() - started
    found = {"seconds": round(took, 1), "log": str(log), "card_peak_gib": watch.peak_gib}
    found |= _figures(run, row, plan)
    shutil.rmtree(run, ignore_errors=True)
    if code is None and found["steps"]:
        return found | {"status": "ran", "reason": f"stopped after {took:.0f} s"}
    if code is None:
        # A row that had all of its time has failed; one that had what was left of it has not.
        status = "failed" if seconds >= plan.seconds * _ROW_SHARE else "skipped"
        return found | {"status": status, "reason": f"no step within {took:.0f} s; last: {last}"}
    if code == UserError.exit_code and " does not fit on " in last:  # the kit's own plan, before anything is loaded
        return found | {"status": "skipped", "reason": last.removeprefix("error: ").partition(";")[0]}
    if code:
        return found | {"status": "failed", "reason": f"{last} ({log})"}
    wrong = _wrong(found)
    return found | ({"status": "failed", "reason": f"{wrong} ({log})"} if wrong else {"status": "ran", "reason": None})


def _recipe_command(row: Row, plan: Plan, folder: Path, model: Path, run: Path) -> list[str]:
    arguments = [
        *("--output-dir", str(run), "--model.name", str(model), "--model.engine", row.engine),
        *("--sampling.backend", row.backend),
        *("--data.train", str(folder / "train.jsonl"), "--data.eval", str(folder / "eval.jsonl")),
        *("--data.eval-limit", "1", "--eval.num-samples", "0"),
        *("--train.max-steps", str(_STEPS[row.backend]), "--rewards", *_REWARDS, plan.coin),
    ]
    if importlib.util.find_spec("bitsandbytes") is None:
        arguments += ["--model.bits", "16", "--train.optimizer", "adamw_torch"]
    arguments += plan.arguments
    if plan.pretend_gib:
        return pretended_card.command(plan.pretend_gib, plan.recipe, arguments)
    return [sys.executable, str(plan.recipe), *arguments]


def _command(command: list[str], log: Path, seconds: float) -> tuple[int | None, str]:
    """Run a command and whatever it starts, for so long and no longer.

    Returns:
        Its exit code, None where its time ran out; and the line of its log that says most.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            code: int | None = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, _last_words(log.read_text(encoding="utf-8", errors="replace"))


def _last_words(text: str) -> str:
    """Return the error that a log ends in, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[-30:] if line.startswith("error: ")]
    return (errors or lines or ["nothing was said"])[-1][:300]


def _figures(run: Path, row: Row, plan: Plan) -> dict[str, Any]:
    """Read what a run has left, finished or not."""
    record: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    steps = [line for line in json_lines.read_finished(run / "metrics.jsonl") if "step_time" in line]
    found: dict[str, Any] = {
        "steps": len(steps),
        "torch_peak_gib": record.get("peak_gpu_memory_gib"),
        "parity": record.get("parity"),
    }
    if planned := record.get("memory"):
        found |= {"memory_plan": planned, "planned_gib": max(planned["planned_phases_gib"].values())}
    if not steps:
        return found
    counted = steps[1:] or steps

    def middle(name: str) -> float | None:
        values = [step[name] for step in counted if _is_finite(step.get(name))]
        return round(statistics.median(values), 3) if values else None

    config = record["config"]
    completions = config["train"]["prompts_per_step"] * config["sampling"]["num_generations"]
    length = steps[-1]["completions/mean_length"]
    found |= {
        "preset": config["preset"],
        "bits": config["model"]["bits"],
        "micro_batch_size": (record.get("memory") or {}).get("micro_batch_size", config["train"]["micro_batch_size"]),
        "completions_per_step": completions,
        "completion_tokens": length,
        "prompt_tokens": round(steps[-1]["num_tokens"] / len(steps) / completions - length, 1),
        "grad_norm": [norm if _is_finite(norm := step.get("grad_norm")) else str(norm) for step in steps],
        "clipped_ratio": steps[-1]["completions/clipped_ratio"],
        "step_seconds": middle("step_time"),
        "rollout_seconds": middle("time/rollouts"),
        "reward_seconds": middle("time/rewards"),
        "training_seconds": middle("time/training"),
        "tokens_per_second": middle("rollouts/tokens_per_second"),
    }
    if plan.limits is None:
        return found
    work = StepWork(
        Shape.of(row.sizes.config()),
        completions,
        found["prompt_tokens"],
        length,
        config["model"]["bits"],
        config["lora"]["rank"],
        config["train"]["gradient_checkpointing"],
    )
    bound = work.decoding_bound(plan.limits)
    found["decoding_bound_tokens_per_second"] = round(bound)
    if found["tokens_per_second"]:
        found["decoding_share"] = round(found["tokens_per_second"] / bound, 4)
    if found["training_seconds"]:
        found["training_share"] = round(work.training_share(found["training_seconds"], plan.limits), 4)
    return found


def _wrong(found: dict[str, Any]) -> str | None:
    """Say what a run that ended well has nevertheless done wrong."""
    norms = found.get("grad_norm", [])
    if any(isinstance(norm, str) for norm in norms):
        return f"a gradient is not finite: its norms are {norms}"
    if not any(norms):
        return "no step had a gradient"
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
