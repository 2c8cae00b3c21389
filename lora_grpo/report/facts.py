"""Summarize a run in sentences and tables, for the HTML page and the Markdown report."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from lora_grpo import commands
from lora_grpo.config import endless_steps
from lora_grpo.evaluation import FORMAT_NOTE as FORMAT_NOTE
from lora_grpo.evaluation import Report
from lora_grpo.report.plots import is_number, method, reward_names
from lora_grpo.runs import RunFiles, duration, flat
from lora_grpo.tasks import task_title

_SECTIONS = ("policy", "data", "machine", "logprob_check", "plan", "memory", "filter")
"""Parts of run.json that have their own section."""
_COSTS = ("seconds_training", "peak_memory_gib", "peak_gpu_memory_gib")


def state(run: RunFiles) -> str:
    """Return a sentence about how the run ended and, if it is incomplete, how to continue."""
    update = commands.command("report", run.folder)
    sentences = {
        "complete": "Complete.",
        "running": f"Still running. `{update}` updates this page.",
        "killed": "The process was killed or its machine went down. Resume it with --resume.",
        "interrupted": "Interrupted. Resume it with --resume.",
        "failed": f"Failed: {run.record.get('error') or 'no reason was recorded'}",
    }
    return sentences.get(run.status, run.status)


def headline(run: RunFiles) -> list[tuple[str, str]]:
    """Return the most important facts as pairs of label and value."""
    config, record = run.record["config"], run.record
    data = config["data"]
    task, eval_task = task_title(data["task"]), data["eval_task"] and task_title(data["eval_task"])
    stopped = ", stopped early" if record.get("stopped_early") else ""
    rows = [
        ("Recipe", record.get("recipe", "unknown")),
        *([("Method", "supervised fine-tuning on gold solutions (TRL's SFTTrainer)")] * (method(run) == "sft")),
        ("Model", config["model"]["name"]),
        ("Task", f"{task}, evaluated on {eval_task}" if eval_task not in (None, task) else task),
        ("Steps", f"{run.steps}{_limit(config)}{stopped}"),
        ("Started", _time(record.get("started"))),
    ]
    if record.get("ended") and is_number(record.get("seconds_worked")):
        pauses = ", without the time between stop and resume" if record.get("resumed") else ""
        rows.append(("Duration", duration(record["seconds_worked"]) + pauses))
    if correction := record.get("importance_sampling"):
        rows.append(("Importance sampling", correction["mode"]))
    if evaluated := (record.get("time_budget") or {}).get("eval_rows"):
        rows.append(("Evaluated rows", f"{evaluated} of {record['data']['eval']['rows']}, which fit in --hours"))
    if best := record.get("best"):
        accuracy = f", {100 * best['accuracy']:.1f}% correct" if best.get("accuracy") is not None else ""
        rows.append(
            ("Best adapter", f"step {best['step']}, validation reward {best['reward']:.3g}{accuracy}; in best/")
        )
    return [(label, str(value)) for label, value in rows]


def related_runs(run: RunFiles) -> list[tuple[str, str, str | None]]:
    """Return label, name and relative URL of the run that this one started from; the URL is None without a report."""
    start = run.record.get("start")
    if not start:
        return []
    page = f"{start.get('run')}/report/report.html"
    return [("Started from", start["name"], quote(f"../{page}") if (run.folder.resolve() / page).is_file() else None)]


def verdicts(report: Report) -> list[str]:
    """Return a sentence for each score, and the number of changed problems."""
    return [*(row.verdict for row in report.table), report.changed]


def changed_problems(report: Report) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return the fixed and regressed problems, each with its id and the number of samples passed before and after."""
    return [
        (word, [(str(c.task_id), "{} of {}".format(*c.before), "{} of {}".format(*c.after)) for c in changes])
        for word, changes in (("Fixed", report.fixed), ("Regressed", report.regressed))
        if changes
    ]


def trained_metrics(run: RunFiles) -> tuple[str, str]:
    """Return the heading of `changes`, and the sentence that explains its values."""
    if method(run) == "sft":
        return "Loss", "Loss on the gold solutions, in nats per token"
    return "Reward", "Mean rewards in training, before their weights"


def changes(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return the name, first value, and last value of the total reward and of each reward, or of the loss of SFT."""
    metrics = {"reward": "reward", **{name: f"rewards/{name}/mean" for name in reward_names(run.metrics)}}
    if method(run) == "sft":
        metrics = {"loss": "loss", "token accuracy": "mean_token_accuracy"}
    values = {
        name: [line[metric] for line in run.metrics if is_number(line.get(metric))] for name, metric in metrics.items()
    }
    return [(name, f"{found[0]:.3f}", f"{found[-1]:.3f}") for name, found in values.items() if found]


def settings(run: RunFiles) -> dict[str, str]:
    """Return every setting of the run by its dotted name, such as `train.learning_rate`."""
    return {name: shown(value) for name, value in flat(run.record["config"]).items() if name != "output_dir"}


def changed_settings(run: RunFiles) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the name of the preset, and name, value and preset's value of each setting that differs from it."""
    values, of_preset = settings(run), run.record.get("changed_settings") or {}
    rows = [(name, values[name], shown(value)) for name, value in of_preset.items() if name in values]
    return f"preset {run.record['config'].get('preset')}", rows


def versions(run: RunFiles) -> dict[str, str]:
    """Return the version of each package, and the git commit if it is known."""
    commit = run.record.get("git_revision")
    return {**run.record["versions"], **({"commit": shown(commit)} if commit else {})}


def versions_and_machine(run: RunFiles) -> dict[str, str]:
    """Return the versions and the properties of the machine."""
    machine = run.record.get("machine", {})
    return versions(run) | {f"machine.{name}": shown(value) for name, value in machine.items()}


def different(of_runs: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Return the values that differ between runs, with their value in each run."""
    names = dict.fromkeys(name for of_run in of_runs for name in of_run)
    rows = [(name, [of_run.get(name, "–") for of_run in of_runs]) for name in names]
    return [(name, row) for name, row in rows if len(set(row)) > 1]


def sections(run: RunFiles) -> dict[str, dict[str, str]]:
    """Return the remaining parts of run.json by heading."""
    parts = {name: run.record.get(name) for name in _SECTIONS}
    parts["cost"] = {name: run.record[name] for name in _COSTS if name in run.record}
    return {
        name.replace("_", " ").capitalize(): {
            key: shown(value) for key, value in flat(part).items() if value is not None
        }
        for name, part in parts.items()
        if part
    }


def command(run: RunFiles) -> str:
    """Return the command that started the run."""
    words = run.record.get("command", [])
    return shlex.join(words if words[:1] == ["lora-grpo"] else ["python", *words])


def shown(value: Any) -> str:
    """Return a setting's value as text."""
    if isinstance(value, str):
        return re.sub(r"^([0-9a-f]{16})[0-9a-f]{16,}", r"\1…", value)  # a fingerprint; run.json has the full value
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ", ".join(value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return json.dumps(value, ensure_ascii=False)


def _time(stamp: Any) -> str:
    return str(stamp).replace("T", " ").replace("+00:00", " UTC") if stamp else "unknown"


def _limit(config: dict[str, Any]) -> str:
    """Return what limited the number of steps."""
    hours, steps = config.get("hours"), config["train"]["max_steps"]
    if not hours:
        return f" of {steps}"
    return f" in {hours:g} h" + (f", at most {steps}" if steps != endless_steps(hours) else "")
