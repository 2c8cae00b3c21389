"""The results of a GPU check: figures as JSON, and a Markdown table for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo.files import atomic

_HEAD = (
    "model",
    "engine",
    "sampling",
    "base",
    "step, s",
    "rollouts",
    "rewards",
    "training",
    "tokens/s",
    "of limit",
    "training, of limit",
    "planned, GiB",
    "torch's peak",
    "card's peak",
)


def write(folder: Path, about: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """Write results.json and results.md, each whole or as it was.

    Args:
        folder: where to.
        about: machine, versions, measured limits.
        results: a result a row, see `gpu_check.check`.
    """
    atomic.write_json(folder / "results.json", {**about, "rows": list(results)})
    atomic.write_text(folder / "results.md", markdown(about, results))


def markdown(about: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """Return the table of the rows that ran, and a line for each of the others."""
    ran = [result for result in results if result["status"] == "ran"]
    others = [result for result in results if result["status"] != "ran"]
    lines = [_about(about), ""] if about else []
    if ran:
        lines += [f"| {' | '.join(_HEAD)} |", "|---" * 4 + "|---:" * (len(_HEAD) - 4) + "|"]
        lines += [f"| {' | '.join(_cells(result))} |" for result in ran]
        lines += [""]
    lines += [
        f"- {result['row']}: {result['status']}" + (f", {result['reason']}" if result.get("reason") else "")
        for result in (*others, *(result for result in ran if result.get("reason")))
    ]
    return "\n".join(lines).rstrip() + "\n"


def _about(about: dict[str, Any]) -> str:
    measured, versions = about["measured"], about["versions"]
    pretended = f", held to {about['pretended_gib']:g} GiB" if about.get("pretended_gib") else ""
    packages = ", ".join(f"{name} {versions[name]}" for name in versions if name not in ("python", "lora_grpo"))
    return (
        f"{about['gpu']} with {about['memory_gib']:.0f} GiB{pretended}; copies {measured['copy_gb_per_second']:,.0f} "
        f"GB/s, multiplies {measured['matmul_tflops']:,.0f} TFLOP/s in {measured['precision']} (both measured); "
        f"Python {versions['python']}, {packages}; {about['started']}."
    )


def _cells(result: dict[str, Any]) -> list[str]:
    bits = result.get("bits")
    return [
        result["model"],
        result["engine"],
        result["backend"],
        {4: "NF4", 16: "16-bit"}.get(bits, "–") if bits else "–",
        *(
            _number(result.get(name), 2)
            for name in ("step_seconds", "rollout_seconds", "reward_seconds", "training_seconds")
        ),
        _number(result.get("tokens_per_second"), 0),
        _percent(result.get("decoding_share")),
        _percent(result.get("training_share")),
        *(_number(result.get(name), 2) for name in ("planned_gib", "torch_peak_gib", "card_peak_gib")),
    ]


def _number(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:,.{places}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
