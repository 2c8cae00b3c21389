"""Metrics of one model's graded samples: pass@k, greedy accuracy, mean score, and how the answers came about.

A problem is one row of a task. It has one greedy sample, several others, or both. The two kinds are never mixed.

    pass@k     = mean over problems of the estimate in `pass_at_k`, from the samples that are not greedy
    greedy     = fraction of problems whose greedy sample passes
    mean score = mean over problems of the mean `score`, for tasks that give partial credit

Samples whose agent failed are left out first; see `without_failed`.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.results import GREEDY, RULES, Result, has_failed, is_greedy
from lora_grpo.evaluation.schema import Bounds, Schema

UNPARSED = ("empty", "no_answer", "unclosed_answer", "unreadable_answer", "no_code", "unfinished_thought")
"""Statuses of completions without a readable answer."""

_SAMPLED = "sampled"
"""The kind of samples that are not greedy, in `Measurement.sample_stats`."""
_USUAL_SHARE = 0.9
"""An answer of at least this fraction of the samples is reported as the usual one."""
_USUAL_PROBLEMS = 10
"""Minimum number of problems for a usual answer. Fewer may have the same answer by chance."""
_CURVE_KS = (*range(1, 11), *(2**power for power in range(4, 20)))
"""The k of a pass@k curve, as far as there are samples: 1 to 10, 16, 32, 64, ..."""


class CurvePoint(Schema):
    """pass@k at one k."""

    k: int
    value: float
    interval: Bounds


class Measurement(Schema):
    """The metrics of one model."""

    label: str
    scores: dict[str, float]
    """`pass@k` for each requested k, `greedy` and `mean score`, as fractions; see `metrics`."""
    intervals: dict[str, Bounds]
    curve: list[CurvePoint]
    """pass@k for more values of k."""
    tasks: int
    """Number of problems with samples."""
    samples: int
    failed: int = 0
    """Number of samples that are left out because their agent failed."""
    sample_stats: dict[str, dict[str, float]]
    """Counts of the `greedy` samples and of the `sampled` ones, if there are any; see `_statistics`."""
    usual_answer: str | None = None
    """The answer of at least 90% of the samples of ten or more problems, if there is one."""
    source: dict[str, Any]
    """Where the samples come from: the model, SHA-256 of its weights, adapter or samples file, engine, hardware."""


@dataclass(frozen=True)
class Metric:
    """The values of one metric on P problems."""

    values: NDArray[np.float64]
    """(P,) fractions, in the order of the problems' ids."""
    interval: pass_at_k.Interval
    """95% confidence interval of the mean."""
    is_one_sample: bool
    """Whether each value is the result of one sample, 0 or 1."""

    @property
    def mean(self) -> float:
        return float(self.values.mean())


class PassCount(NamedTuple):
    """The samples of one problem."""

    samples: int
    passed: int
    """How many of them pass."""

    @property
    def rate(self) -> float:
        return self.passed / self.samples


def without_failed(sides: Sequence[Sequence[Result]], ks: Sequence[int]) -> list[list[Result]]:
    """Return the results of one model, or of two, without the samples whose agent failed.

    If a problem then has too few samples for the largest k, it is left out, of both models, because comparisons are
    paired. Its greedy sample and the others are apart in this, too.
    """
    played_by_side = []
    left_out = set()  # problems, apart for each kind of samples
    for results in sides:
        played = [result for result in results if not has_failed(result)]
        played_by_side.append(played)
        num_played = Counter(_problem_and_kind(result) for result in played)
        for result in results:
            if not has_failed(result):
                continue
            needed = 1 if is_greedy(result) else max(ks, default=1)
            if num_played[_problem_and_kind(result)] < needed:
                left_out.add(_problem_and_kind(result))

    remaining_by_side = []
    for played in played_by_side:
        remaining_by_side.append([result for result in played if _problem_and_kind(result) not in left_out])
    return remaining_by_side


def _problem_and_kind(result: Result) -> tuple[str, bool]:
    """Return the id of a sample's problem, and whether the sample is greedy."""
    return str(result["task_id"]), is_greedy(result)


def measure(
    label: str, results: Sequence[Result], source: Mapping[str, Any], ks: Sequence[int], seed: int, failed: int = 0
) -> Measurement:
    """Return the metrics of one model's graded samples.

    Args:
        ks: the k of the scores. The curve has more.
        seed: of the bootstrap intervals.
        failed: number of samples that are left out because their agent failed.
    """
    metric_by_name = metrics(results, ks, seed)
    results_by_kind: dict[str, list[Result]] = {}
    for result in results:
        kind = GREEDY if is_greedy(result) else _SAMPLED
        results_by_kind.setdefault(kind, []).append(result)
    return Measurement(
        label=label,
        scores={name: metric.mean for name, metric in metric_by_name.items()},
        intervals={name: list(metric.interval) for name, metric in metric_by_name.items()},
        curve=_curve(results, ks, seed),
        tasks=_num_problems(results),
        samples=len(results),
        failed=failed,
        sample_stats={kind: _statistics(results_by_kind[kind]) for kind in sorted(results_by_kind, reverse=True)},
        usual_answer=_usual_answer(results),
        source=dict(source),
    )


def metrics(results: Sequence[Result], ks: Iterable[int], seed: int) -> dict[str, Metric]:
    """Return `pass@k` for each k, `greedy` if there are such samples, and `mean score` if the task gives scores.

    The mean score is that of the greedy samples only if there are no others.
    """
    sampled = pass_counts(results, greedy=False)
    greedy = pass_counts(results, greedy=True)
    metric_by_name = {}
    if sampled:
        for k in ks:
            metric_by_name[f"pass@{k}"] = _pass_rate(sampled, k, seed)
    if greedy:
        metric_by_name["greedy"] = _pass_rate(greedy, 1, seed)
    if any("score" in result for result in results):
        sampled_results = [result for result in results if not is_greedy(result)]
        metric_by_name["mean score"] = _mean_score(sampled_results or results, seed)
    return metric_by_name


def pass_counts(results: Iterable[Result], *, greedy: bool) -> dict[str, PassCount]:
    """Count the samples of each problem by its id, in sorted order: either the greedy samples or all others."""
    samples: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for result in results:
        if is_greedy(result) is greedy:
            problem = str(result["task_id"])
            samples[problem] += 1
            passed[problem] += result["passed"]
    return {problem: PassCount(samples[problem], passed[problem]) for problem in sorted(samples)}


def main_pass_counts(results: Sequence[Result]) -> dict[str, PassCount]:
    """Return the counts of the samples that are not greedy or, if there are none, of the greedy ones."""
    return pass_counts(results, greedy=False) or pass_counts(results, greedy=True)


def _pass_rate(counts: Mapping[str, PassCount], k: int, seed: int) -> Metric:
    values, interval = pass_at_k.estimate_pass_at_k(list(counts.values()), k, seed)
    is_one_sample = all(count.samples == 1 for count in counts.values())
    return Metric(values, interval, is_one_sample)


def _mean_score(results: Sequence[Result], seed: int) -> Metric:
    """Return the mean scores of problems. A sample without a score has 1 if it passes, else 0."""
    scores_by_problem: dict[str, list[float]] = {}
    for result in results:
        score = result.get("score", float(result["passed"]))
        scores_by_problem.setdefault(str(result["task_id"]), []).append(score)
    values = np.array([statistics.fmean(scores_by_problem[problem]) for problem in sorted(scores_by_problem)])
    return Metric(values, pass_at_k.bootstrap_interval(values, seed=seed), is_one_sample=False)


def _curve(results: Sequence[Result], ks: Iterable[int], seed: int) -> list[CurvePoint]:
    """Return pass@k for the requested k and for others; empty if all samples are greedy."""
    counts = pass_counts(results, greedy=False)
    if not counts:
        return []
    fewest_samples = min(count.samples for count in counts.values())
    curve_ks = {k for k in (*_CURVE_KS, fewest_samples) if k <= fewest_samples}
    points = []
    for k in sorted(curve_ks | set(ks)):
        metric = _pass_rate(counts, k, seed)
        points.append(CurvePoint(k=k, value=metric.mean, interval=list(metric.interval)))
    return points


def _usual_answer(results: Sequence[Result]) -> str | None:
    """Return the answer that nearly all samples have in common, if there is one and there are enough problems."""
    answers = Counter(str(result.get("extracted") or "") for result in results)
    [(answer, count)] = answers.most_common(1)
    is_usual = count >= _USUAL_SHARE * len(results) and _num_problems(results) >= _USUAL_PROBLEMS
    return answer if answer and is_usual else None


def _num_problems(results: Iterable[Result]) -> int:
    return len({result["task_id"] for result in results})


def _statistics(results: Sequence[Result]) -> dict[str, float]:
    """Return counts of samples, and means over samples, by name.

    - `samples` counts all of them, `unparsed` those without a readable answer, `truncated` those at the length limit.
    - `strict rule`, `flexible rule` and so on count the samples that pass a rule.
    - `passed, from a marker` counts those that pass with an answer from there, if the task reads several places.
    - A status, such as `wrong_answer`, counts those that have it.
    - `ended by reply` and so on count conversations by how they ended.
    - `mean tokens` and, for conversations, `mean turns`, `mean tool calls` and `mean failed calls` are means.
    """
    # How the answers were graded.
    counts: dict[str, float] = {}
    for rule in RULES:
        if any(rule in result for result in results):
            counts[f"{rule} rule"] = sum(result.get(rule) is True for result in results)
    passed_by_source: Counter[str] = Counter()
    for result in results:
        if result["passed"] and "read_from" in result:
            passed_by_source[str(result["read_from"])] += 1
    for source, count in sorted(passed_by_source.items()):
        counts[f"passed, from a {source}"] = count
    num_by_status = Counter(str(result["status"]) for result in results)
    for status, count in sorted(num_by_status.items()):
        counts[status] = count
    counts["unparsed"] = sum(result["status"] in UNPARSED for result in results)
    counts["samples"] = len(results)

    # Lengths. Samples from other tools may use these keys with another meaning.
    lengths = []
    for result in results:
        num_tokens = result.get("num_tokens")
        if isinstance(num_tokens, int) and 0 <= num_tokens < 2**32:
            lengths.append(num_tokens)
    if lengths:
        counts["truncated"] = sum(bool(result.get("truncated")) for result in results)
        counts["mean tokens"] = sum(lengths) / len(lengths)

    # Conversations.
    if all("messages" in result for result in results):
        for name in ("turns", "tool_calls", "failed_calls"):
            if all(name in result for result in results):  # the tools of an agent are its own
                counts[f"mean {name.replace('_', ' ')}"] = statistics.fmean(result[name] for result in results)
        ends = Counter(str(result["ended_by"]) for result in results)
        for end, count in sorted(ends.items()):
            counts[f"ended by {end}"] = count
    return counts
