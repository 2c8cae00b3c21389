"""Prints the preview: the first groups, the summary of all groups, and the verdict."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence

from lora_grpo.config import RunConfig
from lora_grpo.files import printable
from lora_grpo.planning.diagnosis import judge
from lora_grpo.planning.preview_groups import Group, Summary

_SHOWN_GROUPS = 3
_SHOWN_ANSWERS = 8
"""Number of distinct completions shown per group."""


def show(config: RunConfig, groups: Sequence[Group]) -> None:
    """Print the preview, with control characters escaped."""
    width = max(40, shutil.get_terminal_size((100, 24)).columns - 1)
    lines = []
    for number, group in enumerate(groups[:_SHOWN_GROUPS], start=1):
        lines += [f"--- group {number} of {len(groups)}: {group.row['id']}", *_cut(group.row["question"], width)]
        lines += [*_answers(group, width), ""]
    verdict = judge(groups, config)
    lines += [f"--- all {len(groups)} groups", *_summary(verdict.summary)]
    lines += ["--- can GRPO learn from this?", f"verdict   {verdict.word}: {verdict.reason}"]
    for finding in verdict.findings:
        lines += [f"found     {finding.found}", f"try       {finding.advice}"]
    source = "starting adapter" if config.lora.from_ else "base model"
    lines.append(
        f"sample    {len(groups)} prompts x {len(groups[0].answers)} completions of the {source}, 95% intervals in "
        "brackets; nothing was trained or written"
    )
    print("\n".join(map(printable, lines)))


def _answers(group: Group, width: int) -> list[str]:
    """Return each distinct completion of a group below its rewards, highest reward first."""
    often = Counter(answer.text for answer in group.answers)
    distinct = {answer.text: answer for answer in group.answers}.values()
    ranked = sorted(distinct, key=lambda answer: (-(answer.total or 0.0), -often[answer.text]))
    lines = []
    for answer in ranked[:_SHOWN_ANSWERS]:
        rewards = ", ".join(f"{name} {_number(value)}" for name, value in answer.rewards.items())
        line = f"{often[answer.text]} x reward {_number(answer.total)} ({rewards}), {answer.num_tokens} tokens"
        if answer.verdict:
            line += f", {answer.verdict.reason.replace('_', ' ')}"
        lines += _cut(f"{line}, truncated" if answer.truncated else line, width)
        lines += [f"    {text}" for text in _cut(answer.text, width - 4)]
    more = len(ranked) - _SHOWN_ANSWERS
    return [*lines, f"and {more} more"] if more > 0 else lines


def _summary(found: Summary) -> list[str]:
    lines = []
    for name, moments in found.rewards.items():
        text = "mean {:.2f}, std {:.2f}".format(*moments) if moments else "graded no completion"
        lines.append((name, text))
    always, mixed, never = found.difficulty
    lines += [
        ("solved", f"{found.solved} of completions"),
        ("problems solved", f"{always} by all completions, {mixed} by some, {never} by none"),
        ("unparsed", f"{found.unparsed} of completions end without an answer that can be parsed"),
        ("truncated", f"{found.truncated} of completions"),
        ("zero-variance", f"{found.flat} of groups (all completions have the same reward)"),
        ("distinct", f"{found.distinct:.1f} of {found.completions // found.groups} completions in a group"),
        ("tokens", f"{found.num_tokens:.1f} per completion"),
    ]
    longest = max(len(name) for name, _ in lines)
    return [f"{name:{longest}}  {text}" for name, text in lines]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _cut(text: str, width: int) -> list[str]:
    """Return at most two lines of a text: its beginning, and its end, which usually has the answer."""
    text = printable(text)
    if len(text) <= 2 * width:
        return [text[:width], *([text[width:]] if text[width:] else [])]
    return [f"{text[: width - 1]}…", f"…{text[1 - width :]}"]
