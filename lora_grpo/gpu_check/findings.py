"""What the GPU check found: the table, the conclusions, and the fastest engine for `auto`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError, first_line
from lora_grpo.files import atomic, markdown_table
from lora_grpo.hardware import save_measured_engine

Result = dict[str, Any]
"""A row of the table, and an entry of results.json; see `measure.run_cases`."""

_COLUMNS = (
    ("run", "name", "{}"),
    ("status", "status", "{}"),
    ("seconds", "seconds", "{:.0f}"),
    ("compilation, s", "compilation", "{:.0f}"),
    ("step, s", "step_time", "{:.2f}"),
    ("rollouts", "time/rollouts", "{:.2f}"),
    ("training", "time/training", "{:.2f}"),
    ("tokens/s", "rollouts/tokens_per_second", "{:,.0f}"),
    ("planned, GiB", "planned_gib", "{:.2f}"),
    ("torch peak", "torch_peak_gib", "{:.2f}"),
    ("GPU peak", "gpu_peak_gib", "{:.2f}"),
    ("notes", "notes", "{}"),
)
"""Column heading, key in a result, and format."""
_MAX_PACKING_NOTES = 3
"""Notes of Unsloth's packing check in the table. It repeats the check for longer batches."""


def write_table(folder: Path, machine: dict[str, Any], results: Sequence[Result]) -> None:
    """Write results.json, and results.md with a table that fits into an issue."""
    atomic.write_json(folder / "results.json", {**machine, "rows": list(results)})
    rows = []
    for result in results:
        values = {**result, "notes": _notes(result)}
        rows.append([_cell(values.get(key), form) for _, key, form in _COLUMNS])
    headings = [heading for heading, _, _ in _COLUMNS]
    table = markdown_table(headings, rows, left=len(_COLUMNS))
    packages = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    header = f"{machine['gpu']}; {packages}; {machine['started']}."
    atomic.write_text(folder / "results.md", "\n".join([header, "", *table]))


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)


def _notes(result: Result) -> str | None:
    notes = []
    if result["reason"]:
        notes.append(result["reason"])
    if result.get("steps") == 1:
        notes.append("the step includes compilation")
    check = result.get("logprob_check", {})
    if "difference" in check:
        notes.append(f"logprob check {check['difference']:.2g} of {check['tolerance']:.2g}")
    mismatch = result.get("logprob_mismatch")
    if mismatch is not None:
        notes.append(f"logprob mismatch {mismatch:.2g}")
    notes += result.get("packing", [])[:_MAX_PACKING_NOTES]
    return "; ".join(notes) or None


def fastest(results: Sequence[Result]) -> Result | None:
    """Return the engine and backend with the shortest step."""
    ran = [result for result in _engines(results) if result["status"] == "ran"]
    return min(ran, key=lambda result: result["step_time"], default=None)


def _engines(results: Sequence[Result]) -> list[Result]:
    """Return the results that compare engines and backends: with 4 bits, and not resumed."""
    return [result for result in results if result["bits"] == 4 and not result["resumes"]]


def conclude(results: Sequence[Result], gpu: str) -> list[str]:
    """Save the fastest engine and backend for `auto` if all others were slower, and return the conclusions."""
    engines = _engines(results)
    working = [result["name"] for result in engines if result["status"] == "ran"]
    lines = [f"this GPU works with {', '.join(working) or 'no engine and backend'}"]

    best = fastest(results)
    unmeasured = [result["name"] for result in engines if _is_unmeasured(result)]
    if best and unmeasured:
        lines.append(f"the choice of auto does not change: {', '.join(unmeasured)} failed or had no time for two steps")
    elif best:
        lines.append(_save_choice(best, gpu))

    for in_16_bits in results:
        if in_16_bits["bits"] == 16 and in_16_bits["status"] == "ran":
            for in_4_bits in engines:
                if _same_engine(in_4_bits, in_16_bits):
                    lines.append(_compare_bits(in_4_bits, in_16_bits))
    return lines


def _is_unmeasured(result: Result) -> bool:
    """Return whether an engine may be faster than was measured.

    A step that compiles does not count, and what fails today may be the fastest tomorrow.
    """
    if result["status"] == "skipped":
        return False
    return result["status"] == "failed" or result.get("steps", 0) < 2


def _save_choice(best: Result, gpu: str) -> str:
    """Save the fastest engine and backend for `auto`, and return the conclusion."""
    fastest_line = f"the fastest is {best['name']}, {best['step_time']:.2f} s per step"
    try:
        path = save_measured_engine(best["engine"], best["backend"], gpu)
    except OSError as error:
        return f"{fastest_line}; auto does not change, because this was not saved: {first_line(error)}"
    return f"{fastest_line}; auto now means it ({path})"


def _same_engine(first: Result, second: Result) -> bool:
    """Return whether two results have the same engine and backend."""
    return first["engine"] == second["engine"] and first["backend"] == second["backend"]


def _compare_bits(in_4_bits: Result, in_16_bits: Result) -> str:
    """Return what 16 bits cost and gain, and whether to use them."""
    rate = "rollouts/tokens_per_second"
    token_speedup = in_16_bits[rate] / in_4_bits[rate]
    step_speedup = in_4_bits["step_time"] / in_16_bits["step_time"]
    memory = ""
    for peak in ("gpu_peak_gib", "torch_peak_gib"):  # the first that both results have
        if in_4_bits[peak] and in_16_bits[peak]:
            memory = f" for {in_16_bits[peak] - in_4_bits[peak]:.1f} GiB more"
            break
    advice = "pass --model.bits 16" if step_speedup > 1 else "pass --model.bits 4"
    return f"16 bits: {token_speedup:.1f}x the tokens per second, {step_speedup:.1f}x the steps{memory}; {advice}"


def check_results(results: Sequence[Result]) -> None:
    """Raise a RunError if a case failed, if one had no time for a step, or if none ran."""
    broken = list(results)
    if any(result["status"] == "ran" for result in results):
        broken = [result for result in results if result["status"] not in ("ran", "skipped")]
    if broken:
        raise RunError("; ".join(f"{result['name']} {result['status']}, {result['reason']}" for result in broken))
