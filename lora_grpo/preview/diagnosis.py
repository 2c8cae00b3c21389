"""Decides whether GRPO can learn from sampled groups, and what to change, based on their summary."""

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
"""Rewards for a correct answer."""

_MOST_FLAT = 0.8
"""At or above this share of groups with equal rewards, or of truncated completions, GRPO gets hardly any signal."""
_WORTH_SAYING = 0.2
"""Minimum share of truncated or unparsed completions to report as a finding."""


@dataclass(frozen=True)
class Finding:
    """A problem that prevents GRPO from learning."""

    found: str
    advice: str


@dataclass(frozen=True)
class Prediction:
    """Whether GRPO can learn."""

    word: str
    """`can learn`, `can hardly learn` or `cannot learn`."""
    reason: str
    findings: tuple[Finding, ...]


def judge(groups: Sequence[Group], config: RunConfig) -> Prediction:
    """Decide whether GRPO can learn from these groups, and what to change.

    With `data.filter_by_difficulty`, only the groups that the filter keeps count.
    """
    found = measure(groups)
    kept = [group for group in groups if group.is_mixed] if config.data.filter_by_difficulty else list(groups)
    differing = sum(differs(group.sums) for group in kept)
    share = f"rewards differ within {differing} of {len(kept)} groups, {share_of(differing, len(kept))}"
    rights = [name for name in groups[0].weights if name in RIGHT_REWARDS]
    if not kept:
        word = "can hardly learn"
        reason = f"--data.filter-by-difficulty keeps none of these {len(groups)} problems, {share_of(0, len(groups))}"
    elif not differing:
        word, reason = "cannot learn", f"all completions of a group have the same reward; {share}"
    elif found.truncated.value >= _MOST_FLAT:
        word, reason = "can hardly learn", f"most completions are truncated; {share}"
    elif rights and not any(name in found.varying for name in rights):
        word = "can hardly learn"
        reason = f"completions of a group differ only in {', '.join(found.varying)}, never in {', '.join(rights)}"
    elif len(kept) - differing >= _MOST_FLAT * len(kept):
        word, reason = "can hardly learn", share
    else:
        word, reason = "can learn", share
    findings = _findings(groups, found, config)
    if word != "can learn" and not findings:
        advice = "a finer reward, a higher --sampling.temperature, or a larger group"
        findings = [Finding("completions differ, but their rewards do not", advice)]
    return Prediction(word, reason, tuple(findings))


def _findings(groups: Sequence[Group], found: Summary, config: RunConfig) -> list[Finding]:
    """Return findings, causes before consequences: truncated or unparsed completions explain why none is correct."""
    sampling, size = config.sampling, len(groups[0].answers)
    rights = [name for name in groups[0].weights if name in RIGHT_REWARDS]
    findings, explained = [], False
    if found.truncated.value >= _WORTH_SAYING:
        explained = found.truncated.value >= _MOST_FLAT
        text = f"{found.truncated} of completions are truncated at {sampling.max_completion_tokens} tokens"
        findings.append(Finding(text, _longer(config, 4 if found.truncated.value >= 0.5 else 2)))
    if rights and found.unparsed and found.unparsed.value >= _WORTH_SAYING:
        explained = explained or found.unparsed.value >= _MOST_FLAT
        text = f"{found.unparsed} of completions end without an answer that can be parsed"
        findings.append(Finding(text, _readable(config, found.varying)))
    if rights and not explained and (difficulty := _difficulty(found, config, size)):
        explained = True
        findings.append(difficulty)
    if found.distinct < size / 2 and found.flat.value >= 0.5:
        hotter = 1.0 if sampling.temperature < 1 else round(sampling.temperature + 0.2, 1)
        advice = f"--sampling.temperature {hotter:g}" if sampling.top_p == 1 else "--sampling.top-p 1"
        text = f"a group of {size} has {found.distinct:.1f} distinct completions on average"
        findings.append(Finding(text, f"{advice}, for more variety"))
    covered = {*found.varying, *(rights if explained else ())}
    constant = [_constant(name, groups) for name in groups[0].weights if name not in covered]
    if constant:
        advice = "a finer reward"
        if found.varying:
            advice = f"nothing, if {', '.join(found.varying)} should decide; else {advice}"
        findings.append(Finding(f"constant within each group: {', '.join(constant)}", advice))
    return findings


def _difficulty(found: Summary, config: RunConfig, size: int) -> Finding | None:
    """Return a finding if the problems are too hard, too easy, or a mix of both."""
    assert found.solved is not None and found.difficulty is not None
    always, mixed, never = found.difficulty
    keep = (
        []
        if config.data.filter_by_difficulty
        else ["--data.filter-by-difficulty, which searches for problems that are solved sometimes"]
    )
    if never == found.groups:
        most = 100 * found.solved.high
        text = f"none of {found.completions} completions is correct (95 % upper bound: {most:.0f} %)"
        ways = ["easier problems (--data.train)", *keep]
        if config.data.task in CODE_TASKS:
            ways += ["--rewards share_of_tests_passed, which gives partial credit"]
        elif len(config.rewards) == 1:
            ways += [f"a second, finer reward, e.g. {_format_reward(config)}"]
        return Finding(text, "; ".join([*ways, *_examples(config), f"--sampling.num-generations {2 * size}"]))
    if always == found.groups:
        return Finding(
            f"all of {found.completions} completions are correct: nothing is left to learn",
            "; ".join(["harder problems (--data.train)", *keep]),
        )
    if 2 * mixed < found.groups and keep:
        return Finding(
            f"{always} of {found.groups} problems are always solved and {never} never, which gives no gradient",
            f"--data.filter-by-difficulty, which trains only on the others; --sampling.num-generations {2 * size}",
        )
    return None


def _constant(name: str, groups: Sequence[Group]) -> str:
    """Describe a reward that is constant within each group."""
    graded = [value for group in groups for value in group.part(name) if value is not None]
    if not graded:
        return f"{name} (graded no completion)"
    if differs(graded):
        return f"{name} (differs between prompts)"
    return f"{name} (always {graded[0]:g} of {groups[0].weights[name]:g})"


def _longer(config: RunConfig, times: int) -> str:
    """Return the flags for longer completions that leave enough context for the prompts."""
    limit, context = config.sampling.max_completion_tokens, config.model.max_sequence_tokens
    flags = f"--sampling.max-completion-tokens {times * limit}"
    if context - times * limit < (context - limit) / 2:
        flags += f" --model.max-sequence-tokens {context + (times - 1) * limit}"
    return f"{flags}, then another preview"


def _readable(config: RunConfig, varying: Sequence[str]) -> str:
    """Return ways to get answers that the grader can parse."""
    ways = _examples(config)
    if config.data.task not in CODE_TASKS:
        paid = any(map(_is_format_reward, config.rewards))
        ways += [] if paid else [f"a reward for the format, e.g. {_format_reward(config)}"]
        ways += ["another --data.prompt-style"]
    taught = [name for name in varying if _is_format_reward(name) or name in RIGHT_REWARDS]
    if taught:
        faster = f"; faster: {ways[0]}" if ways else ""
        return f"no change needed: training can fix this: {', '.join(taught)} differ within groups{faster}"
    return "; ".join([*ways, "a model that follows instructions"])


def _examples(config: RunConfig) -> list[str]:
    return [] if config.data.few_shot else ["--data.few-shot 2, for worked examples in the prompt"]


def _is_format_reward(reward: str) -> bool:
    return any(word in reward for word in ("format", "pattern", "tag_count"))


def _format_reward(config: RunConfig) -> str:
    named = {"think": "think_answer_format=0.5", "hashes": r"'pattern:#### -?[0-9]+\s*$=0.5'"}
    return named.get(config.data.prompt_style, "soft_xml_format=0.5")
