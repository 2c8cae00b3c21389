"""Writes the results of a GPU check: results.json with all measurements, and results.md with a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo.files import atomic

_COLUMNS = (
    ("model", "model", "{}"),
    ("engine", "engine", "{}"),
    ("sampling", "backend", "{}"),
    ("base bits", "bits", "{}"),
    ("step, s", "step_seconds", "{:.2f}"),
    ("rollouts", "rollout_seconds", "{:.2f}"),
    ("rewards", "reward_seconds", "{:.2f}"),
    ("training", "training_seconds", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("of limit", "decoding_share", "{:.1%}"),
    ("training, of limit", "training_share", "{:.1%}"),
    ("planned, GiB", "planned_gib", "{:.2f}"),
    ("torch peak", "torch_peak_gib", "{:.2f}"),
    ("GPU peak", "gpu_peak_gib", "{:.2f}"),
)
"""Column heading, key in a result, and format."""


def write(folder: Path, machine: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """Write results.json, and results.md with a table of the rows that ran and the reasons of the other rows.

    Args:
        folder: output folder.
        machine: GPU, versions and measured limits.
        results: one result per row; see `check.run_rows`.
    """
    atomic.write_json(folder / "results.json", {**machine, "rows": list(results)})
    headings = " | ".join(heading for heading, *_ in _COLUMNS)
    lines = [_describe(machine), "", f"| {headings} |", "|---" * 4 + "|---:" * 10 + "|"]
    for result in results:
        if result["status"] == "ran":
            cells = " | ".join(_cell(result[key], form) for _, key, form in _COLUMNS)
            lines.append(f"| {cells} |")
    lines.append("")
    lines += [f"- {each['row']}: {each['status']}, {each['reason']}" for each in results if each["reason"]]
    atomic.write_text(folder / "results.md", "\n".join(lines).rstrip() + "\n")


def _describe(machine: dict[str, Any]) -> str:
    measured = machine["measured"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['gpu']} with {machine['memory_gib']:.0f} GiB; measured {measured['copy_gb_per_second']:,.0f} GB/s "
        f"copying and {measured['matmul_tflops']:,.0f} TFLOP/s in {measured['precision']}; {packages}; "
        f"{machine['started']}."
    )


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)
