"""Decides whether GRPO can learn from sampled groups, and what to change, based on their summary."""

from __future__ import annotations

from collections.abc import Sequence

from lora_grpo.commands import command
from lora_grpo.config import RunConfig
from lora_grpo.planning.preview_groups import Group, Summary, measure, share_of
from lora_grpo.rewards import RIGHT_REWARDS, is_format_reward
from lora_grpo.tasks import CODE_TASKS, TaskFile, get_task, source_of_rows

_MOST_FLAT = 0.8
"""At or above this share of groups with equal rewards, or of truncated completions, GRPO gets hardly any signal."""
_WORTH_REPORTING = 0.2
"""Minimum share of truncated or unparsed completions to report as a finding."""

Finding = tuple[str, str]
"""A problem that prevents GRPO from learning, and what to change."""


def judge(groups: Sequence[Group], config: RunConfig) -> tuple[str, str, list[Finding]]:
    """Decide whether GRPO can learn from these groups.

    With `data.filter_by_difficulty`, only groups that the filter keeps are considered.

    Returns:
        `can learn`, `can barely learn` or `cannot learn`; the reason; and the findings.
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
        findings = [("completions differ, but their rewards do not", advice)]
    return word, reason, findings


def _findings(found: Summary, config: RunConfig, rights: Sequence[str]) -> list[Finding]:
    """Return findings, causes before consequences: truncated or unparsed completions explain why none is correct."""
    task, is_code = get_task(config.data.task), config.data.task in CODE_TASKS
    first = [f"{command('train sft')} first, which trains on gold solutions"] if getattr(task, "has_gold", True) else []
    formats = {"think": "think_answer_format=0.5", "hashes": r"'pattern:#### -?[0-9]+\s*$=0.5'"}
    format_reward = formats.get(config.data.prompt_style, "soft_xml_format=0.5")
    findings: list[Finding] = []
    explained = found.truncated.value >= _MOST_FLAT
    if found.truncated.value >= _WORTH_REPORTING:
        limit, context = config.sampling.max_completion_tokens, config.model.max_sequence_tokens
        flags = f"--sampling.max-completion-tokens {2 * limit} --model.max-sequence-tokens {context + limit}"
        text = f"{found.truncated} of completions are truncated at {limit} tokens"
        findings.append((text, f"{flags}, then another preview"))

    if rights and found.unparsed.value >= _WORTH_REPORTING:
        explained = explained or found.unparsed.value >= _MOST_FLAT
        ways = list(first)
        if isinstance(task, TaskFile):
            ways.append(f"a prompt in {task.path.name} that shows the format")
        elif not is_code and not any(map(is_format_reward, config.rewards)):
            ways.append(f"a reward for the format, e.g. {format_reward}")
        if taught := [name for name in found.varying if is_format_reward(name) or name in RIGHT_REWARDS]:
            ways = [f"no change needed: training can fix this: {', '.join(taught)} differ within groups"]
        text = f"{found.unparsed} of completions end without an answer that can be parsed"
        findings.append((text, "; ".join(ways)))

    if rights and not explained and not found.partial_credit:
        if is_code:
            finer = ["--rewards share_of_tests_passed, which gives partial credit"]
        elif isinstance(task, TaskFile):
            finer = ["a score from 0 to 1 from check, for partial credit"]
        else:
            finer = [f"a second, finer reward, e.g. {format_reward}"] if len(config.rewards) == 1 else []
        if difficulty := _difficulty(found, config, first, finer):
            explained = True
            findings.append(difficulty)

    if found.distinct < found.size / 2 and found.flat.value >= 0.5:
        text = f"a group of {found.size} has {found.distinct:.1f} distinct completions on average"
        higher = max(1.0, config.sampling.temperature + 0.2)
        findings.append((text, f"--sampling.temperature {higher:g}, for more variety"))
    covered = {"sum", *found.varying, *(rights if explained else ())}
    if constant := [name for name in found.rewards if name not in covered]:
        advice = "a finer reward"
        if found.varying:
            advice = f"nothing, if {', '.join(found.varying)} should decide; else {advice}"
        findings.append((f"constant within each group: {', '.join(constant)}", advice))
    return findings


def _difficulty(found: Summary, config: RunConfig, first: Sequence[str], finer: Sequence[str]) -> Finding | None:
    """Return what to change if the problems are too hard, too easy, or both.

    Args:
        first: what to do before GRPO.
        finer: which rewards give partial credit.
    """
    always, mixed, never = found.difficulty
    source, size = source_of_rows(config.data.task), found.size
    completions, larger = found.groups * size, f"--sampling.num-generations {2 * size}"
    if never == found.groups:
        text = f"none of {completions} completions is correct (95% upper bound: {100 * found.solved.high:.0f}%)"
        return text, "; ".join([*first, f"easier problems ({source})", *finer, larger])
    if always == found.groups:
        text = f"all of {completions} completions are correct: nothing is left to learn"
        return text, f"harder problems ({source})"
    if 2 * mixed >= found.groups or config.data.filter_by_difficulty:
        return None
    text = f"{always} of {found.groups} problems are always solved and {never} never, which gives no gradient"
    # Advise the filter only where problems differ in difficulty, because otherwise it keeps some of them by chance.
    # With a pass rate of p, a share of 1 - p^G - (1 - p)^G of the groups of size G is mixed. Problems with different
    # pass rates have fewer mixed groups than problems that all have the mean pass rate.
    rate = found.solved.value
    if 0 < mixed < found.groups * (1 - rate**size - (1 - rate) ** size) / 2:
        larger = f"--data.filter-by-difficulty, which trains only on problems that are solved sometimes; {larger}"
    return text, larger
