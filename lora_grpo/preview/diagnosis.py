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
_ALMOST_NO_SIGNAL = 0.8
"""At or above this fraction of groups with equal rewards, or of truncated completions, GRPO has almost no signal."""
_WORTH_REPORTING = 0.2
"""Minimum fraction of truncated or unparsed completions to report as a finding."""


@dataclass(frozen=True)
class Finding:
    """What keeps GRPO from learning, or slows it."""

    problem: str
    advice: str
    """The suggested change."""


@dataclass(frozen=True)
class Diagnosis:
    """Whether GRPO can learn from the groups."""

    verdict: str
    """`can learn`, `can barely learn` or `cannot learn`."""
    reason: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Answer:
    """One sampled completion with its rewards."""

    text: str
    num_tokens: int
    truncated: bool
    rewards: dict[str, float | None]
    """Each reward times its weight; None if the reward could not grade the completion."""
    verdict: Verdict
    failure: str = ""
    """Why the agent of the episode failed, so that it says nothing about the model; "" if it did not."""

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
    def played(self) -> list[Answer]:
        """The completions without those whose agent failed, which count nowhere, as in evaluations."""
        return [answer for answer in self.answers if not answer.failure]

    @property
    def solved(self) -> int:
        """Number of correct completions."""
        return sum(answer.verdict.passed for answer in self.played)

    @property
    def is_mixed(self) -> bool:
        """Whether some completions are correct and others are not."""
        return 0 < self.solved < len(self.played)

    @property
    def distinct(self) -> int:
        """Number of distinct completions."""
        return len({answer.text for answer in self.played})

    def values(self, reward: str) -> list[float]:
        """Return the values of a reward, or of the `sum` of the rewards, without those that could not be graded."""
        values = []
        for answer in self.played:
            value = answer.total if reward == "sum" else answer.rewards[reward]
            if value is not None:
                values.append(value)
        return values

    def differs_in(self, reward: str) -> bool:
        """Whether the completions have different values of a reward, or of the `sum` of the rewards."""
        values = self.values(reward)
        return bool(values) and max(values) - min(values) > _EQUAL


@dataclass(frozen=True)
class Fraction:
    """A fraction from 0 to 1 with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.0f}% [{100 * self.low:.0f}, {100 * self.high:.0f}]"


@dataclass(frozen=True)
class Moments:
    """The values of a weighted reward over all completions that it could grade."""

    mean: float
    std: float


@dataclass(frozen=True)
class Difficulty:
    """Numbers of problems, by how many of their completions are correct."""

    always_solved: int
    sometimes_solved: int
    never_solved: int


@dataclass(frozen=True)
class Summary:
    """What the groups have in common."""

    groups: int
    """Number of groups, without those in which every agent failed."""
    size: int
    """Number of completions that are sampled in a group."""
    completions: int
    """Number of completions in all groups, without those whose agent failed."""
    failed: int
    """Number of completions whose agent failed."""
    rewards: dict[str, Moments | None]
    """Each weighted reward, and their `sum`; None if no completion was graded."""
    varying: tuple[str, ...]
    """Rewards that differ within at least one group."""
    zero_variance: Fraction
    """Fraction of groups whose completions all have the same total reward."""
    solved: Fraction
    """Fraction of correct completions."""
    difficulty: Difficulty
    partial_credit: bool
    """Whether the task gives scores between 0 and 1."""
    unparsed: Fraction
    """Fraction of completions that ended without a parsable answer."""
    truncated: Fraction
    """Fraction of completions that reached the maximum length."""
    distinct: float
    """Mean number of distinct completions in a group."""
    num_tokens: float
    """Mean length of a completion, in tokens."""


def measure(groups: Sequence[Group]) -> Summary:
    """Return the summary of groups of equal size, at least one of whose completions counts.

    Fractions of completions have intervals that are bootstrapped over groups, because the completions of one prompt are
    alike; fractions of groups have Wilson intervals.
    """
    size = len(groups[0].answers)
    num_sampled = len(groups) * size
    groups = _with_completions(groups)
    answers = [answer for group in groups for answer in group.played]
    reward_names = list(answers[0].rewards)

    def fraction(holds: Callable[[Answer], bool]) -> Fraction:
        """Return the fraction of completions for which something holds."""
        rates = []  # by group
        for group in groups:
            num_holding = sum(holds(answer) for answer in group.played)
            rates.append(num_holding / len(group.played))
        return Fraction(statistics.mean(rates), *bootstrap_interval(rates))

    def varies(reward: str) -> bool:
        return any(group.differs_in(reward) for group in groups)

    num_always_solved = sum(group.solved == len(group.played) for group in groups)
    num_mixed = sum(group.is_mixed for group in groups)
    num_equal = sum(not group.differs_in("sum") for group in groups)
    return Summary(
        groups=len(groups),
        size=size,
        completions=len(answers),
        failed=num_sampled - len(answers),
        rewards={name: _moments(groups, name) for name in (*reward_names, "sum")},
        varying=tuple(name for name in reward_names if varies(name)),
        zero_variance=fraction_of(num_equal, len(groups)),
        solved=fraction(lambda answer: answer.verdict.passed),
        difficulty=Difficulty(
            always_solved=num_always_solved,
            sometimes_solved=num_mixed,
            never_solved=len(groups) - num_always_solved - num_mixed,
        ),
        partial_credit=any(0 < answer.verdict.value < 1 for answer in answers),
        unparsed=fraction(lambda answer: answer.verdict.reason in UNPARSED and not answer.truncated),
        truncated=fraction(lambda answer: answer.truncated),
        distinct=statistics.mean(group.distinct for group in groups),
        num_tokens=statistics.mean(answer.num_tokens for answer in answers),
    )


def _with_completions(groups: Sequence[Group]) -> list[Group]:
    """Return the groups without those in which every agent failed."""
    return [group for group in groups if group.played]


def _moments(groups: Sequence[Group], reward: str) -> Moments | None:
    values = [value for group in groups for value in group.values(reward)]
    if not values:
        return None
    return Moments(statistics.mean(values), statistics.pstdev(values))


def fraction_of(count: int, total: int) -> Fraction:
    """Return the fraction of groups with its Wilson interval."""
    total = max(1, total)
    return Fraction(count / total, *wilson_interval(count, total))


def judge(groups: Sequence[Group], config: RunConfig) -> Diagnosis:
    """Decide whether GRPO can learn from these groups.

    With `data.filter_by_difficulty`, only groups that the filter keeps are considered.
    """
    summary = measure(groups)
    groups = _with_completions(groups)
    trained = groups
    if config.data.filter_by_difficulty:
        trained = [group for group in groups if group.is_mixed]
    differing = sum(group.differs_in("sum") for group in trained)
    signal = f"rewards differ within {differing} of {len(trained)} groups, {fraction_of(differing, len(trained))}"
    right_rewards = [name for name in summary.rewards if name in RIGHT_REWARDS]

    # The first of these that holds is the reason.
    verdict = "can barely learn"
    if not trained:
        none = fraction_of(0, len(groups))
        reason = f"--data.filter-by-difficulty keeps none of these {len(groups)} problems, {none}"
    elif not differing:
        verdict = "cannot learn"
        reason = f"all completions of a group have the same reward; {signal}"
    elif summary.truncated.value >= _ALMOST_NO_SIGNAL:
        reason = f"most completions are truncated; {signal}"
    elif right_rewards and not set(right_rewards) & set(summary.varying):
        varying = ", ".join(summary.varying)
        reason = f"completions of a group differ only in {varying}, never in {', '.join(right_rewards)}"
    elif len(trained) - differing >= _ALMOST_NO_SIGNAL * len(trained):
        reason = signal
    else:
        verdict = "can learn"
        reason = signal

    findings = _findings(summary, config, right_rewards)
    if verdict != "can learn" and not findings:
        advice = "a finer reward, a higher --sampling.temperature, or a larger group"
        findings = [Finding("completions differ, but their rewards do not", advice)]
    return Diagnosis(verdict, reason, tuple(findings))


def _findings(summary: Summary, config: RunConfig, right_rewards: Sequence[str]) -> list[Finding]:
    """Return findings, causes before consequences: truncated or unparsed completions explain why none is correct."""
    # What can be advised for this task.
    task = get_task(config.data.task)
    is_code = config.data.task in CODE_TASKS
    sft = sft_command(config)
    sft_first = [f"{sft} first, on reference answers"] if sft else []
    format_rewards = {
        "think": "think_answer_format=0.5",
        "hashes": r"'pattern:#### -?[0-9]+\s*$=0.5'",
        "boxed": r"'pattern:\\boxed\{.+\}=0.5'",
    }
    format_reward = format_rewards.get(config.data.prompt_style, "soft_xml_format=0.5")

    # Completions without an answer.
    findings: list[Finding] = []
    # Whether a finding explains why rewards of right answers are equal within groups.
    is_explained = summary.truncated.value >= _ALMOST_NO_SIGNAL
    if summary.truncated.value >= _WORTH_REPORTING:
        findings.append(_truncation(summary, config, sft_first))

    if right_rewards and summary.unparsed.value >= _WORTH_REPORTING:
        if summary.unparsed.value >= _ALMOST_NO_SIGNAL:
            is_explained = True
        teaching = [name for name in summary.varying if is_format_reward(name) or name in RIGHT_REWARDS]
        if teaching:
            advice = f"no change needed: training can fix this: {', '.join(teaching)} differ within groups"
        else:
            changes = list(sft_first)
            if isinstance(task, TaskFile):
                changes.append(f"a prompt in {task.path.name} that shows the format")
            elif not is_code and not any(map(is_format_reward, config.rewards)):
                changes.append(f"a reward for the format, e.g. {format_reward}")
            if not changes:
                changes.append("a larger model, or one that is trained to follow instructions")
            advice = "; ".join(changes)
        problem = f"{summary.unparsed} of completions end without an answer that can be parsed"
        findings.append(Finding(problem, advice))

    # Problems that are too hard or too easy.
    if right_rewards and not is_explained and not summary.partial_credit:
        finer: list[str] = []
        if is_code:
            finer.append("--rewards share_of_tests_passed, which gives partial credit")
        elif isinstance(task, TaskFile):
            finer.append("a score between 0 and 1, for partial credit")
        elif not task.has_own_prompts and len(config.rewards) == 1:
            finer.append(f"a second, finer reward, e.g. {format_reward}")
        difficulty = _difficulty(summary, config, sft_first, finer)
        if difficulty:
            is_explained = True
            findings.append(difficulty)

    # Completions that are alike, and rewards that do not tell them apart.
    if summary.distinct < summary.size / 2 and summary.zero_variance.value >= 0.5:
        problem = f"a group of {summary.size} has {summary.distinct:.1f} distinct completions on average"
        temperature = max(1.0, config.sampling.temperature + 0.2)
        findings.append(Finding(problem, f"--sampling.temperature {temperature:g}, for more variety"))

    constant = [name for name in summary.rewards if name != "sum" and name not in summary.varying]
    if is_explained:
        constant = [name for name in constant if name not in right_rewards]
    if constant:
        advice = "a finer reward"
        if summary.varying:
            advice = f"none is needed if {', '.join(summary.varying)} is the goal; otherwise {advice}"
        findings.append(Finding(f"constant within each group: {', '.join(constant)}", advice))
    return findings


def _truncation(summary: Summary, config: RunConfig, sft_first: Sequence[str]) -> Finding:
    """Return the finding that completions are truncated, with limits that give them twice the room.

    Args:
        sft_first: the suggested step before GRPO, if there is one. A model that never answers right may not know how an
            answer ends either.
    """
    limit = config.sampling.max_completion_tokens
    context = config.model.max_sequence_tokens
    flags = f"--sampling.max-completion-tokens {2 * limit} --model.max-sequence-tokens {context + limit}"
    problem = f"{summary.truncated} of completions are truncated at {limit} tokens"
    advice = f"{flags}, then another preview"
    if sft_first and not summary.solved.value:
        advice = f"{'; '.join(sft_first)}, which also teach where to end; or, if answers need the room, {advice}"
    return Finding(problem, advice)


def _difficulty(summary: Summary, config: RunConfig, sft_first: Sequence[str], finer: Sequence[str]) -> Finding | None:
    """Return the suggested changes if the problems are too hard, too easy, or both.

    Args:
        sft_first: the suggested step before GRPO, if there is one.
        finer: rewards that give partial credit.
    """
    always = summary.difficulty.always_solved
    mixed = summary.difficulty.sometimes_solved
    never = summary.difficulty.never_solved
    source = source_of_rows(config.data.task)
    size = summary.size
    completions = summary.completions
    larger_group = f"--sampling.num-generations {2 * size}"
    if never == summary.groups:
        upper_bound = 100 * summary.solved.high
        problem = f"none of {completions} completions is correct (95% upper bound: {upper_bound:.0f}%)"
        return Finding(problem, "; ".join([*sft_first, f"easier problems ({source})", *finer, larger_group]))
    if always == summary.groups:
        problem = f"all of {completions} completions are correct: nothing is left to learn"
        return Finding(problem, f"harder problems ({source})")
    if 2 * mixed >= summary.groups or config.data.filter_by_difficulty:
        return None

    problem = f"{always} of {summary.groups} problems are always solved and {never} never, which gives no gradient"
    # Advise the filter only where problems differ in difficulty, because otherwise it keeps some of them by chance.
    # With a pass rate of p, a fraction of 1 - p^G - (1 - p)^G of the groups of size G is mixed. Problems with different
    # pass rates have fewer mixed groups than problems that all have the mean pass rate.
    rate = summary.solved.value
    mixed_if_alike = summary.groups * (1 - rate**size - (1 - rate) ** size)
    if 0 < mixed < mixed_if_alike / 2:
        filtered = "--data.filter-by-difficulty, which trains only on problems that are solved sometimes"
        return Finding(problem, f"{filtered}; {larger_group}")
    return Finding(problem, larger_group)
