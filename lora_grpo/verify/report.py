"""The report of a verification, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_grpo import console
from lora_grpo.files import text_table
from lora_grpo.verify.differences import Difference
from lora_grpo.verify.verdict import Choices, Verdict


@dataclass(frozen=True)
class TargetReport:
    """What a target is."""

    target: str
    """As the user named it."""
    program: str
    weight_type: str | None
    result: Verdict | Choices
    """From logprobs, or from greedy tokens if the target reports no logprobs."""
    differences: tuple[Difference, ...]
    base_bits: int = 16
    """Precision of the base that the target was compared on."""

    @property
    def uses_adapter(self) -> bool:
        """Whether the target answers as the adapter does: with its weights, its prompts and its ends."""
        answers_differ = any(difference.changes_answers for difference in self.differences)
        return self.result.finding == "the adapter" and not answers_differ

    @property
    def summary(self) -> str:
        """What the target is, in one line."""
        result = self.result
        if isinstance(result, Choices):
            return _summary_of_choices(result)
        hint = ""
        if result.finding == "neither" and self.weight_type is None:
            hint = "; if its weights are quantized, pass --weight-bits"
        if self.base_bits == 4:
            hint = ", both in 4 bits"
        return _summary_of_logprobs(result) + hint


def _summary_of_logprobs(verdict: Verdict) -> str:
    from_adapter = f"{verdict.from_adapter:.2g}"
    from_base = f"{verdict.from_base:.2g}"
    if verdict.finding == "the adapter":
        return f"the adapter: {from_adapter} nats per token from it, {from_base} from the base"
    if verdict.finding == "the base":
        return f"the base, without the adapter: {from_base} nats per token from it, {from_adapter} from the adapter"
    if verdict.finding == "neither":
        closest = f"; it is {verdict.closest}" if verdict.closest else ""
        return (
            f"neither: {from_adapter} nats per token from the adapter, {from_base} from the base, and rounding "
            f"explains {verdict.rounding:.2g}{closest}"
        )
    return (
        f"cannot tell: the adapter moves these prompts by {verdict.moved:.2g} nats per token, and rounding explains "
        f"{verdict.rounding:.2g}; pass --prompts of its task, or more --tokens"
    )


def _summary_of_choices(choices: Choices) -> str:
    counts = (
        f"of {choices.tokens} greedy tokens, the adapter would choose {choices.as_adapter:.1%}, the base "
        f"{choices.as_base:.1%} (p {choices.p_value:.2g})"
    )
    if choices.finding == "cannot tell":
        return f"cannot tell without logprobs: {counts}; pass --prompts of its task, or more --tokens"
    return f"{choices.finding}: {counts}"


@dataclass(frozen=True)
class VerifyReport:
    """What the targets of a verification are."""

    adapter: str
    prompts: str
    """Where the prompts are from."""
    targets: tuple[TargetReport, ...]

    @property
    def problem(self) -> str | None:
        """What is wrong, in one line; None if all targets use the adapter."""
        failed = [report.target for report in self.targets if not report.uses_adapter]
        if not failed:
            return None
        total = len(self.targets)
        names = ", ".join(failed)
        return f"{len(failed)} of {total} targets do not answer as the adapter does, or it cannot be told: {names}"


def show(report: VerifyReport) -> None:
    """Print a report."""
    for target in report.targets:
        console.result(f"{target.target}: {target.summary}")
        for difference in target.differences:
            console.result(f"    {difference.kind}: {difference.text}")
    rows = [_cells(target) for target in report.targets if isinstance(target.result, Verdict)]
    if rows:
        headings = ["target", "weights", "tokens", "from adapter", "worst", "from base", "adapter moves"]
        headings += ["effect", "rounding"]
        console.result("\n".join(["", *text_table(headings, rows)]))


def _cells(report: TargetReport) -> tuple[str, ...]:
    verdict = report.result
    assert isinstance(verdict, Verdict)
    return (
        report.target if "://" in report.target else Path(report.target).name,
        report.weight_type or "?",
        str(verdict.tokens),
        f"{verdict.from_adapter:.2g}",
        f"{verdict.from_adapter_worst:.2g}",
        f"{verdict.from_base:.2g}",
        f"{verdict.moved:.2g}",
        "?" if verdict.effect is None else f"{verdict.effect:.2f} ± {verdict.effect_margin:.2f}",
        f"{verdict.rounding:.2g}",
    )
