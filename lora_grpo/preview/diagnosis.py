"""Whether GRPO can learn from a few sampled groups, and what to change: each advice is tied to what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_grpo.config import RunConfig
from lora_grpo.preview.groups import Group, Summary, differs, measure, share_of
from lora_grpo.tasks import CODE_TASKS

RIGHT_REWARDS = (
    *("correct_answer", "passes_tests", "share_of_tests_passed"),
    *("accuracy_reward", "reasoning_accuracy_reward"),
)
"""Names of rewards that pay for a right answer."""

_MOST_FLAT = 0.8
"""Share of groups without a difference, and of completions that are cut off, from which hardly any signal is left."""
_WORTH_SAYING = 0.2
"""Share of truncated or unparsed completions from which they are a finding."""


@dataclass(frozen=True)
class Finding:
    """Something that keeps GRPO from learning."""

    seen: str
    advice: str


@dataclass(frozen=True)
class Judgement:
    """Whether GRPO can learn."""

    word: str
    """`can learn`, `can hardly learn` or `cannot learn`."""
    reason: str
    findings: tuple[Finding, ...]


def judge(groups: Sequence[Group], config: RunConfig) -> Judgement:
    """Say whether GRPO can learn from groups like these, and what to change.

    With `data.filter_by_difficulty` it is those that the filter keeps which decide.
    """
    found = measure(groups)
    kept = [group for group in groups if group.is_mixed] if config.data.filter_by_difficulty else list(groups)
    differing = sum(differs(group.sums) for group in kept)
    share = f"rewards differ within {differing} of {len(kept)} groups, {share_of(differing, len(kept))}"
    rights = [name for name in groups[0].weights if name in RIGHT_REWARDS]
    if not kept:
        word = "can hardly learn"
        reason = f"--data.filter-by-difficulty keeps {share_of(0, len(groups))} of these {len(groups)} problems"
    elif not differing:
        word, reason = "cannot learn", f"all completions of a group earn the same; {share}"
    elif found.truncated.value >= _MOST_FLAT:
        word, reason = "can hardly learn", f"most completions are cut off; {share}"
    elif rights and not any(name in found.varying for name in rights):
        word = "can hardly learn"
        reason = f"completions of a group differ in {', '.join(found.varying)} alone, never in {', '.join(rights)}"
    elif len(kept) - differing >= _MOST_FLAT * len(kept):
        word, reason = "can hardly learn", share
    else:
        word, reason = "can learn", share
    findings = _findings(groups, found, config)
    if word != "can learn" and not findings:
        advice = "a reward that tells completions apart, a higher --sampling.temperature, or a larger group"
        findings = [Finding("completions differ, and what they earn does not", advice)]
    return Judgement(word, reason, tuple(findings))


def _findings(groups: Sequence[Group], found: Summary, config: RunConfig) -> list[Finding]:
    """Return causes first: where most answers are cut off or unread, that none is right says nothing more."""
    sampling, size = config.sampling, len(groups[0].answers)
    rights = [name for name in groups[0].weights if name in RIGHT_REWARDS]
    findings, explained = [], False
    if found.truncated.value >= _WORTH_SAYING:
        explained = found.truncated.value >= _MOST_FLAT
        seen = f"{found.truncated} of completions are cut off at {sampling.max_completion_tokens} tokens"
        findings.append(Finding(seen, _longer(config, 4 if found.truncated.value >= 0.5 else 2)))
    if rights and found.unparsed and found.unparsed.value >= _WORTH_SAYING:
        explained = explained or found.unparsed.value >= _MOST_FLAT
        seen = f"{found.unparsed} of completions end without an answer that can be read"
        findings.append(Finding(seen, _readable(config, found.varying)))
    if rights and not explained and (difficulty := _difficulty(found, config, size)):
        explained = True
        findings.append(difficulty)
    if found.distinct < size / 2 and found.flat.value >= 0.5:
        hotter = 1.0 if sampling.temperature < 1 else round(sampling.temperature + 0.2, 1)
        advice = f"--sampling.temperature {hotter:g}" if sampling.top_p == 1 else "--sampling.top-p 1"
        seen = f"a group of {size} holds {found.distinct:.1f} different completions on average"
        findings.append(Finding(seen, f"{advice}, so that there is something to compare"))
    told = {*found.varying, *(rights if explained else ())}
    constant = [_constant(name, groups) for name in groups[0].weights if name not in told]
    if constant:
        advice = "a reward that tells completions apart"
        if found.varying:
            advice = f"nothing, if {', '.join(found.varying)} is to decide; else {advice}"
        findings.append(Finding(f"within groups nothing differs in {', '.join(constant)}", advice))
    return findings


def _difficulty(found: Summary, config: RunConfig, size: int) -> Finding | None:
    """Say what is wrong with problems that are too hard, too easy, or both."""
    assert found.solved is not None and found.difficulty is not None
    always, mixed, never = found.difficulty
    keep = (
        []
        if config.data.filter_by_difficulty
        else ["--data.filter-by-difficulty, which looks for problems solved sometimes"]
    )
    if never == found.groups:
        most = 100 * found.solved.interval.high
        seen = f"none of {found.completions} completions is right, {most:.0f} % of others at most"
        ways = ["easier problems (--data.train)", *keep]
        if config.data.task in CODE_TASKS:
            ways += ["share_of_tests_passed among --rewards, which pays for a part"]
        elif len(config.rewards) == 1:
            ways += [f"a finer reward beside it, e.g. {_format_reward(config)}"]
        return Finding(seen, "; ".join([*ways, *_examples(config), f"--sampling.num-generations {2 * size}"]))
    if always == found.groups:
        return Finding(
            f"all of {found.completions} completions are right: there is nothing left to learn",
            "; ".join(["harder problems (--data.train)", *keep]),
        )
    if 2 * mixed < found.groups and keep:
        return Finding(
            f"{always} of {found.groups} problems are always solved and {never} never; these teach no right answers",
            f"--data.filter-by-difficulty, which trains on the others alone; --sampling.num-generations {2 * size}",
        )
    return None


def _constant(name: str, groups: Sequence[Group]) -> str:
    """Return a reward that differs within no group, with what it gives."""
    graded = [value for group in groups for value in group.part(name) if value is not None]
    if not graded:
        return f"{name} (could grade none)"
    if differs(graded):
        return f"{name} (differs between prompts)"
    return f"{name} (always {graded[0]:g} of {groups[0].weights[name]:g})"


def _longer(config: RunConfig, times: int) -> str:
    """Return the flags for completions so many times as long, with room for the prompts."""
    limit, context = config.sampling.max_completion_tokens, config.model.max_sequence_tokens
    flags = f"--sampling.max-completion-tokens {times * limit}"
    if context - times * limit < (context - limit) / 2:
        flags += f" --model.max-sequence-tokens {context + (times - 1) * limit}"
    return f"{flags}, and another preview"


def _readable(config: RunConfig, varying: Sequence[str]) -> str:
    """Return ways to have answers written so that the grader reads them."""
    ways = _examples(config)
    if config.data.task not in CODE_TASKS:
        paid = any(map(_pays_for_format, config.rewards))
        ways += [] if paid else [f"a reward for the format, e.g. {_format_reward(config)}"]
        ways += ["another --data.prompt-style"]
    taught = [name for name in varying if _pays_for_format(name) or name in RIGHT_REWARDS]
    if taught:
        sooner = f"; sooner: {ways[0]}" if ways else ""
        return f"nothing, if training is to mend it: {', '.join(taught)} differ within groups{sooner}"
    return "; ".join([*ways, "a model that follows instructions"])


def _examples(config: RunConfig) -> list[str]:
    return [] if config.data.few_shot else ["--data.few-shot 2, worked examples in the prompt"]


def _pays_for_format(reward: str) -> bool:
    return any(word in reward for word in ("format", "pattern", "tag_count"))


def _format_reward(config: RunConfig) -> str:
    named = {"think": "think_answer_format=0.5", "hashes": r"'pattern:#### -?[0-9]+\s*$=0.5'"}
    return named.get(config.data.prompt_style, "soft_xml_format=0.5")
