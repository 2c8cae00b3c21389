"""Base against trained: the table at the end of a run, and `evaluation/report.json`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from lora_grpo import atomic, passk
from lora_grpo.config import EvalConfig
from lora_grpo.evaluate import Sample
from lora_grpo.run_record import Run


def compare(before: Sequence[Sample], after: Sequence[Sample], settings: EvalConfig, seed: int) -> list[dict[str, Any]]:
    """Return one row of the table for pass@k of each k, and one for greedy decoding.

    Args:
        before: the base model's samples.
        after: the trained model's samples of the same rows.
        settings: says k and the number of samples.
        seed: of the resampling behind intervals and p-values.

    Returns:
        Rows with `metric`, `before`, `after`, their 95 % intervals, `difference` with its interval, and `p_value`.
    """
    table = []
    n = settings.num_samples
    ids = sorted({sample["id"] for sample in before})
    counts = [_counts(samples, ids) for samples in (before, after)]
    for k in settings.k if n else ():
        values = [passk.per_task_pass_at_k(n, count, k) for count in counts]
        intervals = [
            passk.wilson_interval(int(count.sum()), len(ids)) if n == 1 else passk.bootstrap_interval(value, seed=seed)
            for count, value in zip(counts, values, strict=True)
        ]
        p_value = passk.paired_permutation(values[0], values[1], seed=seed)
        table.append(_row(f"pass@{k}", values, intervals, p_value, seed))
    greedy = [
        np.array([by_id[task] for task in ids])
        for by_id in ({s["id"]: s["passed"] for s in part if s["draw"] == "greedy"} for part in (before, after))
    ]
    intervals = [passk.wilson_interval(int(passed.sum()), len(ids)) for passed in greedy]
    table.append(_row("greedy", [g.astype(float) for g in greedy], intervals, passk.mcnemar_exact(*greedy), seed))
    return table


def conclude(run: Run, before: Sequence[Sample], after: Sequence[Sample]) -> None:
    """Write the report, close run.json, and print the table, the reward's change and what to do next."""
    settings = run.config.eval
    table = compare(before, after, settings, run.config.seed)
    protocol = {
        "task": run.config.data.held_out_task,
        "rows": len({sample["id"] for sample in before}),
        "data_sha256": run.record["data"]["eval"]["sha256"],
        "left_out_as_trained_on": run.record["data"].get("left_out_as_trained_on", 0),
        "sandbox": run.record["data"].get("sandbox"),
        "prompt_style": run.config.data.prompt_style,
        "few_shot": run.config.data.few_shot,
        "num_samples": settings.num_samples,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_completion_tokens": run.config.sampling.max_completion_tokens,
        "seed": run.config.seed,
        "policy": run.record["policy"],
    }
    details = {"base": _details(before), "trained": _details(after)}
    report = {"protocol": protocol, "table": table, **details}
    atomic.write_json(run.evaluation / "report.json", report)
    markdown = _markdown(table, protocol)
    atomic.write_text(run.evaluation / "report.md", markdown)
    reward = reward_curve(run)
    run.finish({"table": table, "reward": reward})
    print_table(table, protocol)
    print(f"reward: {reward['first']:.2f} in step 1, {reward['last']:.2f} in step {reward['steps']}")
    print(
        f"\nadapter   {run.adapter}\nreport    {run.evaluation / 'report.md'}\n"
        f"curves    {run.metrics}\nsamples   {run.evaluation}/*.samples.jsonl\n\n"
        f"use it    PeftModel.from_pretrained(base, {str(run.adapter)!r})\n"
        f"longer    the same command with --resume --train.max-steps {2 * run.config.train.max_steps}"
    )


def reward_curve(run: Run) -> dict[str, float]:
    """Return the mean reward of the first and of the last step, and the number of steps."""
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "reward" in line]  # rollouts used twice are rewarded once
    return {"first": lines[0]["reward"], "last": lines[-1]["reward"], "steps": lines[-1]["step"]}


def print_table(table: Sequence[dict[str, Any]], protocol: dict[str, Any]) -> None:
    """Print the table for people; wide enough for a plain log as well as a terminal."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=_title(protocol))
    for heading in ("", "base", "trained", "difference", "p"):
        shown.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in table:
        shown.add_row(*_cells(row))
    console = Console()
    Console(width=max(console.width, 100)).print(shown)


def _counts(samples: Sequence[Sample], ids: Sequence[str]) -> Any:
    passed: dict[str, int] = defaultdict(int)
    for sample in samples:
        if sample["draw"] != "greedy":
            passed[sample["id"]] += sample["passed"]
    return np.array([passed[task] for task in ids])


def _row(metric: str, values: list[Any], intervals: list[passk.Interval], p_value: float, seed: int) -> dict[str, Any]:
    before, after = values
    return {
        "metric": metric,
        "before": float(before.mean()),
        "before_interval": list(intervals[0]),
        "after": float(after.mean()),
        "after_interval": list(intervals[1]),
        "difference": float((after - before).mean()),
        "difference_interval": list(passk.difference_interval(before, after, seed=seed)),
        "p_value": p_value,
    }


def _details(samples: Sequence[Sample]) -> dict[str, Any]:
    """Sum up one model's sampled completions: the rules side by side, reasons, length, truncation."""
    rules: dict[str, list[bool]] = defaultdict(list)
    reasons: dict[str, int] = defaultdict(int)
    for sample in samples:
        reasons[sample["reason"]] += 1
        for rule, passed in sample["rules"].items():
            rules[rule].append(passed)
    return {
        "samples": len(samples),
        "rules": {rule: sum(passed) / len(passed) for rule, passed in rules.items()},
        "reasons": dict(sorted(reasons.items())),
        "mean_tokens": sum(sample["num_tokens"] for sample in samples) / len(samples),
        "truncated": sum(sample["truncated"] for sample in samples) / len(samples),
    }


def _title(protocol: dict[str, Any]) -> str:
    lost = protocol.get("left_out_as_trained_on")
    return (
        f"{protocol['task']}, {protocol['rows']} held-out problems, {protocol['num_samples']} samples each at "
        f"temperature {protocol['temperature']:g}, 95 % intervals"
        + (f"; {lost} problems of this benchmark were trained on and left out: not comparable" if lost else "")
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def share(value: float, interval: Sequence[float]) -> str:
        return f"{100 * value:.1f} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"

    low, high = row["difference_interval"]
    p_value = "<0.001" if row["p_value"] < 0.001 else f"{row['p_value']:.3f}"
    return (
        row["metric"],
        share(row["before"], row["before_interval"]),
        share(row["after"], row["after_interval"]),
        f"{100 * row['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
        p_value,
    )


def _markdown(table: Sequence[dict[str, Any]], protocol: dict[str, Any]) -> str:
    lines = [_title(protocol), "", "| | base | trained | difference | p |", "|---|---:|---:|---:|---:|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in table]
    lines += ["", "Protocol: `" + json.dumps(protocol) + "`", ""]
    return "\n".join(lines)
