"""Render one or two runs as Markdown tables for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lora_grpo.evaluation import read_report
from lora_grpo.report import facts
from lora_grpo.report.visible import visible
from lora_grpo.runs import RunFiles


def report_markdown(run: RunFiles) -> str:
    """Return the report of one run."""
    lines = [f"# {escape(run.name)}", "", escape(facts.state(run)), ""]
    lines += table(["", ""], facts.headline(run))
    if evaluation := read_report(run.folder / "evaluation"):
        lines += ["## Evaluation", "", escape(evaluation.title), "", *table(*evaluation.scores_table())]
        lines += [*(f"- {escape(sentence)}" for sentence in facts.verdicts(evaluation)), ""]
    if changes := facts.reward_changes(run):
        rows = [(name, f"{first:.3f}", f"{last:.3f}") for name, first, last in changes]
        lines += ["## Reward", "", *table(["", "first step", "last step"], rows)]
    if alarms := run.record.get("alarms"):
        stopped = {True: " (stopped the run)"}
        rows = [(str(a["step"]), str(a["name"]), f"{a['message']}{stopped.get(a.get('stopped'), '')}") for a in alarms]
        lines += ["## Alarms", "", *table(["step", "alarm", "message"], rows)]
    changed = [(setting.name, setting.value) for setting in facts.settings(run) if setting.differs]
    lines += ["## Settings that are not the default", "", *table(["", ""], changed)]
    lines += ["## Versions", "", *table(["", ""], list(facts.versions(run).items()))]
    return "\n".join(lines).rstrip() + "\n"


def diff_markdown(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Return the report of two runs side by side."""
    lines = [f"# {escape(' and '.join(names))}", ""]
    lines += [f"- {escape(name)}: {escape(facts.state(run))}" for name, run in zip(names, runs, strict=True)]
    lines += [""]
    for name, run in zip(names, runs, strict=True):
        if evaluation := read_report(run.folder / "evaluation"):
            lines += [f"## Evaluation of {escape(name)}", "", escape(evaluation.title), ""]
            lines += table(*evaluation.scores_table())
    for title, rows in (
        ("Different settings", facts.different_settings(runs)),
        ("Different versions and machines", facts.different_versions(runs)),
    ):
        found = table(["", *names], [(name, *values) for name, values in rows]) if rows else ["None.", ""]
        lines += [f"## {title}", "", *found]
    return "\n".join(lines).rstrip() + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table followed by an empty line. Cells may contain any text."""
    align = "|---" + "|---:" * (len(headings) - 1) if len(headings) > 2 else "|---|---"
    cells = [list(map(escape, row)) for row in (headings, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"{align}|", *lines[1:], ""]


def escape(text: str) -> str:
    """Escape text so that GitHub shows it literally on one line, without markup, mentions, or links."""
    line = " ".join(visible(str(text)).split())
    # GitHub would notify mentioned users, and would link issue numbers and URLs.
    line = re.sub(r"[&<>]|(?<!\w)[@#]", lambda found: f"&#{ord(found[0])};", line)
    line = line.replace("://", "&#58;//").replace("www.", "www&#46;")
    return re.sub(r"([\\`*|~]|(?<!\w)_|_(?!\w)|(?<=\])[(\[])", r"\\\1", line)
