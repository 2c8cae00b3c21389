"""Render a run as Markdown tables for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lora_grpo.evaluation import Report, printable
from lora_grpo.gguf import GgufSection
from lora_grpo.report import facts
from lora_grpo.runs import RunFiles


def report_markdown(run: RunFiles, evaluation: Report | None, ggufs: Sequence[GgufSection]) -> str:
    """Return the report of one run."""
    lines = [f"# {escape(run.name)}", "", escape(facts.state(run)), ""]
    related = [(label, name) for label, name, _ in facts.related_runs(run)]
    lines += table(["", ""], [*facts.headline(run), *related])
    if evaluation:
        lines += ["## Evaluation", "", escape(evaluation.title), "", *table(*evaluation.scores_table())]
        lines += [*(f"- {escape(sentence)}" for sentence in facts.verdicts(evaluation)), ""]
    if evaluation and evaluation.gain:
        lines += ["## What the gain is made of", ""]
        lines += [line for shown in evaluation.gain_tables() for line in table(*shown)]
        lines += [*(f"- {escape(note)}" for note in evaluation.gain_notes), ""]
    for section in ggufs:
        lines += [
            f"## {section.heading}",
            "",
            *([escape(section.title), ""] if section.title else []),
            *table(*section.table),
        ]
        lines += [*(f"- {escape(note)}" for note in section.notes), ""]
    if changes := facts.changes(run):
        lines += [f"## {facts.trained_metrics(run)[0]}", "", *table(["", "first step", "last step"], changes)]
    if times := facts.times(run):
        lines += ["## Time", "", *table(["", "planned", "used"], times)]
    if alarms := run.record.get("alarms"):
        rows = [(str(alarm["step"]), alarm["name"], alarm["message"]) for alarm in alarms]
        lines += ["## Alarms", "", *table(["step", "alarm", "message"], rows)]
    defaults, changed = facts.changed_settings(run)
    shown = table(["", "this run", defaults], changed) if changed else [f"All are those of the {escape(defaults)}.", ""]
    lines += ["## Settings", "", *shown]
    lines += ["## Versions", "", *table(["", ""], list(facts.versions(run).items()))]
    return "\n".join(lines).rstrip() + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table followed by an empty line. Cells may contain any text."""
    align = "|---" + "|---:" * (len(headings) - 1) if len(headings) > 2 else "|---|---"
    cells = [list(map(escape, row)) for row in (headings, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"{align}|", *lines[1:], ""]


def escape(text: str) -> str:
    """Escape text so that GitHub shows it literally on one line, without markup, mentions, or links."""
    line = printable(" ".join(str(text).split()))
    # GitHub would notify mentioned users, and would link issue numbers and URLs.
    line = re.sub(r"[&<>]|(?<!\w)[@#]", lambda found: f"&#{ord(found[0])};", line)
    line = line.replace("://", "&#58;//").replace("www.", "www&#46;")
    return re.sub(r"([\\`*|~]|(?<!\w)_|_(?!\w)|(?<=\])[(\[])", r"\\\1", line)
