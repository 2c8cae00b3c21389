"""Sampled groups, their summary with 95% intervals, whether GRPO can learn from them, and suggested changes."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_grpo.config import RunConfig
from lora_grpo.data import sft_command
from lora_grpo.evaluation import UNPARSED, bootstrap_interval, wilson_interval
from lora_grpo.grading import Row, Verdict
from lora_grpo.rewards import RIGHT_REWARDS, is_format_reward
from lora_grpo.tasks import CODE_TASKS, TaskFile, get_task, source_of_rows

_EQUAL = 1e-6
"""Rewards that differ by less than this are equal, because sums of the same numbers can differ by rounding."""
_MOST_FLAT = 0.8
"""At or above this fraction of groups with equal rewards, or of truncated completions, GRPO has almost no signal."""
_WORTH_REPORTING = 0.2
"""Minimum fraction of truncated or unparsed completions to report as a finding."""

Finding = tuple[str, str]
"""A problem that prevents GRPO from learning, and the suggested change."""


@dataclass(frozen=True)
class Answer:
    """One sampled completion with its rewards."""

    text: str
    num_tokens: int
    truncated: bool
    rewards: dict[str, float | None]
    """Each reward times its weight; None if the reward could not grade the completion."""
    verdict: Verdict

    @property
    def total(self) -> float | None:
        """The sum of the rewards; None if no reward could grade the completion."""
        graded = [value for value in self.rewards.values() if value is not None]
        return sum(graded) if graded else None


@dataclass(frozen=True)
class Group:
    """The completions of one prompt. GRPO compares their rewards with each other."""

    row: Row
    answers: tuple[Answer, ...]

    @property
    def solved(self) -> int:
        return sum(answer.verdict.passed for answer in self.answers)

    @property
    def is_mixed(self) -> bool:
        """Whether some completions are correct and others are not."""
        return 0 < self.solved < len(self.answers)

    def values(self, reward: str) -> list[float]:
        """Return the values of a reward, or of the `sum` of the rewards, without those that could not be graded."""
        values = [answer.total if reward == "sum" else answer.rewards[reward] for answer in self.answers]
        return [value for value in values if value is not None]

    def differs_in(self, reward: str) -> bool:
        """Whether the completions have different values of a reward, or of the `sum` of the rewards."""
        values = self.values(reward)
        return bool(values) and max(values) - min(values) > _EQUAL


@dataclass(frozen=True)
class Share:
    """A fraction with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.0f}% [{100 * self.low:.0f}, {100 * self.high:.0f}]"


@dataclass(frozen=True)
class Summary:
    groups: int
    size: int
    """Number of completions in a group."""
    rewards: dict[str, tuple[float, float] | None]
    """Mean and standard deviation of each weighted reward and of their `sum`; None if no completion was graded."""
    varying: tuple[str, ...]
    """Rewards that differ within at least one group."""
    flat: Share
    """Fraction of groups whose completions all have the same total reward."""
    solved: Share
    """Fraction of correct completions."""
    difficulty: tuple[int, int, int]
    """Number of problems solved by all, some and none of their completions."""
    partial_credit: bool
    """Whether the task gives scores between 0 and 1."""
    unparsed: Share
    """Fraction of completions that ended without a parsable answer."""
    truncated: Share
    distinct: float
    """Mean number of distinct completions in a group."""
    num_tokens: float
    """Mean length of a completion."""


def measure(groups: Sequence[Group]) -> Summary:
    """Return the summary of groups of equal size.

    Fractions of completions have intervals that are bootstrapped over groups, because the completions of one prompt are
    alike; fractions of groups have Wilson intervals.
    """
    answers = [answer for group in groups for answer in group.answers]
    names = list(answers[0].rewards)
    always, mixed = sum(group.solved == len(group.answers) for group in groups), sum(g.is_mixed for g in groups)
    values = {name: [value for group in groups for value in group.values(name)] for name in (*names, "sum")}

    def share(holds: Callable[[Answer], bool]) -> Share:
        rates = [statistics.mean(float(holds(answer)) for answer in group.answers) for group in groups]
        return Share(statistics.mean(rates), *bootstrap_interval(rates))

    return Summary(
        groups=len(groups),
        size=len(groups[0].answers),
        rewards={name: (statistics.mean(v), statistics.pstdev(v)) if v else None for name, v in values.items()},
        varying=tuple(name for name in names if any(group.differs_in(name) for group in groups)),
        flat=share_of(sum(not group.differs_in("sum") for group in groups), len(groups)),
        solved=share(lambda answer: answer.verdict.passed),
        difficulty=(always, mixed, len(groups) - always - mixed),
        partial_credit=any(0 < answer.verdict.value < 1 for answer in answers),
        unparsed=share(lambda answer: answer.verdict.reason in UNPARSED and not answer.truncated),
        truncated=share(lambda answer: answer.truncated),
        distinct=statistics.mean(len({answer.text for answer in group.answers}) for group in groups),
        num_tokens=statistics.mean(answer.num_tokens for answer in answers),
    )


def share_of(count: int, total: int) -> Share:
    """Return the fraction of groups with its interval."""
    return Share(count / max(1, total), *wilson_interval(count, max(1, total)))


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
    sft = sft_command(config)
    first = [f"{sft} first, on reference answers"] if sft else []
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
            finer = ["a score between 0 and 1, for partial credit"]
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
            advice = f"none is needed if {', '.join(found.varying)} is the goal; otherwise {advice}"
        findings.append((f"constant within each group: {', '.join(constant)}", advice))
    return findings


def _difficulty(found: Summary, config: RunConfig, first: Sequence[str], finer: Sequence[str]) -> Finding | None:
    """Return the suggested changes if the problems are too hard, too easy, or both.

    `first` is the suggested step before GRPO, and `finer` are rewards that give partial credit.
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
    # With a pass rate of p, a fraction of 1 - p^G - (1 - p)^G of the groups of size G is mixed. Problems with different
    # pass rates have fewer mixed groups than problems that all have the mean pass rate.
    rate = found.solved.value
    if 0 < mixed < found.groups * (1 - rate**size - (1 - rate) ** size) / 2:
        larger = f"--data.filter-by-difficulty, which trains only on problems that are solved sometimes; {larger}"
    return text, larger
