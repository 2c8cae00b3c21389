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
    """Write results.json and results.md atomically.

    Args:
        folder: output folder.
        machine: GPU, versions and measured limits; empty if nothing was measured.
        results: one result per row; see `check.run_rows`.
    """
    atomic.write_json(folder / "results.json", {**machine, "rows": list(results)})
    atomic.write_text(folder / "results.md", markdown(machine, results))


def markdown(machine: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """Return a table of the rows that ran, and one line for each row that did not run or was stopped early."""
    lines = [_describe(machine), ""] if machine else []
    if ran := [result for result in results if result["status"] == "ran"]:
        lines += [f"| {' | '.join(heading for heading, *_ in _COLUMNS)} |", "|---" * 4 + "|---:" * 10 + "|"]
        lines += [f"| {' | '.join(_cell(result.get(key), form) for _, key, form in _COLUMNS)} |" for result in ran]
        lines += [""]
    for result in results:
        if result["status"] != "ran" or result.get("reason"):
            lines.append(
                f"- {result['row']}: {result['status']}" + (f", {reason}" if (reason := result["reason"]) else "")
            )
    return "\n".join(lines).rstrip() + "\n"


def _describe(machine: dict[str, Any]) -> str:
    measured, versions = machine["measured"], machine["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{machine['gpu']} with {machine['memory_gib']:.0f} GiB; measured {measured['copy_gb_per_second']:,.0f} GB/s "
        f"copying and {measured['matmul_tflops']:,.0f} TFLOP/s in {measured['precision']}; {packages}; "
        f"{machine['started']}."
    )


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)
