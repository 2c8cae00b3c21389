"""The attacks on an `Environment`: policies that must not pass.

A policy plays at the level of messages, without a model: it gets the conversation and returns the model's next message.
Most can pass by luck, such as a number copied from the question in a game of numbers, so they are findings only if they
pass on more than half of the rows.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lora_grpo.audit.attacks import (
    ALL_ANSWERS,
    EMPTY_TEXT,
    GOLD,
    LEAKED_ANSWER,
    LONG_TEXT,
    OTHER_ANSWERS,
    REPEATED_CALLS,
    TOKEN,
    Attack,
    Message,
    Subject,
)
from lora_grpo.audit.calls import Outcome
from lora_grpo.grading import Row
from lora_grpo.rollouts import transcript
from lora_grpo.tasks import EnvironmentClass, Session

MIN_ROWS = 16
"""Attacked rows, also in the audit before a run: on fewer, a policy may pass on more than half by luck."""
BEFORE_THE_END = "reward before the end"
ECHO = "echo"
COPIED_WORDS = "copied words"
CLAIM_OF_SUCCESS = "claim of success"
EMPTY_TOOL_CALLS = "empty tool calls"
TOOL_RESULT = "tool result"
RANDOM_WORDS = "random words"
SIDE_BY_SIDE = "side by side"
NAMES = (
    BEFORE_THE_END,
    EMPTY_TEXT,
    ECHO,
    COPIED_WORDS,
    CLAIM_OF_SUCCESS,
    EMPTY_TOOL_CALLS,
    TOOL_RESULT,
    RANDOM_WORDS,
    OTHER_ANSWERS,
    ALL_ANSWERS,
    LONG_TEXT,
    LEAKED_ANSWER,
    REPEATED_CALLS,
    SIDE_BY_SIDE,
)
"""The allowed values of `AUDIT_IGNORE`."""
_CLAIM = "The task is done. My answer is correct: success, solved, passed, final answer, True, yes, reward 1.0, score 1"
RANDOM_WORD_LIST = (
    *"abcd",
    *map(str, range(11)),
    "yes",
    "no",
    "true",
    "left",
    "right",
    "up",
    "north",
    "south",
    "east",
    "west",
)

Text = Callable[["Game"], str]
"""A function that returns what the model says next."""
Policy = Callable[["Game"], Message | str] | Sequence[Message]
"""A function that returns the model's next message, or only its text; or a list of all messages of the model."""


class Game:
    """A conversation of a policy with the environment. It has an outcome when it is over."""

    def __init__(self, environment: EnvironmentClass, row: Row, policy: Policy) -> None:
        self.row = row
        self.tools = _tools_of(environment, row)
        self.policy = policy
        self.session = Session(environment, row["loaded_row"], row["tools"] or ())
        self.messages: list[Message] = []
        self.turn = 0
        self.outcome: Outcome | None = None

    def step(self, begin: Callable[[str], None]) -> None:
        """Play a turn. `begin` gets what the policy says; see `Call.make`."""
        answers: list[Message] = []
        message = self._next_message()
        if message is None:
            begin("")
        else:
            begin(_shown([message]))
            answers = self.session.answer(message)
            self.messages += [message, *answers]
        self.turn += 1
        if answers and self.turn < self.session.max_turns:
            return

        # The conversation is over: the environment has no answer, or the turns are used up.
        ended_by = "limit" if answers else "reply"
        verdict = self.session.verdict(ended_by)
        fingerprint = hash(json.dumps([self.session.opening, self.messages, verdict.value]))
        text = f"{_shown(self.messages)}\n[reward {verdict.value:g}]"
        self.outcome = Outcome(verdict.passed, verdict.value, fingerprint=fingerprint, text=text)

    @property
    def result(self) -> Outcome:
        """The outcome of a conversation that is over."""
        assert self.outcome is not None
        return self.outcome

    def _next_message(self) -> Message | None:
        """Return the policy's next message, None if it has no more."""
        if not callable(self.policy):
            if self.turn < len(self.policy):
                return self.policy[self.turn]
            return None
        message = self.policy(self)
        if isinstance(message, str):
            return {"role": "assistant", "content": message}
        return message


def _shown(messages: Sequence[Message]) -> str:
    return transcript([{**message, "content": message["content"][:200]} for message in messages])


def _play_all(
    environment: EnvironmentClass, players: Iterable[tuple[Row, Policy]], begin: Callable[[str], None]
) -> list[Game]:
    """Play conversations side by side, turn by turn, each of a policy on a row. All are over when they are returned."""
    games = []
    for row, policy in players:
        begin("")
        games.append(Game(environment, row, policy))
    playing = games
    while playing:
        for game in playing:
            game.step(begin)
        playing = [game for game in playing if not game.outcome]
    return games


def play(environment: EnvironmentClass, row: Row, policy: Policy, begin: Callable[[str], None]) -> Outcome:
    """Return the result of a conversation."""
    [game] = _play_all(environment, [(row, policy)], begin)
    return game.result


def play_reference(
    environment: EnvironmentClass, row: Row, messages: Sequence[Message], begin: Callable[[str], None]
) -> Outcome:
    """Return the result of a reference conversation. A call that fails is an error, as is a message after the end."""
    [game] = _play_all(environment, [(row, messages)], begin)
    outcome = game.result
    if outcome.passed and game.session.failed_calls:
        return outcome._replace(passed=False, error="a tool call fails")
    if outcome.passed and game.turn < len(messages):
        return outcome._replace(passed=False, error=f"the environment ends it after {game.turn} of its messages")
    return outcome


def compare(
    environment: EnvironmentClass, subject: Subject, neighbor: Subject, begin: Callable[[str], None]
) -> Outcome:
    """Play four conversations side by side, three of them on one row, and compare each with the same one alone."""
    says_random_words = _calling(argument=_random_word, text=_random_word)
    policy = subject.turns or says_random_words
    players: list[tuple[Row, Policy]] = [
        (subject.row, policy),
        (subject.row, policy),
        (subject.row, _nothing),
        (neighbor.row, neighbor.turns or says_random_words),
    ]
    results_alone = [play(environment, row, policy, begin) for row, policy in players]
    games = _play_all(environment, players, begin)
    for game, result_alone in zip(games, results_alone, strict=True):
        if game.result.fingerprint != result_alone.fingerprint:
            return Outcome(False, error="other messages or another reward than alone", text=game.result.text)
    return Outcome(True)


def attacks(
    environment: EnvironmentClass, rows: Sequence[Row], golds: Sequence[Sequence[Message] | None]
) -> Iterator[Attack]:
    """Yield the attacks. Each has at most one policy for a row, so that the rows on which it passes can be counted.

    Args:
        golds: the messages of the model in the reference conversations of the rows.
    """
    distinct_golds = list({json.dumps(gold): gold for gold in golds if gold}.values())

    def others(subject: Subject) -> list[Sequence[Message]]:
        """Return references of other rows. Those with the same last message, which may be as correct, are last."""

        def ends_alike(gold: Sequence[Message]) -> bool:
            return bool(subject.turns) and gold[-1] == subject.turns[-1]

        golds_of_others = [gold for gold in distinct_golds if gold != subject.turns]
        return sorted(golds_of_others, key=ends_alike)[:20]

    def one_other(number: int, subject: Subject) -> list[Sequence[Message]]:
        return others(subject)[number : number + 1]

    def all_answers(subject: Subject) -> list[Sequence[Message]]:
        """Return the reference conversation with the texts of all rows in the place of each of its texts."""
        mixed = _mix(subject.turns, others(subject))
        return [mixed] if mixed != subject.turns else []

    def all_calls(subject: Subject) -> list[Sequence[Message]]:
        """Return a turn with the calls of the reference in the middle of those of other rows."""
        conversations = [*others(subject)[::2], subject.turns, *others(subject)[1::2]]
        messages = [message for conversation in conversations for message in conversation]
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        if not calls:
            return []
        return [[{"role": "assistant", "content": "", "tool_calls": calls}]]

    def plays(name: str, policy: Policy, by_luck: bool = True) -> Attack:
        """Return the attack that plays the same policy on every row."""
        return Attack(name, False, lambda subject: [policy], may_pass_by_luck=by_luck)

    # What a policy says, or passes to a tool, by the name of the attack.
    texts: list[tuple[str, Text]] = [
        (ECHO, lambda game: str(game.row["prompt"][-1]["content"])),
        *((COPIED_WORDS, copied) for copied in _COPIED),
        (CLAIM_OF_SUCCESS, lambda game: _CLAIM),
        (CLAIM_OF_SUCCESS, lambda game: "done"),
        (RANDOM_WORDS, _random_word),
    ]

    # Without a message. This is first, because an environment may keep the reward of an earlier conversation.
    yield plays(BEFORE_THE_END, [], by_luck=False)
    yield Attack(GOLD, True)

    # Messages without a tool call.
    yield plays(EMPTY_TEXT, _nothing, by_luck=False)
    yield plays(EMPTY_TEXT, lambda game: " \n", by_luck=False)
    yield plays(ECHO, _newest)
    for name, text in texts:
        yield plays(name, text)
    for number in range(3):
        yield Attack(OTHER_ANSWERS, False, partial(one_other, number), may_pass_by_luck=True)
    yield Attack(ALL_ANSWERS, False, all_answers, may_pass_by_luck=True)
    yield Attack(ALL_ANSWERS, False, all_calls, may_pass_by_luck=True)
    yield plays(RANDOM_WORDS, lambda game: RANDOM_WORD_LIST[game.turn % len(RANDOM_WORD_LIST)])

    # A call of every tool, then of each tool with every text.
    number_of_tools = max((len(_tools_of(environment, row)) for row in rows), default=0)
    if number_of_tools:
        yield plays(EMPTY_TOOL_CALLS, _calling())
    for position in range(number_of_tools):
        tool = slice(position, position + 1)
        yield plays(EMPTY_TOOL_CALLS, _calling(tool))
        for name, text in texts:
            yield plays(name, _calling(tool, argument=text))
        for text in (_newest, *_COPIED):
            yield plays(TOOL_RESULT, _calling(tool, text=text))
    yield Attack(SIDE_BY_SIDE, True)
    yield plays(LONG_TEXT, _long_text, by_luck=False)


def _tools_of(environment: EnvironmentClass, row: Row) -> Sequence[Mapping[str, Any]]:
    """Return the schemas of the tools that run in a conversation of a row."""
    return row["tools"] if environment.has("call_tool") else environment.schemas


def _nothing(game: Game) -> str:
    return ""


def _newest(game: Game) -> str:
    """Return the environment's last message, or the question."""
    return str((game.messages or game.row["prompt"])[-1]["content"])


def _random_word(game: Game) -> str:
    return random.Random(f"{game.row['id']} {game.turn}").choice(RANDOM_WORD_LIST)


def _long_text(game: Game) -> str:
    """Return a long text in the first turn, and nothing after it."""
    return "" if game.turn else "a " * 500_000


def _copied_word(index: int, prefers_numbers: bool, game: Game) -> str:
    """Return the word or number at an index of the environment's last message; "" if there is none.

    With `prefers_numbers`, only numbers count, if there are any.
    """
    tokens = [token.rstrip(",") for token in TOKEN.findall(_newest(game))]
    numbers = [token for token in tokens if token[-1].isdigit()]
    if prefers_numbers and numbers:
        tokens = numbers
    return tokens[index] if tokens else ""


_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00",
    "time": "00:00:00",
    "duration": "PT0S",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
"""A valid text for each format of JSON schemas that not every text has."""

_COPIED: tuple[Text, ...] = (
    partial(_copied_word, 0, True),
    partial(_copied_word, -1, True),
    partial(_copied_word, -1, False),
)
"""The first and the last number of the environment's last message, and its last word or number."""


def _calling(part: slice = slice(None), argument: Text = _nothing, text: Text = _nothing) -> Policy:
    """Return a policy that first calls tools with a text, or the number in it, for each required argument.

    In later turns, and if there are no such tools, it says `text`.

    Args:
        part: which of the tools it calls.
    """

    def policy(game: Game) -> Message | str:
        tools = game.tools[part]
        if game.turn > 0 or not tools:
            return text(game)
        return _call(tools, argument(game))

    return policy


def _call(tools: Sequence[Mapping[str, Any]], text: str) -> Message:
    calls = []
    for function in (tool["function"] for tool in tools):
        arguments = _value({"type": "object", **function.get("parameters", {})}, text)
        calls.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _value(schema: Mapping[str, Any], text: str) -> Any:
    """Return a value of a JSON schema: a text, the number in it, or an object with what it requires."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _value(schema["anyOf"][0], text)
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    kind = schema.get("type", "string")
    if not isinstance(kind, str):  # several types
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: _value(properties.get(name, {}), text) for name in schema.get("required", ())}
    if kind == "array":
        return [_value(part, text) for part in schema.get("prefixItems", ())]
    if kind == "string":
        return text
    if kind == "boolean":
        return False
    if kind not in ("integer", "number"):
        return None
    number = int(text[:9]) if text[:9].isdecimal() else 0
    return number if kind == "integer" else float(number)


def _mix(value: Any, others: Sequence[Any]) -> Any:
    """Return a value in which each text is between the texts that the other values have at its position."""
    others = [other for other in others if isinstance(other, type(value))]
    if isinstance(value, dict):
        mixed = {}
        for key, part in value.items():
            mixed[key] = _mix(part, [other.get(key) for other in others])
        return mixed
    if isinstance(value, list):
        mixed_parts = []
        for index, part in enumerate(value):
            mixed_parts.append(_mix(part, [other[index] for other in others if index < len(other)]))
        return mixed_parts
    if not isinstance(value, str) or not value:
        return value
    texts = [text for text in dict.fromkeys(others) if text not in ("", value)]
    half = (len(texts) + 1) // 2
    return " ".join([*texts[:half], value, *texts[half:]])
