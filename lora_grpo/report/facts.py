"""Summarize a run in sentences and tables, for the page."""

import json
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_grpo.config import endless_steps
from lora_grpo.progress import duration
from lora_grpo.report.metrics import is_number, reward_metric, reward_names, training_method
from lora_grpo.runs import RunFiles, flatten
from lora_grpo.tasks import task_title

_SHOWN_ELSEWHERE = (
    "config",
    "changed_settings",
    "versions",
    "git_revision",
    "command",
    "alarms",
    "user_files",
    "results",
)
"""Entries of run.json that other parts of the page show, or that contain private paths."""
_RECENT_STEPS = 10
"""The number of last steps whose median is the time of the next ones."""


def headline(run: RunFiles) -> dict[str, str]:
    """Return the most important facts by their label."""
    record = run.record
    facts = {"Recipe": str(record.get("recipe", "unknown"))}
    if training_method(run) == "sft":
        facts["Method"] = "supervised fine-tuning on reference answers (TRL's SFTTrainer)"
    facts["Model"] = record["config"]["model"]["name"]
    facts["Task"] = _tasks(run)
    facts["Steps"] = _steps(run)
    facts["Started"] = str(record.get("started", "unknown")).replace("T", " ").replace("+00:00", " UTC")

    if record.get("ended") and is_number(record.get("seconds_worked")):
        facts["Duration"] = duration(record["seconds_worked"])
        if record.get("resumed"):
            facts["Duration"] += ", without the time between stop and resume"
    if record.get("start"):
        facts["Started from"] = str(record["start"]["name"])
    if record.get("teacher"):
        facts["Teacher"] = _teacher(record)
    if record.get("best"):
        facts["Best adapter"] = _best_adapter(record["best"])
    return facts


def time_left(run: RunFiles) -> str:
    """Return how long a running run still takes, from its last steps and the evaluation of the base; "" if unknown."""
    step_seconds = [line["step_time"] for line in run.metrics[-_RECENT_STEPS:] if is_number(line.get("step_time"))]
    config = run.record["config"]
    if run.status != "running" or not step_seconds or config.get("hours"):
        return ""
    steps_left = config["train"]["max_steps"] - run.steps
    if steps_left <= 0 or run.record.get("stopped_early"):
        return "training is finished; the evaluation follows"
    seconds = steps_left * statistics.median(step_seconds)
    seconds += run.record.get("evaluation_seconds", {}).get("base", 0.0)
    return f"about {duration(seconds)} left, with the evaluation"


def _tasks(run: RunFiles) -> str:
    """Return the title of the task and, if it differs, of the task of the evaluation."""
    data = run.record["config"]["data"]
    task = task_title(data["task"])
    if not data["eval_task"]:
        return task
    eval_task = task_title(data["eval_task"])
    return task if eval_task == task else f"{task}, evaluated on {eval_task}"


def _steps(run: RunFiles) -> str:
    """Return how many steps were trained, and what limits them."""
    config = run.record["config"]
    max_steps = config["train"]["max_steps"]
    hours = config.get("hours")
    if not hours:
        steps = f"{run.steps} of {max_steps}"
    elif max_steps == endless_steps(hours):
        steps = f"{run.steps} in {hours:g} h"
    else:
        steps = f"{run.steps} in {hours:g} h, at most {max_steps}"
    if run.record.get("stopped_early"):
        steps += ", stopped early"
    return steps


def _teacher(record: Mapping[str, Any]) -> str:
    """Return the teacher, what it is, and how it is weighted against the rewards."""
    teacher = record["teacher"]
    settings = record["config"]["teacher"]
    kinds = {
        "base": "the base without an adapter",
        "adapter": "an adapter on the same base",
        "model": f"{teacher['base_model']} in {teacher['bits']} bits",
    }
    description = kinds[teacher["kind"]]
    if teacher["has_own_prompt"]:
        description += ", with prompts of its own"
    weights = f"{settings['loss']}, weight {settings['weight']:g}, rewards {settings['reward_weight']:g}"
    return f"{teacher['name']}: {description}; {weights}"


def _best_adapter(best: dict[str, float | None]) -> str:
    results = f"validation reward {best['reward']:.3g}"
    accuracy = best.get("accuracy")
    if accuracy is not None:
        results += f", {100 * accuracy:.1f}% correct"
    return f"step {best['step']}, {results}; in best/"


@dataclass(frozen=True)
class MetricChanges:
    """How metrics changed from the first to the last step."""

    caption: str
    rows: list[tuple[str, str, str]]
    """Name, first value and last value of each metric that was logged."""


def metric_changes(run: RunFiles) -> MetricChanges:
    """Return the change of each reward or, after supervised fine-tuning, of the loss and the token accuracy."""
    if training_method(run) == "sft":
        caption = "Loss on the reference answers, in nats per token"
        metrics = {"loss": "loss", "token accuracy": "mean_token_accuracy"}
    else:
        caption = "Mean rewards in training, before their weights"
        metrics = {"reward": "reward"}
        for name in reward_names(run.metrics):
            metrics[name] = reward_metric(name)

    rows = []
    for name, metric in metrics.items():
        values = [line[metric] for line in run.metrics if is_number(line.get(metric))]
        if values:
            rows.append((name, f"{values[0]:.3f}", f"{values[-1]:.3f}"))
    return MetricChanges(caption, rows)


def memory_by_phase(run: RunFiles) -> list[tuple[str, str, str, str]]:
    """Return phase, planned GiB, highest measured GiB, and GiB that torch held at most, of a run on a GPU."""
    planned = (run.record.get("memory") or {}).get("planned_phases_gib", {})
    rows = []
    if is_number(run.record.get("peak_start_gib")):
        rows.append(("start", "", f"{run.record['peak_start_gib']:.2f}", ""))
    for phase in ("sampling", "scoring", "teacher", "loss", "backward", "validation"):
        measured = _highest(run, f"memory/{phase}")
        if measured is None:
            continue
        reserved = _highest(run, f"memory/{phase}_reserved")
        rows.append((phase, _gib_text(planned.get(phase)), _gib_text(measured), _gib_text(reserved)))
    return rows


def _highest(run: RunFiles, metric: str) -> float | None:
    values = [line[metric] for line in run.metrics if is_number(line.get(metric))]
    return max(values, default=None)


def _gib_text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def settings(run: RunFiles) -> dict[str, str]:
    """Return every setting of the run by its dotted name, such as `train.learning_rate`."""
    values = flatten(run.record["config"])
    return {name: _value_text(value) for name, value in values.items() if name != "output_dir"}


def preset_name(run: RunFiles) -> str:
    """Return the preset that the run started from: `preset 12gb`."""
    return f"preset {run.record['config'].get('preset')}"


def changed_settings(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return name, value and preset's value of each setting that differs from the preset."""
    values = settings(run)
    preset_values = run.record.get("changed_settings") or {}  # the preset's value of each changed setting
    return [(name, values[name], _value_text(value)) for name, value in preset_values.items() if name in values]


def other_entries(run: RunFiles) -> dict[str, str]:
    """Return the remaining entries of run.json by their dotted name: data, policy, machine, memory, time."""
    entries = {name: value for name, value in run.record.items() if name not in _SHOWN_ELSEWHERE}
    return {name: _value_text(value) for name, value in flatten(entries).items() if value is not None}


def command(run: RunFiles) -> str:
    """Return the command that started the run."""
    words = run.record.get("command", [])
    if len(words) == 1 and words[0].startswith("lora_grpo."):  # a function of the Python API
        return f"{words[0]}(...)"
    if words[:1] != ["lora-grpo"]:
        words = ["python", *words]
    return shlex.join(words)


def _value_text(value: Any) -> str:
    """Return a setting's value as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
