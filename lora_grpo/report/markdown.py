"""A run, or two of them, as tables for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lora_grpo.evaluation import read_report
from lora_grpo.report import facts
from lora_grpo.report.visible import visible
from lora_grpo.runs import RunFiles


def report_markdown(run: RunFiles) -> str:
    """Return the report of one run."""
    lines = [f"# {escaped(run.name)}", "", escaped(facts.state(run)), ""]
    lines += table(["", ""], facts.headline(run))
    if evaluation := read_report(run.folder / "evaluation"):
        lines += ["## Before and after", "", escaped(evaluation.title), "", *table(*evaluation.scores_table())]
        lines += [*(f"- {escaped(said)}" for said in facts.verdicts(evaluation)), ""]
    if changes := facts.reward_changes(run):
        rows = [(change.name, f"{change.first:.3f}", f"{change.last:.3f}") for change in changes]
        lines += ["## Reward", "", *table(["", "first step", "last step"], rows)]
    if found := facts.alarms(run):
        lines += ["## Alarms", ""]
        lines += [f"- step {alarm['step']}, {escaped(str(alarm['name']))}: {escaped(_said(alarm))}" for alarm in found]
        lines += [""]
    matter = [(found.name, found.value) for found in facts.settings_that_matter(run)]
    lines += ["## Settings", "", *table(["", ""], matter)]
    lines += ["## Versions", "", *table(["", ""], list(facts.versions(run).items()))]
    lines += [*(f"- {escaped(remark)}" for remark in run.remarks)]
    return "\n".join(lines).rstrip() + "\n"


def diff_markdown(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Return the report of two runs side by side."""
    lines = [f"# {escaped(' and '.join(names))}", ""]
    lines += [f"- {escaped(name)}: {escaped(facts.state(run))}" for name, run in zip(names, runs, strict=True)]
    lines += [""]
    for name, run in zip(names, runs, strict=True):
        if evaluation := read_report(run.folder / "evaluation"):
            lines += [f"## Before and after, {escaped(name)}", "", escaped(evaluation.title), ""]
            lines += table(*evaluation.scores_table())
    for title, rows in (
        ("Settings that differ", facts.differing(runs)),
        ("Versions and machines that differ", facts.versions_differing(runs)),
    ):
        told = table(["", *names], [(name, *values) for name, values in rows]) if rows else ["None.", ""]
        lines += [f"## {title}", "", *told]
    return "\n".join(lines).rstrip() + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, and an empty one after it; its cells may hold anything."""
    align = "|---" + "|---:" * (len(headings) - 1) if len(headings) > 2 else "|---|---"
    cells = [list(map(escaped, row)) for row in (headings, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"{align}|", *lines[1:], ""]


def escaped(text: str) -> str:
    """Return text that GitHub shows as it is: no markup, no mention, no link, on one line."""
    line = " ".join(visible(str(text)).split())
    # Names and numbers of issues would notify people; addresses would become links.
    line = re.sub(r"[&<>]|(?<!\w)[@#]", lambda found: f"&#{ord(found[0])};", line)
    line = line.replace("://", "&#58;//").replace("www.", "www&#46;")
    return re.sub(r"([\\`*|~]|(?<!\w)_|_(?!\w)|(?<=\])[(\[])", r"\\\1", line)


def _said(alarm: dict[str, object]) -> str:
    return f"{alarm['message']}{' (stopped the run)' if alarm.get('stopped') else ''}"
