"""Summarize a run in sentences and tables, for the HTML page and the Markdown report."""

import json
import shlex
from typing import Any

from lora_grpo.config import endless_steps
from lora_grpo.evaluation import FORMAT_NOTE as FORMAT_NOTE
from lora_grpo.report.plots import is_number, method, reward_names
from lora_grpo.runs import RunFiles, duration, flatten
from lora_grpo.tasks import task_title

_ELSEWHERE = ("config", "changed_settings", "versions", "git_revision", "command", "alarms", "user_files", "results")
"""Entries of run.json that other parts of the page show, or that contain private paths."""


def headline(run: RunFiles) -> list[tuple[str, str]]:
    """Return the most important facts as pairs of label and value."""
    config, record = run.record["config"], run.record
    data = config["data"]
    task, eval_task = task_title(data["task"]), data["eval_task"] and task_title(data["eval_task"])
    hours, most = config.get("hours"), config["train"]["max_steps"]
    steps = f"{run.steps} of {most}"
    if hours:
        steps = f"{run.steps} in {hours:g} h" + (f", at most {most}" if most != endless_steps(hours) else "")
    rows = [
        ("Recipe", record.get("recipe", "unknown")),
        *([("Method", "supervised fine-tuning on reference answers (TRL's SFTTrainer)")] * (method(run) == "sft")),
        ("Model", config["model"]["name"]),
        ("Task", f"{task}, evaluated on {eval_task}" if eval_task not in (None, task) else task),
        ("Steps", steps + (", stopped early" if record.get("stopped_early") else "")),
        ("Started", str(record.get("started", "unknown")).replace("T", " ").replace("+00:00", " UTC")),
    ]
    if record.get("ended") and is_number(record.get("seconds_worked")):
        pauses = ", without the time between stop and resume" if record.get("resumed") else ""
        rows.append(("Duration", duration(record["seconds_worked"]) + pauses))
    if start := record.get("start"):
        rows.append(("Started from", start["name"]))
    if best := record.get("best"):
        right = f", {100 * best['accuracy']:.1f}% correct" if best.get("accuracy") is not None else ""
        rows.append(("Best adapter", f"step {best['step']}, validation reward {best['reward']:.3g}{right}; in best/"))
    return [(label, str(value)) for label, value in rows]


def changes(run: RunFiles) -> tuple[str, list[tuple[str, str, str]]]:
    """Return a caption, and the name, first and last value of each reward, or of the loss."""
    if method(run) == "sft":
        meaning = "Loss on the reference answers, in nats per token"
        metrics = {"loss": "loss", "token accuracy": "mean_token_accuracy"}
    else:
        meaning = "Mean rewards in training, before their weights"
        metrics = {"reward": "reward", **{name: f"rewards/{name}/mean" for name in reward_names(run.metrics)}}
    values = {
        name: [line[metric] for line in run.metrics if is_number(line.get(metric))] for name, metric in metrics.items()
    }
    return meaning, [(name, f"{found[0]:.3f}", f"{found[-1]:.3f}") for name, found in values.items() if found]


def settings(run: RunFiles) -> dict[str, str]:
    """Return every setting of the run by its dotted name, such as `train.learning_rate`."""
    return {name: shown(value) for name, value in flatten(run.record["config"]).items() if name != "output_dir"}


def changed_settings(run: RunFiles) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the name of the preset, and name, value and preset's value of each setting that differs from it."""
    values, of_preset = settings(run), run.record.get("changed_settings") or {}
    rows = [(name, values[name], shown(value)) for name, value in of_preset.items() if name in values]
    return f"preset {run.record['config'].get('preset')}", rows


def others(run: RunFiles) -> dict[str, str]:
    """Return the remaining entries of run.json by their dotted name: data, policy, machine, memory, time."""
    entries = {name: value for name, value in run.record.items() if name not in _ELSEWHERE}
    return {name: shown(value) for name, value in flatten(entries).items() if value is not None}


def command(run: RunFiles) -> str:
    """Return the command that started the run."""
    words = run.record.get("command", [])
    if len(words) == 1 and words[0].startswith("lora_grpo."):
        return f"{words[0]}(...)"
    return shlex.join(words if words[:1] == ["lora-grpo"] else ["python", *words])


def shown(value: Any) -> str:
    """Return a setting's value as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
