"""Prints the preview: the first groups, the summary of all groups, and the verdict."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence

from lora_grpo.config import RunConfig
from lora_grpo.evaluation import printable
from lora_grpo.preview.diagnosis import judge
from lora_grpo.preview.groups import Answer, Group, measure

_SHOWN_GROUPS = 3
_SHOWN_ANSWERS = 8
"""Number of distinct completions shown per group."""
_PLAIN_WIDTH = 100
"""Line width in columns if the output is not a terminal."""
_LEAST_WIDTH = 40


def show(config: RunConfig, groups: Sequence[Group]) -> None:
    """Print the preview, with control characters escaped."""
    width = max(_LEAST_WIDTH, shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns - 1)
    lines = []
    for number, group in enumerate(groups[:_SHOWN_GROUPS], start=1):
        lines += [f"--- group {number} of {len(groups)}: {group.row['id']}", *_cut(group.row["question"], width)]
        lines += [*_answers(group, width), ""]
    lines += [f"--- all {len(groups)} groups", *_summary(groups)]
    verdict = judge(groups, config)
    lines += ["--- can GRPO learn from this?", f"verdict   {verdict.word}: {verdict.reason}"]
    for finding in verdict.findings:
        lines += [f"found     {finding.found}", f"try       {finding.advice}"]
    lines.append(
        f"sample    {len(groups)} prompts x {len(groups[0].answers)} completions of the base model, 95 % intervals in "
        "brackets; nothing was trained or written"
    )
    print("\n".join(map(printable, lines)))


def _answers(group: Group, width: int) -> list[str]:
    """Return each distinct completion of a group with its rewards above it, highest reward first."""
    often = Counter(answer.text for answer in group.answers)
    ranked = sorted(
        zip(group.answers, group.sums, strict=True), key=lambda pair: (-(pair[1] or 0.0), -often[pair[0].text])
    )
    different = {answer.text: (answer, total) for answer, total in ranked}
    names = [["times"], *(name.split("_") for name in group.weights), ["sum"], ["tokens"]]
    widths = [max(4, *map(len, words)) for words in names]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.rjust(size) for cell, size in zip(cells, widths, strict=True)).rstrip()

    # Print one word of a reward's name per line, aligned at the bottom, so that many columns fit.
    height = max(map(len, names))
    padded = [[""] * (height - len(words)) + words for words in names]
    lines = [line(cells) for cells in zip(*padded, strict=True)]
    for answer, total in [*different.values()][:_SHOWN_ANSWERS]:
        parts = [_number(group.weighted(name, answer)) for name in group.weights]
        numbers = line([str(often[answer.text]), *parts, _number(total), str(answer.num_tokens)])
        lines += [f"{numbers}  {_verdict(answer)}".rstrip()]
        lines += [f"       {text}" for text in _cut(answer.text, width - 7)]
    more = len(different) - _SHOWN_ANSWERS
    return [*lines, f"       and {more} more"] if more > 0 else lines


def _verdict(answer: Answer) -> str:
    words = [answer.verdict.reason.replace("_", " ")] if answer.verdict else []
    return ", ".join([*words, "truncated"] if answer.truncated else words)


def _summary(groups: Sequence[Group]) -> list[str]:
    """Return the summary of all groups, one line per statistic."""
    found = measure(groups)
    lines = []
    for name, moments in found.rewards.items():
        most = "" if name == "sum" else f" of {groups[0].weights[name]:g}"
        text = "graded no completion" if moments is None else f"mean {moments[0]:.2f}{most}, std {moments[1]:.2f}"
        lines.append((name, text))
    if found.solved and found.difficulty and found.unparsed:
        always, mixed, never = found.difficulty
        lines += [
            ("solved", f"{found.solved} of completions"),
            ("problems solved", f"{always} by all completions, {mixed} by some, {never} by none"),
            ("unparsed", f"{found.unparsed} of completions end without an answer that can be parsed"),
        ]
    lines += [
        ("truncated", f"{found.truncated} of completions"),
        ("zero-variance", f"{found.flat} of groups (all completions have the same reward)"),
        ("distinct", f"{found.distinct:.1f} of {len(groups[0].answers)} completions in a group"),
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
