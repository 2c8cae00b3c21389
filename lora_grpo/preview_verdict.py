"""Whether GRPO can learn from a few sampled groups, and what to change: each advice is tied to what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lora_grpo.config import RunConfig
from lora_grpo.evaluation_report import UNPARSED
from lora_grpo.passk import Interval, bootstrap_interval, wilson_interval
from lora_grpo.tasks import CODE_TASKS, Row, Verdict

RIGHT_REWARDS = (
    *("correct_answer", "passes_tests", "share_of_tests_passed"),
    *("accuracy_reward", "reasoning_accuracy_reward"),
)
"""Names of rewards that pay for a right answer."""

_MOST_FLAT = 0.8
"""Share of groups without a difference, and of completions that are cut off, from which hardly any signal is left."""
_WORTH_SAYING = 0.2
"""Share of truncated or unparsed completions from which they are a finding."""
_EQUAL = 1e-6
"""Rewards closer than this are one: sums of the same numbers differ by rounding."""


@dataclass(frozen=True)
class Answer:
    """One sampled completion and all that is said of it."""

    text: str
    num_tokens: int
    truncated: bool
    rewards: dict[str, float | None]
    """Each reward's value, before its scale; None where it could not grade."""
    verdict: Verdict | None
    """The grader's; None for a task without right answers."""


@dataclass(frozen=True)
class Group:
    """The completions of one prompt, which GRPO compares with each other."""

    row: Row
    weights: dict[str, float]
    """Each reward's scale."""
    answers: tuple[Answer, ...]

    def scaled(self, name: str, answer: Answer) -> float | None:
        """Return what a reward adds to a completion's sum; None where it could not grade."""
        value = answer.rewards[name]
        return None if value is None else self.weights[name] * value

    def part(self, name: str) -> list[float | None]:
        """Return what a reward adds to the sum of each completion."""
        return [self.scaled(name, answer) for answer in self.answers]

    @property
    def sums(self) -> list[float | None]:
        """What each completion earns; None where no reward could grade it."""
        parts = zip(*map(self.part, self.weights), strict=True)
        return [None if all(v is None for v in part) else sum(v or 0.0 for v in part) for part in parts]

    @property
    def solved(self) -> int:
        """Completions with the right answer."""
        return sum(answer.verdict is not None and answer.verdict.passed for answer in self.answers)

    @property
    def is_mixed(self) -> bool:
        """Whether some of the completions are right and some are wrong."""
        return 0 < self.solved < len(self.answers)


@dataclass(frozen=True)
class Share:
    """A share with its 95 % interval; all are fractions."""

    value: float
    interval: Interval

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} % [{100 * self.interval.low:.0f}, {100 * self.interval.high:.0f}]"


@dataclass(frozen=True)
class Summary:
    """What the groups come to."""

    groups: int
    completions: int
    rewards: dict[str, tuple[float, float] | None]
    """Mean and standard deviation of each reward, scaled, over all completions, and of their `sum`; None: ungraded."""
    varying: tuple[str, ...]
    """The rewards that differ within at least one group."""
    flat: Share
    """Groups whose completions all earn the same."""
    solved: Share | None
    """Completions; None for a task without right answers, as the next two."""
    difficulty: tuple[int, int, int] | None
    """Problems that all completions solve, some, and none."""
    unparsed: Share | None
    """Completions that ended and that no answer could be read from."""
    truncated: Share
    distinct: float
    """Different completions in a group, on average."""
    num_tokens: float
    """Of a completion, on average."""


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


def differs(values: Sequence[float | None]) -> bool:
    """Return whether graded values are not all the same."""
    graded = [value for value in values if value is not None]
    return bool(graded) and max(graded) - min(graded) > _EQUAL


def measure(groups: Sequence[Group]) -> Summary:
    """Return what groups of one size come to.

    Intervals are of problems like these: shares of completions resample whole groups, shares of groups are Wilson's.
    """
    names = list(groups[0].weights)
    answers = [answer for group in groups for answer in group.answers]
    flat = sum(not differs(group.sums) for group in groups)
    graded = answers[0].verdict is not None
    mixed, always = sum(group.is_mixed for group in groups), sum(g.solved == len(g.answers) for g in groups)
    return Summary(
        groups=len(groups),
        completions=len(answers),
        rewards={name: _moments([v for g in groups for v in g.part(name)]) for name in names}
        | {"sum": _moments([value for group in groups for value in group.sums])},
        varying=tuple(name for name in names if any(differs(group.part(name)) for group in groups)),
        flat=Share(flat / len(groups), wilson_interval(flat, len(groups))),
        solved=_share([[a.verdict is not None and a.verdict.passed for a in g.answers] for g in groups])
        if graded
        else None,
        difficulty=(always, mixed, len(groups) - always - mixed) if graded else None,
        unparsed=_share([[_is_unparsed(a) and not a.truncated for a in g.answers] for g in groups]) if graded else None,
        truncated=_share([[a.truncated for a in g.answers] for g in groups]),
        distinct=statistics.mean(len({a.text for a in g.answers}) for g in groups),
        num_tokens=statistics.mean(a.num_tokens for a in answers),
    )


def judge(groups: Sequence[Group], config: RunConfig) -> Judgement:
    """Say whether GRPO can learn from groups like these, and what to change.

    With `data.filter_solved` it is those that the filter keeps which decide.
    """
    found = measure(groups)
    kept = [group for group in groups if group.is_mixed] if config.data.filter_solved else list(groups)
    differing = sum(differs(group.sums) for group in kept)
    low, high = wilson_interval(differing, max(1, len(kept)))
    share = f"{differing} of {len(kept)} groups [{100 * low:.0f}, {100 * high:.0f} %]"
    rights = [name for name in groups[0].weights if name in RIGHT_REWARDS]
    if not kept:
        word, high = "can hardly learn", wilson_interval(0, len(groups)).high
        reason = (
            f"--data.filter-solved keeps none of these {len(groups)} problems, {100 * high:.0f} % of others at most"
        )
    elif not differing:
        word, reason = "cannot learn", f"all completions of a group earn the same; rewards differ within {share}"
    elif rights and not any(name in found.varying for name in rights):
        word = "can hardly learn"
        reason = f"only {', '.join(found.varying)} tells completions of a group apart, {rights[0]} never"
    elif found.truncated.value >= _MOST_FLAT:
        word, reason = "can hardly learn", f"most completions are cut off; rewards differ within {share}"
    elif differing <= (1 - _MOST_FLAT) * len(kept):
        word, reason = "can hardly learn", f"rewards differ within {share}"
    else:
        word, reason = "can learn", f"rewards differ within {share}"
    findings = _findings(groups, found, config)
    if word != "can learn" and not findings:
        advice = "a reward that tells completions apart, a higher --sampling.temperature, or a larger group"
        findings = [Finding("completions differ, and what they earn does not", advice)]
    return Judgement(word, reason, tuple(findings))


def _findings(groups: Sequence[Group], found: Summary, config: RunConfig) -> list[Finding]:
    """Return causes first: where most answers are cut off or unread, that none is right says nothing more."""
    sampling, size = config.sampling, len(groups[0].answers)
    findings = []
    known = False
    if found.truncated.value >= _WORTH_SAYING:
        known = found.truncated.value >= _MOST_FLAT
        limit = sampling.max_completion_tokens
        seen = f"{found.truncated} of completions are cut off at {limit} tokens"
        findings.append(Finding(seen, _longer(config, 4 if found.truncated.value >= 0.5 else 2)))
    rights = [name for name in groups[0].weights if name in RIGHT_REWARDS]
    if rights and found.unparsed is not None and found.unparsed.value >= _WORTH_SAYING:
        known = known or found.unparsed.value >= _MOST_FLAT
        seen = f"{found.unparsed} of completions end without an answer that can be read"
        findings.append(Finding(seen, _readable(config, found.varying)))
    told = list(rights) if known else []
    if rights and found.difficulty is not None and not known:
        difficulty = _difficulty(found, config, size)
        findings += [difficulty] if difficulty else []
        told = list(rights) if difficulty else []
    if found.distinct < size / 2:
        hotter = 1.0 if sampling.temperature < 1 else round(sampling.temperature + 0.2, 1)
        advice = f"--sampling.temperature {hotter:g}" if sampling.top_p == 1 else "--sampling.top-p 1"
        seen = f"a group of {size} holds {found.distinct:.1f} different completions on average"
        findings.append(Finding(seen, f"{advice}, so that there is something to compare"))
    for name in groups[0].weights:
        if name not in found.varying and name not in told:
            findings.append(_constant(name, groups))
    return findings


def _difficulty(found: Summary, config: RunConfig, size: int) -> Finding | None:
    """Say what is wrong with problems that are too hard, too easy, or both."""
    assert found.solved is not None and found.difficulty is not None
    always, mixed, never = found.difficulty
    keep = [] if config.data.filter_solved else ["--data.filter-solved, which looks for problems solved sometimes"]
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
            f"--data.filter-solved, which trains on the others alone; --sampling.num-generations {2 * size}",
        )
    return None


def _constant(name: str, groups: Sequence[Group]) -> Finding:
    values = [value for group in groups for value in group.part(name)]
    graded = [value for value in values if value is not None]
    if not graded:
        return Finding(f"{name} could grade none of the completions", f"rows with the columns that {name} reads")
    if differs(graded):
        seen = f"{name} differs between prompts and never within a group, where GRPO compares"
    else:
        seen = f"{name} gives every completion {graded[0]:g} of {groups[0].weights[name]:g}"
    return Finding(seen, "nothing, if the others are to decide; else a reward that tells completions apart")


def _longer(config: RunConfig, times: int) -> str:
    """Return the flags for completions so many times as long, with room for the prompts."""
    limit, context = config.sampling.max_completion_tokens, config.model.max_sequence_tokens
    flags = f"--sampling.max-completion-tokens {times * limit}"
    if context - times * limit < (context - limit) / 2:
        flags += f" --model.max-sequence-tokens {context + (times - 1) * limit}"
    return f"{flags}, and another preview"


def _readable(config: RunConfig, varying: Sequence[str]) -> str:
    """Return ways to have answers written so that the grader reads them."""
    taught = [name for name in varying if _pays_for_format(name)]
    if taught:
        return f"nothing, if training is to mend it: it is paid for, and {', '.join(taught)} differ within groups"
    paid = any(map(_pays_for_format, config.rewards)) or config.data.task in CODE_TASKS
    ways = [] if paid else [f"a reward for the format, e.g. {_format_reward(config)}"]
    return "; ".join([*ways, *_examples(config), "another --data.prompt-style, or a model that follows instructions"])


def _examples(config: RunConfig) -> list[str]:
    return [] if config.data.few_shot else ["--data.few-shot 2, worked examples in the prompt"]


def _pays_for_format(reward: str) -> bool:
    return any(word in reward for word in ("format", "pattern", "tag_count"))


def _format_reward(config: RunConfig) -> str:
    named = {"think": "think_answer_format=0.5", "hashes": r"'pattern:#### -?[0-9]+\s*$=0.5'"}
    return named.get(config.data.prompt_style, "soft_xml_format=0.5")


def _is_unparsed(answer: Answer) -> bool:
    return answer.verdict is not None and answer.verdict.reason in UNPARSED


def _moments(values: Sequence[float | None]) -> tuple[float, float] | None:
    graded = [value for value in values if value is not None]
    return (statistics.mean(graded), statistics.pstdev(graded)) if graded else None


def _share(groups: Sequence[Sequence[bool]]) -> Share:
    values = [statistics.mean(map(float, group)) for group in groups]
    return Share(statistics.mean(values), bootstrap_interval(values))
