"""What is said of a run in words and tables, on the page and for a pull request."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lora_grpo.config import RunConfig
from lora_grpo.evaluation import Report, verdict
from lora_grpo.report.plots import reward_parts
from lora_grpo.runs import RunFiles, flat

_MATTER = (
    "preset",
    "seed",
    "model.name",
    "model.bits",
    "lora.rank",
    "lora.alpha",
    "data.task",
    "data.eval_task",
    "sampling.num_generations",
    "sampling.max_completion_tokens",
    "sampling.temperature",
    "sampling.backend",
    "rewards",
    "train.max_steps",
    "train.prompts_per_step",
    "train.learning_rate",
    "train.lr_scheduler",
    "train.beta",
    "train.max_grad_norm",
    "grpo",
)
"""Settings that a report for a pull request has, whatever they are; beside them those that are not the default."""
_OF_THE_FOLDER = ("output_dir",)
"""Settings that say where a run is, not what it is."""
_SECTIONS = {"policy": "Policy", "data": "Data", "machine": "Machine", "logprob_check": "Sampler against trainer"}
_SECTIONS |= {"plan": "Plan", "memory": "Memory", "filter": "Filter"}


@dataclass(frozen=True)
class Setting:
    """One setting by its dotted name."""

    name: str
    value: str
    default: str | None
    """None where this version has no such setting."""

    @property
    def differs(self) -> bool:
        return self.value != self.default and self.name not in _OF_THE_FOLDER


@dataclass(frozen=True)
class RewardChange:
    """A reward, or the sum of all, as it was in the first and in the last step."""

    name: str
    first: float
    last: float


def state(run: RunFiles) -> str:
    """Say in a sentence what became of the run, and what to do where it is not complete."""
    error = run.record.get("error")
    again = f"python scripts/report.py {shlex.quote(str(run.folder))}"
    said = {
        "complete": "Complete.",
        "running": f"Still running. This page is how it stood when it was written; `{again}` writes it anew.",
        "killed": "Ended without a word: killed, or its machine went down. --resume goes on with it.",
        "interrupted": "Interrupted. --resume goes on with it.",
        "failed": f"Failed: {error or 'no reason was written'}",
    }
    return said.get(run.status, run.status)


def headline(run: RunFiles) -> list[tuple[str, str]]:
    """Return what a reader asks first: label and value."""
    config, record = run.record["config"], run.record
    asked = config["train"]["max_steps"]
    task = config["data"]["task"]
    validation = config["data"].get("eval_task") or task
    rows = [
        ("Recipe", record.get("recipe", "unknown")),
        ("Model", config["model"]["name"]),
        ("Task", task if validation == task else f"{task}, evaluated on {validation}"),
        ("Steps", f"{run.steps} of {asked}{', stopped early' if record.get('stopped_early') else ''}"),
        ("Started", _time(record.get("started"))),
    ]
    if ended := record.get("ended"):
        rows.append(("Took", _span(record.get("started"), ended)))
    if best := record.get("best"):
        rows.append(("Best adapter", f"step {best['step']}, {_best(best)}; in best/"))
    return [(label, str(value)) for label, value in rows]


def verdicts(report: Report) -> list[str]:
    """Return a sentence for each score, and how many problems changed."""
    changed = f"{len(report.fixed)} problems fixed, {len(report.regressed)} regressed"
    return [*map(verdict, report.table), f"{changed}; evaluation/report.json has them"]


def alarms(run: RunFiles) -> list[dict[str, Any]]:
    """Return what the watch said: `step`, `watch`, `message`, and whether it `stopped` the run."""
    return list(run.record.get("alarms") or [])


def reward_changes(run: RunFiles) -> list[RewardChange]:
    """Return the reward and each of its parts, first and last."""
    names = {"reward": "reward", **{name: f"rewards/{name}/mean" for name in reward_parts(run.metrics)}}
    changes = []
    for name, metric in names.items():
        values = [line[metric] for line in run.metrics if isinstance(line.get(metric), (int, float))]
        if values:
            changes.append(RewardChange(name, values[0], values[-1]))
    return changes


def settings(run: RunFiles) -> list[Setting]:
    """Return every setting of the run."""
    defaults = flat(json.loads(json.dumps(RunConfig().to_dict())))
    return [
        Setting(name, shown(value), shown(defaults[name]) if name in defaults else None)
        for name, value in flat(run.record["config"]).items()
    ]


def settings_that_matter(run: RunFiles) -> list[Setting]:
    """Return the settings that make a run what it is."""
    return [found for found in settings(run) if found.name in _MATTER or found.differs]


def differing(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs, each with its value in every run; – where a run has none."""
    values = [{found.name: found.value for found in settings(run)} for run in runs]
    names = [name for name in dict.fromkeys(name for of in values for name in of) if name not in _OF_THE_FOLDER]
    return _apart(names, values)


def versions(run: RunFiles) -> dict[str, str]:
    """Return the version of each package, and the commit that the run was made with where there was one."""
    commit = run.record.get("git_revision")
    return {name: str(value) for name, value in run.record["versions"].items()} | (
        {"commit": shown(commit)} if commit else {}
    )


def versions_differing(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the versions, the commit and the machines that differ between runs."""
    values = [
        versions(run) | {f"machine.{name}": shown(value) for name, value in run.record.get("machine", {}).items()}
        for run in runs
    ]
    return _apart(list(dict.fromkeys(name for of in values for name in of)), values)


def sections(run: RunFiles) -> dict[str, dict[str, str]]:
    """Return what else run.json tells, by heading."""
    found = {title: run.record.get(key) for key, title in _SECTIONS.items()}
    found["Cost"] = {
        name: run.record.get(name) for name in ("seconds_training", "peak_memory_gib", "peak_gpu_memory_gib")
    }
    return {
        title: {name: shown(value) for name, value in flat(values).items() if value is not None}
        for title, values in found.items()
        if isinstance(values, dict) and any(value is not None for value in values.values())
    }


def command(run: RunFiles) -> str:
    """Return the command that began the run."""
    words = run.record.get("command")
    return shlex.join(["python", *map(str, words)]) if isinstance(words, list) else "not recorded"


def shown(value: Any) -> str:
    """Write a setting's value as people read it."""
    if isinstance(value, str):
        return re.sub(r"^([0-9a-f]{16})[0-9a-f]{16,}", r"\1…", value)  # a fingerprint; run.json has the whole
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ", ".join(value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return json.dumps(value, ensure_ascii=False)


def _apart(names: Sequence[str], values: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    rows = [(name, [of.get(name, "–") for of in values]) for name in names]
    return [(name, row) for name, row in rows if len(set(row)) > 1]


def _best(best: dict[str, Any]) -> str:
    said = f"held-out reward {best['reward']:.3g}"
    return said + (f", {100 * best['accuracy']:.1f} % right" if best.get("accuracy") is not None else "")


def _time(stamp: Any) -> str:
    return str(stamp).replace("T", " ").replace("+00:00", " UTC") if stamp else "unknown"


def _span(started: Any, ended: Any) -> str:
    seconds = int((datetime.fromisoformat(str(ended)) - datetime.fromisoformat(str(started))).total_seconds())
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s"
