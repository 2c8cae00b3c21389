"""The runs of each part of tools/card.py: one command or several, and what their folders and logs tell.

A side is one row of a table. On a GPU, it trains a model with a published shape and random weights on generated
problems, as `lora-grpo check-gpu` does: 64 completions of 512 tokens a step, prompts of about 440 tokens. With `tiny`,
it is the bundled model on a CPU with four completions of 16 tokens, and what a CPU cannot do is left out or replaced;
the row says so in `instead`.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError, UserError
from lora_grpo.files import atomic
from lora_grpo.gpu_check.measure import PROBLEMS, REWARDS, run_measured
from lora_grpo.gpu_check.random_model import LARGER_QWEN, QWEN
from lora_grpo.memory import KNOWN_MODELS
from lora_grpo.runs import read_metrics
from on_card import small_card

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
Result = dict[str, Any]
"""What a side measured: `status`, `reason`, `seconds`, and whatever its part shows."""

SMALL, MEDIUM, LARGE, TINY = "0.5b", "1.5b", "3b", "tiny"
_SHAPES: dict[str, dict[str, Any]] = {
    SMALL: QWEN,
    MEDIUM: LARGER_QWEN,
    LARGE: {**KNOWN_MODELS["Qwen/Qwen2.5-3B-Instruct"], "eos_token_id": 2, "pad_token_id": 0},
    # A teacher of the bundled model, with as many tokens
    TINY: {**QWEN, "vocab_size": 768, "hidden_size": 224, "intermediate_size": 512, "num_hidden_layers": 2},
}
_MODEL_OF_PRESET = {"8gb": SMALL, "12gb": MEDIUM, "16gb": MEDIUM, "24gb": LARGE}
_BUILD = """
import json, sys, torch
if torch.cuda.is_available():
    torch.set_default_device("cuda")
from lora_grpo.gpu_check.random_model import build
from pathlib import Path
build(Path(sys.argv[1]), json.loads(sys.argv[2]))
"""
"""A program that builds a random model, on the GPU in seconds."""
_TINY = (
    *("--preset", "starter", "--data.task", "starter", "--data.eval-limit", "1", "--model.max-sequence-tokens", "256"),
    *("--train.prompts-per-step", "2", "--sampling.num-generations", "2", "--train.micro-batch-size", "4"),
    *("--sampling.max-completion-tokens", "16", "--rewards", "longer_is_better"),
)
_SHORT = ("--eval.num-samples", "0", "--monitor.rows", "0")
_METRICS = ("step_time", "rollouts/tokens_per_second", "reward", "grad_norm")
_TIMES = "time/"
_MEMORY = "memory/"
"""Prefixes of the trainer's metrics of phases: seconds, and peaks in GiB."""


@dataclass(frozen=True)
class Session:
    """What all parts of one call have in common."""

    output: Path
    tiny: bool
    before: Path | None
    """The tree of an older commit."""
    model: Path | None
    """The folder of a real model, for GSM8K."""
    data: Path | None
    """The folder of GSM8K's train.jsonl and test.jsonl."""

    @property
    def work(self) -> Path:
        """Models and runs, which the next call on this machine uses again."""
        return self.output / "work"

    def run_folder(self, part: str, side: str) -> Path:
        return self.work / "runs" / f"{part}-{_slug(side)}"

    def log(self, part: str, side: str) -> Path:
        folder = self.output / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{part}-{_slug(side)}.log"

    def model_flags(self, shape: str) -> list[str]:
        """Return the flags of the model, the data and the rewards, and build the model if it does not exist."""
        if self.tiny:
            return [*_TINY, *_SHORT]
        return ["--model.name", str(self.random_model(shape)), *PROBLEMS, *REWARDS, *_SHORT]

    def random_model(self, shape: str) -> Path:
        """Return the folder of a model with random weights. Build it if it does not exist."""
        folder = self.work / "models" / shape
        if not folder.exists():
            unfinished = folder.with_name(f"{shape}.unfinished")
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-c", _BUILD, str(unfinished), json.dumps(_SHAPES[shape])]
            built = run_measured(["env", f"PYTHONPATH={ROOT}", *command], self.log("build", shape), 180)
            if built.exit_code != 0:
                raise RunError(f"the model {shape} was not built: {built.message}")
            unfinished.rename(folder)
        return folder


@dataclass(frozen=True)
class Side:
    """A row of a part."""

    name: str
    seconds: float
    """Time limit."""
    measure: Callable[[Session, float], Result]
    """Gets the limit, which is shorter if less time is left."""
    packages: tuple[str, ...] = ()
    """Without one of them, the side is skipped."""

    def missing(self) -> str:
        """Return why the side cannot run here, empty if it can."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"{' and '.join(missing)} not installed" if missing else ""


@dataclass(frozen=True)
class Engine:
    name: str
    bits: int = 4

    def flags(self, session: Session) -> list[str]:
        flags = ["--model.engine", self.name, "--model.bits", str(self.bits)]
        # Unsloth's build for CPUs cannot start vLLM.
        backend = "transformers" if session.tiny and self.name == "unsloth" else "vllm"
        return [*flags, "--sampling.backend", backend]

    def preset(self, session: Session) -> list[str]:
        return [] if session.tiny else ["--preset", "16gb"]

    @property
    def packages(self) -> tuple[str, ...]:
        return ("unsloth", "vllm") if self.name == "unsloth" else ("vllm",)

    def instead(self, session: Session) -> Result:
        """Return the entry that says what a tiny run does in another way."""
        if session.tiny and self.name == "unsloth":
            return {"instead": "Unsloth's CPU build with the built-in sampler, because it cannot start vLLM"}
        return {}


UNSLOTH, PEFT = Engine("unsloth"), Engine("peft")
PEFT_16 = Engine("peft", 16)


def run_command(
    session: Session, part: str, side: str, command: Sequence[str], seconds: float, variables: Mapping[str, str] = {}
) -> Result:
    """Run a command with a time limit, and return its status, its seconds and the GPU's peak."""
    # A CPU is shared with other work, and small models gain nothing from threads.
    variables = {"PYTHONPATH": str(ROOT), **({"OMP_NUM_THREADS": "1"} if session.tiny else {}), **variables}
    # run_measured has Unsloth log its checks, with which Triton would compile all kernels again in every process.
    prefix = ["env", "-u", "UNSLOTH_ENABLE_LOGGING", *(f"{name}={value}" for name, value in variables.items())]
    started = time.monotonic()
    measured = run_measured([*prefix, *command], session.log(part, side), seconds)
    result: Result = {"status": "ran", "reason": None, "seconds": round(time.monotonic() - started, 1)}
    result["command"] = _without_local_paths(shlex.join(command))
    result["gpu_peak_gib"] = measured.gpu_peak_gib
    message = _without_local_paths(measured.message)
    if measured.exit_code is None:
        result |= {"status": "out of time", "reason": f"stopped after {seconds:.0f} s; last: {message}"}
    elif measured.exit_code and "out of memory" in message.lower():
        result |= {"status": "out of memory", "reason": message}
    elif measured.exit_code == UserError.exit_code:
        result |= {"status": "refused", "reason": message}
    elif measured.exit_code:
        result |= {"status": "failed", "reason": message}
    return result


def _without_local_paths(text: str) -> str:
    """Return a command or a message as it may stand in the docs."""
    return text.replace(sys.executable, "python").replace(f"{ROOT}/", "")


def run_recipe(
    session: Session,
    part: str,
    side: str,
    flags: Sequence[str],
    seconds: float,
    *,
    recipe: str = "gsm8k_lora.py",
    tree: Path = ROOT,
    watch: Sequence[str] = (),
    variables: Mapping[str, str] = {},
) -> Result:
    """Run a recipe in a new folder, and return its status and measurements.

    Args:
        tree: the checkout whose recipe and package are run.
        watch: the command in front of the recipe, in place of Python alone.
    """
    folder = session.run_folder(part, side)
    command = [sys.executable, *watch, str(tree / "recipes" / recipe), *flags]
    command += ["--output-dir", str(folder), "--overwrite"]
    result = run_command(session, part, side, command, seconds, {"PYTHONPATH": str(tree), **variables})
    return result | measurements(folder)


def measurements(folder: Path) -> Result:
    """Return what the folder of a run tells: the plan, the peak, and medians of the steps after the first."""
    if not (folder / "run.json").exists():
        return {}
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    memory = record.get("memory") or {}
    policy = record.get("policy") or {}
    peak = record.get("torch_peak_gib", record.get("peak_gpu_memory_gib"))  # the name in an older tree
    found: Result = {
        "engine": policy.get("engine"),
        "bits": policy.get("bits"),
        "micro_batch_size": memory.get("micro_batch_size", record["config"]["train"]["micro_batch_size"]),
        "planned_gib": max(memory.get("planned_phases_gib", {}).values(), default=None),
        "planned_phases_gib": memory.get("planned_phases_gib"),
        "torch_peak_gib": peak,
    }
    if record.get("git_revision"):
        found["commit"] = record["git_revision"]
    return found | step_medians([line for line in read_metrics(folder) if "step_time" in line])


def step_medians(steps: Sequence[Mapping[str, Any]]) -> Result:
    """Return the number of steps, the seconds of the first, and medians of those after it; of memory the highest peak.

    The first step compiles.
    """
    if not steps:
        return {"steps": 0}
    found: Result = {"steps": len(steps), "first_step_time": round(steps[0]["step_time"], 3)}
    times = sorted(name for name in steps[-1] if name.startswith(_TIMES))
    for name in (*_METRICS, *times):
        values = [step[name] for step in steps[1:] or steps if step.get(name) is not None]
        if values:
            found[name] = round(statistics.median(values), 4)
    for name in sorted(name for name in steps[-1] if name.startswith(_MEMORY)):
        found[name] = round(max(step.get(name, 0.0) for step in steps), 3)
    return found


# (a) peaks


def peaks(session: Session, seconds: float) -> Result:
    """Train three steps with the record of torch's allocator."""
    record = session.log("peaks", "record").with_suffix(".json")
    record.unlink(missing_ok=True)
    flags = [*UNSLOTH.preset(session), *session.model_flags(MEDIUM), *UNSLOTH.flags(session), "--train.max-steps", "3"]
    watch = [str(HERE / "watched.py"), str(record)]
    result = run_recipe(session, "peaks", "unsloth", flags, seconds, watch=watch)
    if record.exists():
        result["memory"] = json.loads(record.read_text(encoding="utf-8"))
    return result | UNSLOTH.instead(session)


# (b) small cards


def small_card_side(preset: str) -> Side:
    card = small_card.CARDS[preset]

    def measure(session: Session, seconds: float) -> Result:
        started = time.monotonic()
        flags = [*session.model_flags(_MODEL_OF_PRESET[preset]), "--train.max-steps", "2"]
        instead: Result = {}
        if session.tiny:
            flags += ["--model.engine", "peft", "--sampling.backend", "transformers"]
            instead = {"instead": "nvidia-smi's stub alone, without a balloon: nothing limits the memory of a CPU"}
        else:
            flags = ["--preset", preset, *flags]
        watch = [str(HERE / "watched.py"), "-"]
        with small_card.inside(card, session.work, tiny=session.tiny) as variables:
            left = seconds - (time.monotonic() - started)
            result = run_recipe(session, "small_cards", preset, flags, left, watch=watch, variables=variables)
        return {"card": card.name, "usable_gib": card.usable_gib, **result, **instead}

    return Side(preset, 150, measure)


# (c) before and after


def step_side(engine: Engine, when: str) -> Side:
    name = f"{engine.name} + vllm, {when}"

    def measure(session: Session, seconds: float) -> Result:
        tree = ROOT
        older: Result = {}
        if when == "before":
            if session.before is None:
                return {"status": "skipped", "reason": "no older tree: pass --before"}
            tree = session.before
            older = {"commit": session.before.name}  # unless the tree has its Git history
        flags = [*engine.preset(session), *session.model_flags(MEDIUM), *engine.flags(session)]
        flags += ["--train.max-steps", "4"]
        result = run_recipe(session, "steps", name, flags, seconds, tree=tree)
        return older | result | engine.instead(session)

    return Side(name, 150, measure, engine.packages)


# (d) side by side


def our_side(name: str, engine: Engine) -> Side:
    def measure(session: Session, seconds: float) -> Result:
        flags = [*engine.preset(session), *session.model_flags(MEDIUM), *engine.flags(session)]
        flags += ["--train.max-steps", "4"]
        return run_recipe(session, "side_by_side", name, flags, seconds) | engine.instead(session)

    return Side(name, 150, measure, engine.packages)


def rival_side(name: str, rival: str, bits: int, packages: tuple[str, ...]) -> Side:
    """A training loop of `rivals.py`, on the rows, rewards and settings of ours."""

    def measure(session: Session, seconds: float) -> Result:
        lines = session.log("side_by_side", name).with_suffix(".jsonl")
        lines.unlink(missing_ok=True)
        flags = [*PEFT.preset(session), *session.model_flags(MEDIUM), "--model.bits", str(bits)]
        flags += ["--train.max-steps", "4", "--output-dir", str(session.run_folder("side_by_side", name))]
        if not session.tiny:  # what our plan has chosen for most cards
            flags += ["--train.micro-batch-size", "16"]
        command = [sys.executable, str(HERE / "rivals.py"), rival, str(lines), *flags]
        result = run_command(session, "side_by_side", name, command, seconds)
        steps = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else []
        result |= {"bits": bits, **step_medians(steps)}
        if steps:
            result["torch_peak_gib"] = steps[-1].get("torch_peak_gib")
        if session.tiny:
            result["instead"] = "sampling with transformers: neither loop can use vLLM on a CPU"
        return result

    return Side(name, 150, measure, packages)


# (e) ways of the loss pass


def loss_pass(session: Session, seconds: float) -> Result:
    """Time a micro-batch of PEFT's loss in each way of `benchmark_loss.py`, in one process."""
    if session.tiny:
        flags = ["--model", "starter", "--groups", "1", "--completions", "2", "--prompt", "8", "--completion", "16"]
        flags += ["--repeats", "1"]
    else:
        flags = ["--model", str(session.random_model(MEDIUM))]
        flags += ["--groups", "2", "--completions", "8", "--prompt", "440", "--completion", "512"]
    command = [sys.executable, str(ROOT / "tools" / "benchmark_loss.py"), *flags]
    result = run_command(session, "loss", "peft", command, seconds)
    printed = session.log("loss", "peft").read_text(encoding="utf-8").splitlines()
    result["ways"] = [json.loads(line) for line in printed if line.startswith('{"way"')]
    if session.tiny:
        result["instead"] = "padded rows in place of FlexAttention, which has no gradient on a CPU"
    return result


# (f) a conversation


def conversation(session: Session, seconds: float) -> Result:
    """Train three steps of games with PEFT and vLLM."""
    if session.tiny:
        flags = ["--preset", "starter", "--data.eval-limit", "1", "--train.prompts-per-step", "2"]
        flags += ["--sampling.num-generations", "2", "--train.micro-batch-size", "4"]
        flags += _SHORT
    else:
        flags = ["--preset", "8gb", "--model.name", str(session.random_model(SMALL))]
        flags += ["--data.eval-limit", "1", *REWARDS[:1], REWARDS[-1], *_SHORT]
    flags += ["--model.engine", "peft", "--sampling.backend", "vllm", "--train.max-steps", "3"]
    result = run_recipe(session, "conversation", "guess", flags, seconds, recipe="guess_lora.py")
    steps = read_metrics(session.run_folder("conversation", "guess"))
    turns = [step["conversations/turns"] for step in steps if "conversations/turns" in step]
    return result | {"turns": round(statistics.fmean(turns), 2) if turns else None}


# (g) a teacher

NO_TEACHER = "no teacher"


def teacher_side(name: str, teacher: str, *more_flags: str) -> Side:
    """A run of three steps with PEFT and vLLM.

    Args:
        teacher: "" for none, "adapter" for that of the run without a teacher, or "model" for a larger random one.
    """

    def measure(session: Session, seconds: float) -> Result:
        deadline = time.monotonic() + seconds
        flags = [*PEFT.preset(session), *session.model_flags(MEDIUM), *PEFT.flags(session), "--train.max-steps", "3"]
        if teacher == "model":
            flags += ["--teacher", str(session.random_model(TINY if session.tiny else LARGE))]
        elif teacher == "adapter":
            folder = session.run_folder("teacher", NO_TEACHER)
            if not (folder / "adapter").exists():
                return {"status": "failed", "reason": f"no adapter to teach: measure teacher:{NO_TEACHER!r} first"}
            flags += ["--teacher", str(folder)]
        result = run_recipe(session, "teacher", name, [*flags, *more_flags], deadline - time.monotonic())
        if session.tiny and teacher == "model":
            result["instead"] = "a random model of two layers"
        return result

    return Side(name, 180, measure, PEFT.packages)


# (h) resume


def resume(session: Session, seconds: float) -> Result:
    """Kill a run after its second step, resume it, and compare what both wrote."""
    deadline = time.monotonic() + seconds
    folder = session.run_folder("resume", "killed")
    flags = ["--preset", "starter", "--data.eval-limit", "1", "--train.checkpoint-steps", "1", *_SHORT]
    if session.tiny:
        flags = [*_TINY, "--train.checkpoint-steps", "1", *_SHORT]
    command = [sys.executable, str(ROOT / "recipes" / "gsm8k_lora.py"), *flags, "--train.max-steps", "5"]
    command += ["--output-dir", str(folder)]
    with session.log("resume", "killed").open("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*command, "--overwrite"], stdout=log, stderr=log, env=environment)
        try:
            _wait_for_checkpoint(folder, 2, process, deadline)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
    before = read_metrics(folder)
    if not before:
        return {"status": "failed", "reason": f"no step before the kill ({session.log('resume', 'killed')})"}

    left = deadline - time.monotonic()
    result = run_command(session, "resume", "resumed", [*command, "--resume"], left)
    after = read_metrics(folder)
    result |= measurements(folder)
    result["steps_before_kill"] = [step["step"] for step in before]
    result["steps_after_resume"] = [step["step"] for step in after]
    result["rewards"] = [round(step["reward"], 4) for step in after]
    result["grad_norms"] = [round(step["grad_norm"], 4) for step in after]
    if result["status"] == "ran" and result["steps_after_resume"] != [1, 2, 3, 4, 5]:
        result |= {"status": "failed", "reason": "the resumed run did not write each step once"}
    return result


def _wait_for_checkpoint(folder: Path, step: int, process: subprocess.Popen[bytes], deadline: float) -> None:
    while not (folder / "checkpoints" / f"checkpoint-{step}").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            return
        time.sleep(0.05)


# (i) GSM8K itself


def gsm8k(session: Session, seconds: float) -> Result:
    """Train a real model on GSM8K: SFT on the training solutions, then GRPO, each with the whole test set."""
    deadline = time.monotonic() + seconds
    model, data = session.model, session.data
    if session.tiny:
        data = data or _made_up_gsm8k(session.work / "gsm8k")
    elif model is None or data is None:
        return {"status": "skipped", "reason": "no model or no data: pass --model and --data"}
    common = ["--data.task", "gsm8k", "--data.prompt-style", "hashes", "--monitor.rows", "0"]
    common += ["--data.train", str(data / "train.jsonl"), "--data.eval", str(data / "test.jsonl")]
    if session.tiny:
        common += ["--preset", "starter", "--data.eval-limit", "2", "--train.micro-batch-size", "4"]
        common += ["--eval.num-samples", "1", "--eval.k", "1", "--train.max-steps", "2"]
        sft_flags = [*common, "--train.prompts-per-step", "4", "--sampling.max-completion-tokens", "32"]
        grpo_flags = [*common, "--train.prompts-per-step", "2", "--sampling.num-generations", "2"]
        grpo_flags += ["--sampling.max-completion-tokens", "16"]
    else:
        common += ["--preset", "8gb", "--model.name", str(model), "--model.max-sequence-tokens", "512"]
        common += ["--sampling.max-completion-tokens", "256"]
        sft_flags = [*common, "--train.max-steps", "457", "--train.prompts-per-step", "16"]
        # Greedy answers alone: four samples of 1,319 problems take more than a minute, and GRPO's evaluation has them.
        sft_flags += ["--train.learning-rate", "1e-3", "--eval.num-samples", "0"]
        grpo_flags = [*common, "--train.prompts-per-step", "32", "--sampling.num-generations", "16"]
        grpo_flags += ["--train.learning-rate", "1e-4"]

    sft = run_recipe(session, "gsm8k", "sft", sft_flags, seconds, recipe="sft_lora.py")
    sft_folder = session.run_folder("gsm8k", "sft")
    sft_accuracy = _accuracies(sft_folder)
    if sft["status"] != "ran":
        return {**sft, "reason": f"SFT: {sft['reason']}", "accuracy_of_sft": sft_accuracy}

    # GRPO with the time that is left, of which a part is the last evaluation.
    left = deadline - time.monotonic()
    grpo_flags += ["--lora.from", str(sft_folder), "--rewards", "correct_answer"]
    if not session.tiny:
        grpo_flags += ["--hours", f"{max(0.02, (left - 30) / 3600):.4f}"]
    grpo = run_recipe(session, "gsm8k", "grpo", grpo_flags, left)
    return {
        **grpo,
        "sft_seconds": sft["seconds"],
        "accuracy_of_sft": sft_accuracy,
        "accuracy_of_grpo": _accuracies(session.run_folder("gsm8k", "grpo")),
    }


def _accuracies(folder: Path) -> list[Result]:
    """Return the table of a run's evaluation: each metric before and after, with intervals and p-value."""
    report = folder / "evaluation" / "report.json"
    return json.loads(report.read_text(encoding="utf-8"))["table"] if report.exists() else []


def _made_up_gsm8k(folder: Path) -> Path:
    """Write files in GSM8K's form."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, offset in (("train", 0), ("test", 100)):
        lines = []
        for number in range(offset, offset + 40):
            solution = f"{number} + 2 = <<{number}+2={number + 2}>>{number + 2}\n#### {number + 2}"
            lines.append(json.dumps({"question": f"Ann has {number} pens and buys 2. How many?", "answer": solution}))
        atomic.write_text(folder / f"{split}.jsonl", "\n".join([*lines, ""]))
    return folder


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


PARTS: dict[str, tuple[Side, ...]] = {
    "peaks": (Side("unsloth + vllm", 200, peaks, UNSLOTH.packages),),
    "small_cards": tuple(small_card_side(preset) for preset in ("12gb", "8gb", "24gb", "16gb")),
    "steps": tuple(step_side(engine, when) for engine in (UNSLOTH, PEFT) for when in ("before", "now")),
    "side_by_side": (
        rival_side("TRL's colocate mode, 16 bits", "trl", 16, ("vllm",)),
        our_side("ours, peft + vllm, 16 bits", PEFT_16),
        rival_side("Unsloth's notebook loop, 4 bits", "unsloth", 4, UNSLOTH.packages),
        our_side("ours, unsloth + vllm, 4 bits", UNSLOTH),
    ),
    "loss": (Side("peft, 4 bits", 200, loss_pass),),
    "conversation": (Side("peft + vllm", 180, conversation, PEFT.packages),),
    "teacher": (
        teacher_side(NO_TEACHER, ""),
        teacher_side("another adapter", "adapter"),
        teacher_side("another adapter, whole distributions", "adapter", "--teacher.loss", "reverse_kl"),
        teacher_side("a model of 3B in 4 bits", "model"),
    ),
    "resume": (Side("killed and resumed", 240, resume),),
    "gsm8k": (Side("SFT, then GRPO", 560, gsm8k),),
}
"""In order of value."""
