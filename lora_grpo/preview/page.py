"""A preview as people read it: the first groups line by line, what all come to, and the verdict."""

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
"""Different completions of a group that are shown."""
_PLAIN_WIDTH = 100
"""Columns where there is no terminal."""
_LEAST_WIDTH = 40


def show(config: RunConfig, groups: Sequence[Group]) -> None:
    """Print the preview; what would move a terminal's cursor is written out."""
    width = max(_LEAST_WIDTH, shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns - 1)
    lines = []
    for number, group in enumerate(groups[:_SHOWN_GROUPS], start=1):
        lines += [f"--- group {number} of {len(groups)}: {group.row['id']}", *_cut(group.row["question"], width)]
        lines += [*_answers(group, width), ""]
    lines += [f"--- all {len(groups)} groups", *_summary(groups)]
    judgement = judge(groups, config)
    lines += ["--- can GRPO learn from this?", f"verdict   {judgement.word}: {judgement.reason}"]
    for finding in judgement.findings:
        lines += [f"seen      {finding.seen}", f"try       {finding.advice}"]
    lines.append(
        f"n         {len(groups)} prompts x {len(groups[0].answers)} completions of the base, a rough picture: 95 % "
        "intervals in brackets; nothing was trained or written"
    )
    print("\n".join(map(printable, lines)))


def _answers(group: Group, width: int) -> list[str]:
    """Return a line of what each part pays and the completion below it, the best paid first, the same ones once."""
    often = Counter(answer.text for answer in group.answers)
    ranked = sorted(
        zip(group.answers, group.sums, strict=True), key=lambda pair: (-(pair[1] or 0.0), -often[pair[0].text])
    )
    different = {answer.text: (answer, total) for answer, total in ranked}
    names = [["times"], *(name.split("_") for name in group.weights), ["sum"], ["tokens"]]
    widths = [max(4, *map(len, words)) for words in names]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.rjust(size) for cell, size in zip(cells, widths, strict=True)).rstrip()

    # A word of a name a line, the last on the bottom line, so that many rewards fit beside each other.
    height = max(map(len, names))
    padded = [[""] * (height - len(words)) + words for words in names]
    lines = [line(cells) for cells in zip(*padded, strict=True)]
    for answer, total in [*different.values()][:_SHOWN_ANSWERS]:
        parts = [_number(group.scaled(name, answer)) for name in group.weights]
        numbers = line([str(often[answer.text]), *parts, _number(total), str(answer.num_tokens)])
        lines += [f"{numbers}  {_verdict(answer)}".rstrip()]
        lines += [f"       {text}" for text in _cut(answer.text, width - 7)]
    more = len(different) - _SHOWN_ANSWERS
    return [*lines, f"       and {more} more"] if more > 0 else lines


def _verdict(answer: Answer) -> str:
    said = [answer.verdict.reason.replace("_", " ")] if answer.verdict else []
    return ", ".join([*said, "cut off"] if answer.truncated else said)


def _summary(groups: Sequence[Group]) -> list[str]:
    """Return what was measured of all groups, a line each."""
    found = measure(groups)
    lines = []
    for name, moments in found.rewards.items():
        scale = "" if name == "sum" else f" of {groups[0].weights[name]:g}"
        said = "could grade none" if moments is None else f"mean {moments[0]:.2f}{scale}, deviation {moments[1]:.2f}"
        lines.append((name, said))
    if found.solved and found.difficulty and found.unparsed:
        always, mixed, never = found.difficulty
        lines += [
            ("solved", f"{found.solved} of completions"),
            ("problems solved", f"{always} by all of their completions, {mixed} by some, {never} by none"),
            ("unparsed", f"{found.unparsed} end without an answer that can be read"),
        ]
    lines += [
        ("truncated", f"{found.truncated} are cut off"),
        ("zero-variance", f"{found.flat} of groups, whose completions all earn the same"),
        ("different", f"{found.distinct:.1f} of {len(groups[0].answers)} completions of a group"),
        ("tokens", f"{found.num_tokens:.1f} a completion"),
    ]
    longest = max(len(name) for name, _ in lines)
    return [f"{name:{longest}}  {said}" for name, said in lines]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _cut(text: str, width: int) -> list[str]:
    """Return a text on one line or two; of a longer one the beginning and the end, where an answer stands."""
    text = printable(text)
    if len(text) <= 2 * width:
        return [text[:width], *([text[width:]] if text[width:] else [])]
    return [f"{text[: width - 1]}…", f"…{text[1 - width :]}"]
