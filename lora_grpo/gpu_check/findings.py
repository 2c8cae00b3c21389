"""What the GPU check found: the table, the conclusions, and the fastest engine for `auto`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError, first_line
from lora_grpo.files import atomic, markdown_table
from lora_grpo.hardware import save_measured_engine

Result = dict[str, Any]
"""A row of the table, see `gpu_check.run_cases`."""

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
_MOST_NOTES = 3  # of Unsloth's packing check, which repeats for longer batches


def write_table(folder: Path, machine: dict[str, Any], results: Sequence[Result]) -> None:
    """Write results.json, and results.md with a table that fits into an issue."""
    atomic.write_json(folder / "results.json", {**machine, "rows": list(results)})
    packages = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    rows = [{**result, "notes": _notes(result)} for result in results]
    cells = [["–" if row.get(key) is None else form.format(row[key]) for _, key, form in _COLUMNS] for row in rows]
    table = markdown_table([heading for heading, *_ in _COLUMNS], cells, left=len(_COLUMNS))
    header = f"{machine['gpu']}; {packages}; {machine['started']}."
    atomic.write_text(folder / "results.md", "\n".join([header, "", *table]))


def _notes(result: Result) -> str | None:
    notes = [result["reason"]] if result["reason"] else []
    if result.get("steps") == 1:
        notes.append("the step includes compilation")
    check, mismatch = result.get("logprob_check", {}), result.get("logprob_mismatch")
    if "difference" in check:
        notes.append(f"logprob check {check['difference']:.2g} of {check['tolerance']:.2g}")
    if mismatch is not None:
        notes.append(f"logprob mismatch {mismatch:.2g}")
    return "; ".join([*notes, *result.get("packing", [])[:_MOST_NOTES]]) or None


def fastest(results: Sequence[Result]) -> Result | None:
    """Return the engine and backend with the shortest step."""
    ran = [each for each in _engines(results) if each["status"] == "ran"]
    return min(ran, key=lambda each: each["step_time"], default=None)


def _engines(results: Sequence[Result]) -> list[Result]:
    return [each for each in results if each["bits"] == 4 and not each["resumes"]]


def conclude(results: Sequence[Result], gpu: str) -> list[str]:
    """Save the fastest engine and backend for `auto` if all others were slower, and return the conclusions."""
    best, engines = fastest(results), _engines(results)
    names = [each["name"] for each in engines if each["status"] == "ran"]
    lines = [f"this GPU works with {', '.join(names) or 'no engine and backend'}"]
    # A step that compiles does not count, and what fails today may be the fastest tomorrow.
    open_rows = [each for each in engines if each["status"] != "skipped"]
    unmeasured = [each["name"] for each in open_rows if each["status"] == "failed" or each.get("steps", 0) < 2]
    if best and unmeasured:
        lines.append(f"the choice of auto does not change: {', '.join(unmeasured)} failed or had no time for two steps")
    elif best:
        found = f"the fastest is {best['name']}, {best['step_time']:.2f} s per step"
        try:
            path = save_measured_engine(best["engine"], best["backend"], gpu)
            lines.append(f"{found}; auto now means it ({path})")
        except OSError as error:
            lines.append(f"{found}; auto does not change, because this was not saved: {first_line(error)}")
    for sixteen in (each for each in results if each["bits"] == 16 and each["status"] == "ran"):
        lines += [_compare_bits(four, sixteen) for four in engines if f"{four['name']}, 16 bits" == sixteen["name"]]
    return lines


def _compare_bits(four: Result, sixteen: Result) -> str:
    rate = "rollouts/tokens_per_second"
    speed, steps = sixteen[rate] / four[rate], four["step_time"] / sixteen["step_time"]
    peaks = [(four[name], sixteen[name]) for name in ("gpu_peak_gib", "torch_peak_gib")]
    memory = next((f" for {high - low:.1f} GiB more" for low, high in peaks if low and high), "")
    advice = "pass --model.bits 16" if steps > 1 else "stay with 4 bits"
    return f"16 bits: {speed:.1f}x the tokens per second, {steps:.1f}x the steps{memory}; {advice}"


def check_results(results: Sequence[Result]) -> None:
    """Raise a RunError if a run failed, if one had no time for a step, or if none ran."""
    none_ran = all(each["status"] != "ran" for each in results)
    broken = [each for each in results if none_ran or each["status"] not in ("ran", "skipped")]
    if broken:
        raise RunError("; ".join(f"{each['name']} {each['status']}, {each['reason']}" for each in broken))
