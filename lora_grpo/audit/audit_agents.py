"""Attacks the agent of a task: it plays episodes with stand-ins for the model, and what they win is reported.

The agent runs as in a run: its own processes, the endpoint, and the rows of the task. Only the sampler is another one.
"""

from __future__ import annotations

import concurrent.futures
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.agents import AgentPool, Job, Played
from lora_grpo.audit.attacks import REPEATED_CALLS
from lora_grpo.audit.findings import Findings, Limits, shorten, spread
from lora_grpo.audit.policies import SIDE_BY_SIDE
from lora_grpo.audit.stand_ins import EMPTY_STAND_IN, ENDLESS, RANDOM_STAND_IN, TEMPLATE, Asked, StandIn, stand_ins
from lora_grpo.config import ModelConfig, SamplingConfig
from lora_grpo.endpoint import EpisodeLimits, Policy
from lora_grpo.grading import Row
from lora_grpo.models import base_model
from lora_grpo.rollouts import agent_text
from lora_grpo.sampling import RequestQueue, SampledTokens, Waiting, end_early
from lora_grpo.tasks import AgentDefinition, loaded_columns

_SECONDS_TO_START = 600.0
"""Time limit of the first episode, before which the agent may install packages."""
_MAX_CALLS = 16
"""After so many requests of an episode, a stand-in writes without end, so that its tokens run out."""
_TURN_TOKENS = 2048
_TOKENS = 8 * _TURN_TOKENS
"""Maximum number of tokens of an episode's first prompt, and of all that follows it. The tokenizer of the bundled model
has many short tokens, so this is more than the limits of a run."""
_MIN_ROWS = 8
"""Attacked rows, also in the audit before a run: on fewer, a stand-in may pass on more than half by luck."""
_REPEATED_ROWS = 2
"""Number of rows that are played alone, twice, and then together with all others."""


@dataclass(frozen=True)
class _Attacked:
    """A row and its episode with a stand-in."""

    row: Row
    played: Played

    @property
    def conversation(self) -> tuple[Any, ...]:
        """What has to be the same when the episode is played again."""
        calls = [(call.context_ids, call.token_ids) for call in self.played.calls]
        return (calls, self.played.verdict.value, self.played.failure)


class _Stage:
    """Lets an agent play with stand-ins.

    Args:
        sampling: the settings of the run, which the requests of the agent have to agree with.
        log: the file for the standard error of the agent.
    """

    def __init__(self, definition: AgentDefinition, sampling: SamplingConfig, log: Path) -> None:
        from trl import chat_template_utils

        self._tokenizer = base_model.load_tokenizer(ModelConfig())
        self._tokenizer.chat_template = getattr(chat_template_utils, f"{TEMPLATE}_chat_template")
        self._limits = EpisodeLimits(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            prompt_tokens=_TOKENS,
            budget=_TOKENS,
            turn_tokens=_TURN_TOKENS,
        )
        self.pool = AgentPool(definition, log)
        self.tools_are_offered = False
        """Whether a request had tools."""

    def play(self, stand_in: StandIn, rows: Sequence[Row], deadline: float) -> list[_Attacked] | None:
        """Play an episode of each row, side by side. Return None if they are not over at the deadline.

        Args:
            deadline: a value of `time.monotonic`.
        """
        if time.monotonic() >= deadline:
            return None
        queue = RequestQueue()
        policy = Policy(self._tokenizer, [self._tokenizer.eos_token_id], self._encode, queue)
        jobs = [Job(loaded_columns(row), seed=0) for row in rows]
        playing = self.pool.start(jobs, policy, self._limits)
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), playing.cancel)
        timer.start()
        num_calls: Counter[int] = Counter()
        try:
            while (arrived := queue.take_arrived(wait=True)) is not None:
                for waiting in arrived:
                    episode = waiting.request.episode
                    assert episode is not None
                    self._answer(stand_in, waiting, jobs[episode].row, num_calls[episode])
                    num_calls[episode] += 1
            results = playing.result()
        except concurrent.futures.CancelledError:
            return None
        except BaseException as error:
            queue.fail(error)
            playing.cancel()
            raise
        finally:
            timer.cancel()
        return [_Attacked(row, played) for row, played in zip(rows, results, strict=True)]

    def _answer(self, stand_in: StandIn, waiting: Waiting, row: Row, call_number: int) -> None:
        """Answer a request with the text of a stand-in, in tokens."""
        request = waiting.request
        text = ENDLESS
        if call_number < _MAX_CALLS:
            prompt = self._tokenizer.decode(request.prompt_ids)
            asked = Asked(prompt, row, request.episode or 0, call_number, request.seed)
            self.tools_are_offered = self.tools_are_offered or bool(asked.tools)
            text = stand_in.text(asked)

        # A text may contain the token that ends turns, as an echo may. A model ends there.
        eos_token_id = self._tokenizer.eos_token_id
        [token_ids] = self._encode([text])
        if eos_token_id in token_ids:
            token_ids = token_ids[: token_ids.index(eos_token_id)]
        token_ids = [*token_ids, eos_token_id][: request.max_tokens]
        sample = SampledTokens(
            token_ids=token_ids,
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            truncated=token_ids[-1] != eos_token_id,
            logprobs=[0.0] * len(token_ids),
        )
        waiting.finish(end_early(self._tokenizer, sample, request.params))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return encoded


def audit_agent(
    definition: AgentDefinition, rows: Sequence[Row], limits: Limits, sampling: SamplingConfig, ignored: Sequence[str]
) -> Findings:
    """Attack an agent.

    Args:
        ignored: the attacks that its file skips.

    Raises:
        UserError: the agent cannot be started.
    """
    findings = Findings(grader="AGENT" if definition.command else "agent")
    number_of_rows = len(rows)
    rows = spread(rows, max(limits.attacked_rows, _MIN_ROWS))
    columns_of_rows = [loaded_columns(row) for row in rows]
    models = [model for model in stand_ins(columns_of_rows) if model.name not in ignored]
    with tempfile.TemporaryDirectory(prefix="lora-grpo-audit-") as folder:
        stage = _Stage(definition, sampling, Path(folder) / "agent.log")
        try:
            # The first episode starts the agent, which may take long and is not part of the limit.
            if stage.play(EMPTY_STAND_IN, rows[:1], time.monotonic() + _SECONDS_TO_START) is None:
                findings.notes.append(f"the first episode took more than {_SECONDS_TO_START:g} s; nothing was tried")
                return findings

            deadline = time.monotonic() + limits.seconds
            played_by_model: dict[StandIn, list[_Attacked]] = {}
            names_without_time = []
            for model in models:
                if model.needs_tools and not stage.tools_are_offered:
                    continue
                played = stage.play(model, rows, deadline)
                if played is None:
                    names_without_time.append(model.name)
                else:
                    played_by_model[model] = played
            _report(findings, played_by_model)
            names = [model.name for model in played_by_model]

            comparisons = [name for name in (REPEATED_CALLS, SIDE_BY_SIDE) if name not in ignored]
            if comparisons and _compare(findings, stage, rows, deadline, comparisons):
                names += comparisons
            else:
                names_without_time += comparisons
        finally:
            stage.pool.close()

    if names_without_time:
        findings.notes.append(f"there was no time for {', '.join(dict.fromkeys(names_without_time))}")
    findings.size = f"{len(set(names))} attacks on {len(rows)} of {number_of_rows} rows"
    return findings


def _report(findings: Findings, played_by_model: dict[StandIn, list[_Attacked]]) -> None:
    """Add a finding for each stand-in with which the agent fails, or that passes on more than half of the rows."""
    reported_places = set()
    scores: dict[str, float] = {}
    for model, played in played_by_model.items():
        failed = [attacked for attacked in played if attacked.played.failure]
        passed = [attacked for attacked in played if attacked.played.verdict.passed]
        failure = ""
        if failed:
            failure = " ".join(failed[0].played.failure.split())
        place = failure.partition(": ")[0]  # the line of an exception, which is reported once

        examples: list[_Attacked] = []
        problem = ""
        if failed and place not in reported_places:
            reported_places.add(place)
            examples = failed
            problem = f"the agent fails when the model {model.doing}: {failure}"
        elif 2 * len(passed) > len(played):
            examples = passed
            problem = f"passes when the model {model.doing}: {shorten(agent_text(passed[0].played))}"
        if examples:
            rows = f"on {len(examples)} of {len(played)} rows, such as {examples[0].row['id']}"
            findings.problems.setdefault(model.name, f"{model.name}: {rows}: {problem}")

        # A score that does not pass is worth a note, because a model is rewarded for it.
        for attacked in played:
            verdict = attacked.played.verdict
            if not verdict.passed:
                scores[model.name] = max(verdict.value, scores.get(model.name, 0.0))
    rewarded = [f"{name} (up to {score:g})" for name, score in scores.items() if score > 0]
    if rewarded:
        findings.notes.append(f"a model is rewarded for {', '.join(rewarded)}")


def _compare(
    findings: Findings, stage: _Stage, rows: Sequence[Row], deadline: float, comparisons: Sequence[str]
) -> bool:
    """Add a finding if an episode goes another way when it is played again, or side by side with others.

    Args:
        comparisons: REPEATED_CALLS, SIDE_BY_SIDE or both.

    Returns:
        Whether there was time for it.
    """
    repeated_rows = rows[:_REPEATED_ROWS]
    alone: list[_Attacked] = []
    for row in repeated_rows:
        first = stage.play(RANDOM_STAND_IN, [row], deadline)
        second = stage.play(RANDOM_STAND_IN, [row], deadline)
        if first is None or second is None:
            return False
        if first[0].conversation == second[0].conversation:
            alone += first
            continue
        if REPEATED_CALLS in comparisons:
            findings.problems[REPEATED_CALLS] = (
                f"{REPEATED_CALLS}: other requests or another score in a second episode of row {row['id']} with the "
                f"same answers: {shorten(agent_text(second[0].played))}; {findings.grader} must not depend on chance "
                "or on earlier episodes"
            )
        return True  # what differs alone says nothing about others
    if SIDE_BY_SIDE not in comparisons:
        return True

    together = stage.play(RANDOM_STAND_IN, [*repeated_rows, *reversed(rows)], deadline)
    if together is None:
        return False
    for attacked_alone, attacked in zip(alone, together, strict=False):  # the other rows are only neighbors
        if attacked.conversation != attacked_alone.conversation:
            findings.problems[SIDE_BY_SIDE] = (
                f"{SIDE_BY_SIDE}: other requests or another score than alone, such as for row {attacked.row['id']}: "
                f"{shorten(agent_text(attacked.played))}; the episodes of {findings.grader} must not share files or "
                "other state"
            )
            break
    return True
