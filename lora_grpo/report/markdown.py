"""Render a run as Markdown tables for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from lora_grpo.evaluation import FORMAT_NOTE, Report
from lora_grpo.files import markdown, markdown_table
from lora_grpo.gguf import GgufSection
from lora_grpo.report import facts
from lora_grpo.runs import RunFiles


def report_markdown(run: RunFiles, evaluation: Report | None, ggufs: Sequence[GgufSection]) -> str:
    """Return the report of one run."""
    lines = [f"# {markdown(run.name)}", "", markdown(facts.state(run)), ""]
    related = [(label, name) for label, name, _ in facts.related_runs(run)]
    lines += markdown_table(["", ""], [*facts.headline(run), *related])
    if evaluation:
        lines += ["## Evaluation", "", markdown(evaluation.title), "", *markdown_table(*evaluation.scores_table())]
        lines += [*(f"- {markdown(sentence)}" for sentence in facts.verdicts(evaluation)), ""]
    if evaluation and evaluation.gain:
        lines += ["## Where the gain comes from", ""]
        lines += [*markdown_table(*evaluation.gain_table()), markdown(FORMAT_NOTE), ""]
    for section in ggufs:
        lines += [
            f"## {section.heading}",
            "",
            *([markdown(section.title), ""] if section.title else []),
            *markdown_table(*section.table),
        ]
        lines += [*(f"- {markdown(note)}" for note in section.notes), ""]
    if changes := facts.changes(run):
        lines += [f"## {facts.trained_metrics(run)[0]}", "", *markdown_table(["", "first step", "last step"], changes)]
    if alarms := run.record.get("alarms"):
        rows = [(str(alarm["step"]), alarm["name"], alarm["message"]) for alarm in alarms]
        lines += ["## Alarms", "", *markdown_table(["step", "alarm", "message"], rows)]
    defaults, changed = facts.changed_settings(run)
    shown = (
        markdown_table(["", "this run", defaults], changed)
        if changed
        else [f"All are those of the {markdown(defaults)}.", ""]
    )
    lines += ["## Settings", "", *shown]
    lines += ["## Versions", "", *markdown_table(["", ""], list(facts.versions(run).items()))]
    return "\n".join(lines).rstrip() + "\n"
