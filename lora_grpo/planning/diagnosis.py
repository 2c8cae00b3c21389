"""Decides whether GRPO can learn from sampled groups, and what to change, based on their summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_grpo.commands import command
from lora_grpo.config import RunConfig
from lora_grpo.planning.preview_groups import Group, Summary, measure, share_of
from lora_grpo.rewards import RIGHT_REWARDS, is_format_reward
from lora_grpo.tasks import CODE_TASKS, TaskFile, get_task, source_of_rows

_MOST_FLAT = 0.8
"""At or above this share of groups with equal rewards, or of truncated completions, GRPO gets hardly any signal."""
_WORTH_REPORTING = 0.2
"""Minimum share of truncated or unparsed completions to report as a finding."""


@dataclass(frozen=True)
class Finding:
    """A problem that prevents GRPO from learning."""

    found: str
    advice: str


@dataclass(frozen=True)
class Prediction:
    word: str
    """`can learn`, `can barely learn` or `cannot learn`."""
    reason: str
    findings: tuple[Finding, ...]
    summary: Summary


def judge(groups: Sequence[Group], config: RunConfig) -> Prediction:
    """Decide whether GRPO can learn from these groups, and what to change.

    With `data.filter_by_difficulty`, only groups that the filter keeps are considered.
    """
    found = measure(groups)
    kept = [group for group in groups if group.is_mixed] if config.data.filter_by_difficulty else list(groups)
    differing = sum(group.differs_in("sum") for group in kept)
    share = f"rewards differ within {differing} of {len(kept)} groups, {share_of(differing, len(kept))}"
    rights = [name for name in found.rewards if name in RIGHT_REWARDS]
    word = "can barely learn"
    if not kept:
        reason = f"--data.filter-by-difficulty keeps none of these {len(groups)} problems, {share_of(0, len(groups))}"
    elif not differing:
        word, reason = "cannot learn", f"all completions of a group have the same reward; {share}"
    elif found.truncated.value >= _MOST_FLAT:
        reason = f"most completions are truncated; {share}"
    elif rights and not set(rights) & set(found.varying):
        reason = f"completions of a group differ only in {', '.join(found.varying)}, never in {', '.join(rights)}"
    elif len(kept) - differing >= _MOST_FLAT * len(kept):
        reason = share
    else:
        word, reason = "can learn", share
    findings = _findings(found, config, rights)
    if word != "can learn" and not findings:
        advice = "a finer reward, a higher --sampling.temperature, or a larger group"
        findings = [Finding("completions differ, but their rewards do not", advice)]
    return Prediction(word, reason, tuple(findings), found)


def _findings(found: Summary, config: RunConfig, rights: Sequence[str]) -> list[Finding]:
    """Return findings, causes before consequences: truncated or unparsed completions explain why none is correct."""
    sampling, size = config.sampling, found.completions // found.groups
    findings, explained = [], False
    if found.truncated.value >= _WORTH_REPORTING:
        explained = found.truncated.value >= _MOST_FLAT
        limit, context = sampling.max_completion_tokens, config.model.max_sequence_tokens
        text = f"{found.truncated} of completions are truncated at {limit} tokens"
        flags = f"--sampling.max-completion-tokens {2 * limit} --model.max-sequence-tokens {context + limit}"
        findings.append(Finding(text, f"{flags}, then another preview"))
    if rights and found.unparsed.value >= _WORTH_REPORTING:
        explained = explained or found.unparsed.value >= _MOST_FLAT
        text = f"{found.unparsed} of completions end without an answer that can be parsed"
        findings.append(Finding(text, _readable(config, found.varying)))
    if rights and not explained and not found.partial_credit and (difficulty := _difficulty(found, config, size)):
        explained = True
        findings.append(difficulty)
    if found.distinct < size / 2 and found.flat.value >= 0.5:
        advice = f"--sampling.temperature {max(1.0, sampling.temperature + 0.2):g}, for more variety"
        findings.append(Finding(f"a group of {size} has {found.distinct:.1f} distinct completions on average", advice))
    covered = {"sum", *found.varying, *(rights if explained else ())}
    if constant := [name for name in found.rewards if name not in covered]:
        advice = "a finer reward"
        if found.varying:
            advice = f"nothing, if {', '.join(found.varying)} should decide; else {advice}"
        findings.append(Finding(f"constant within each group: {', '.join(constant)}", advice))
    return findings


def _difficulty(found: Summary, config: RunConfig, size: int) -> Finding | None:
    """Return what to change if the problems are too hard, too easy, or both."""
    always, mixed, never = found.difficulty
    source = source_of_rows(config.data.task)
    larger = f"--sampling.num-generations {2 * size}"
    if never == found.groups:
        ways = [*_gold_solutions(config), f"easier problems ({source})"]
        if config.data.task in CODE_TASKS:
            ways.append("--rewards share_of_tests_passed, which gives partial credit")
        elif isinstance(get_task(config.data.task), TaskFile):
            ways.append("a score from 0 to 1 from check, for partial credit")
        elif len(config.rewards) == 1:
            ways.append(f"a second, finer reward, e.g. {_format_reward(config)}")
        most = 100 * found.solved.high
        text = f"none of {found.completions} completions is correct (95% upper bound: {most:.0f}%)"
        return Finding(text, "; ".join([*ways, larger]))
    if always == found.groups:
        text = f"all of {found.completions} completions are correct: nothing is left to learn"
        return Finding(text, f"harder problems ({source})")
    if 2 * mixed >= found.groups or config.data.filter_by_difficulty:
        return None
    text = f"{always} of {found.groups} problems are always solved and {never} never, which gives no gradient"
    # Advise the filter only where problems differ in difficulty, because otherwise it keeps some of them by chance.
    # With a pass rate of p, a share of 1 - p^G - (1 - p)^G of the groups of size G is mixed. Problems with different
    # pass rates have fewer mixed groups than problems that all have the mean pass rate.
    rate = found.solved.value
    if 0 < mixed < found.groups * (1 - rate**size - (1 - rate) ** size) / 2:
        larger = f"--data.filter-by-difficulty, which trains only on problems that are solved sometimes; {larger}"
    return Finding(text, larger)


def _readable(config: RunConfig, varying: Sequence[str]) -> str:
    """Return what to change if answers cannot be parsed."""
    if taught := [name for name in varying if is_format_reward(name) or name in RIGHT_REWARDS]:
        return f"no change needed: training can fix this: {', '.join(taught)} differ within groups"
    ways = _gold_solutions(config)
    if isinstance(task := get_task(config.data.task), TaskFile):
        ways.append(f"a prompt in {task.path.name} that shows the format")
    elif config.data.task not in CODE_TASKS and not any(map(is_format_reward, config.rewards)):
        ways.append(f"a reward for the format, e.g. {_format_reward(config)}")
    return "; ".join(ways)


def _gold_solutions(config: RunConfig) -> list[str]:
    has_gold = getattr(get_task(config.data.task), "has_gold", True)
    return [f"{command('train sft')} first, which trains on gold solutions"] if has_gold else []


def _format_reward(config: RunConfig) -> str:
    named = {"think": "think_answer_format=0.5", "hashes": r"'pattern:#### -?[0-9]+\s*$=0.5'"}
    return named.get(config.data.prompt_style, "soft_xml_format=0.5")
