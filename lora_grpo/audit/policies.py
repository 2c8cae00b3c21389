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

from lora_grpo.audit.attacks import ALL, EMPTY, GOLD, LEAK, LONG, OTHERS, REPEAT, TOKEN, Attack, Message, Subject
from lora_grpo.audit.calls import Outcome
from lora_grpo.grading import Row
from lora_grpo.rollouts import transcript
from lora_grpo.tasks import EnvironmentClass, Session

MIN_ROWS = 16
"""Attacked rows, also in the audit before a run: on fewer, a policy may pass on more than half by luck."""
BEFORE = "reward before the end"
ECHO = "echo"
COPIED = "copied words"
CLAIM = "claim of success"
TOOLS = "empty tool calls"
RESULT = "tool result"
RANDOM = "random words"
SIDE = "side by side"
NAMES = (BEFORE, EMPTY, ECHO, COPIED, CLAIM, TOOLS, RESULT, RANDOM, OTHERS, ALL, LONG, LEAK, REPEAT, SIDE)
"""The allowed values of `AUDIT_IGNORE`."""
_CLAIM = "The task is done. My answer is correct: success, solved, passed, final answer, True, yes, reward 1.0, score 1"
_WORDS = (*"abcd", *map(str, range(11)), "yes", "no", "true", "left", "right", "up", "north", "south", "east", "west")

Text = Callable[["Game"], str]
Policy = Callable[["Game"], Message | str] | Sequence[Message]
"""A function that returns the model's next message, or only its text; or a list of all messages of the model."""


class Game:
    """A conversation of a policy with the environment. It has an outcome when it is over."""

    def __init__(self, environment: EnvironmentClass, row: Row, policy: Policy) -> None:
        self.row = row
        self.policy = policy
        self.session = Session(environment, row["loaded_row"])
        self.messages: list[Message] = []
        self.turn = 0
        self.outcome: Outcome | None = None

    def step(self, begin: Callable[[str], None]) -> None:
        """Play a turn. `begin` gets what the policy says."""
        message = self._next_message()
        messages = [] if message is None else [message]
        begin(_shown(messages))
        answers = [] if message is None else self.session.answer(message)
        self.messages += [*messages, *answers]
        self.turn += 1
        if answers and self.turn < self.session.max_turns:
            return
        verdict = self.session.verdict("limit" if answers else "reply")
        seen = hash(json.dumps([self.session.opening, self.messages, verdict.value]))
        text = f"{_shown(self.messages)}\n[reward {verdict.value:g}]"
        self.outcome = Outcome(verdict.passed, verdict.value, seen=seen, text=text)

    def _next_message(self) -> Message | None:
        """Return what the policy says, None if it says nothing more."""
        if callable(self.policy):
            said = self.policy(self)
        elif self.turn < len(self.policy):
            said = self.policy[self.turn]
        else:
            return None
        return {"role": "assistant", "content": said} if isinstance(said, str) else said


def _shown(messages: Sequence[Message]) -> str:
    return transcript([{**message, "content": message["content"][:200]} for message in messages])


def _play(
    environment: EnvironmentClass, parts: Iterable[tuple[Row, Policy]], begin: Callable[[str], None]
) -> list[tuple[Game, Outcome]]:
    """Play conversations side by side, turn by turn."""
    games = []
    for row, policy in parts:
        begin("")
        games.append(Game(environment, row, policy))
    playing = games
    while playing:
        for game in playing:
            game.step(begin)
        playing = [game for game in playing if not game.outcome]
    return [(game, game.outcome) for game in games if game.outcome]


def play(environment: EnvironmentClass, row: Row, policy: Policy, begin: Callable[[str], None]) -> Outcome:
    """Return the result of a conversation."""
    [(_, outcome)] = _play(environment, [(row, policy)], begin)
    return outcome


def play_reference(
    environment: EnvironmentClass, row: Row, messages: Sequence[Message], begin: Callable[[str], None]
) -> Outcome:
    """Return the result of a reference conversation. A call that fails is an error, as is a message after the end."""
    [(game, outcome)] = _play(environment, [(row, messages)], begin)
    if outcome.passed and game.session.failed_calls:
        return outcome._replace(passed=False, error="a tool call fails")
    if outcome.passed and game.turn < len(messages):
        return outcome._replace(passed=False, error=f"the environment ends it after {game.turn} of its messages")
    return outcome


def compare(
    environment: EnvironmentClass, subject: Subject, neighbor: Subject, begin: Callable[[str], None]
) -> Outcome:
    """Play four conversations side by side, three of them on one row, and compare each with the same one alone."""
    words: Policy = _random_word
    if environment.schemas:
        words = _calling(environment.schemas, _random_word, _random_word)
    policy = subject.turns or words
    parts: list[tuple[Row, Policy]] = [
        (subject.row, policy),
        (subject.row, policy),
        (subject.row, _nothing),
        (neighbor.row, neighbor.turns or words),
    ]
    alone = [play(environment, *part, begin) for part in parts]
    beside = [outcome for _, outcome in _play(environment, parts, begin)]
    changed = [outcome for outcome, expected in zip(beside, alone, strict=True) if outcome.seen != expected.seen]
    if not changed:
        return Outcome(True)
    return Outcome(False, error="other messages or another reward than alone", text=changed[0].text)


def attacks(environment: EnvironmentClass, golds: Sequence[Sequence[Message] | None]) -> Iterator[Attack]:
    """Yield the attacks. Each has at most one policy for a row, so that the rows on which it passes can be counted.

    Args:
        golds: the messages of the model in the reference conversations of all rows.
    """
    different = list({json.dumps(gold): gold for gold in golds if gold}.values())
    tools = environment.schemas
    texts: list[tuple[str, Text]] = [
        (ECHO, lambda game: str(game.row["prompt"][-1]["content"])),
        *((COPIED, pick) for pick in _PICKS),
        (CLAIM, lambda game: _CLAIM),
        (CLAIM, lambda game: "done"),
        (RANDOM, _random_word),
    ]

    def others(subject: Subject) -> list[Sequence[Message]]:
        """Return references of other rows. Those with the same last message, which may be as correct, are last."""
        golds_of_others = [gold for gold in different if gold != subject.turns]
        return sorted(golds_of_others, key=lambda gold: bool(subject.turns) and gold[-1] == subject.turns[-1])[:20]

    def other(number: int, subject: Subject) -> list[Sequence[Message]]:
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
        return [[{"role": "assistant", "content": "", "tool_calls": calls}]] if calls else []

    def plays(name: str, policy: Policy, luck: bool = True) -> Attack:
        return Attack(name, False, lambda subject: [policy], luck)

    yield plays(BEFORE, [], luck=False)  # first: a reference may leave a reward behind
    yield Attack(GOLD, True)
    yield plays(EMPTY, _nothing, luck=False)
    yield plays(EMPTY, lambda game: " \n", luck=False)
    for name, text in ((ECHO, _newest), *texts):
        yield plays(name, text)
    for number in range(3):
        yield Attack(OTHERS, False, partial(other, number), luck=True)
    yield Attack(ALL, False, all_answers, luck=True)
    yield Attack(ALL, False, all_calls, luck=True)
    yield plays(RANDOM, lambda game: _WORDS[game.turn % len(_WORDS)])
    if tools:
        yield plays(TOOLS, _calling(tools))
    for tool in tools:
        for name, text in ((TOOLS, _nothing), *texts):
            yield plays(name, _calling([tool], argument=text))
        for text in (_newest, *_PICKS):
            yield plays(RESULT, _calling([tool], text=text))
    yield Attack(SIDE, True)
    yield plays(LONG, lambda game: "" if game.turn else "a " * 500_000, luck=False)


def _nothing(game: Game) -> str:
    return ""


def _newest(game: Game) -> str:
    """Return the environment's last message, or the question."""
    return str((game.messages or game.row["prompt"])[-1]["content"])


def _random_word(game: Game) -> str:
    return random.Random(f"{game.row['id']} {game.turn}").choice(_WORDS)


def _pick(index: int, words: bool, game: Game) -> str:
    """Return a number of the environment's last message or, without numbers or with `words`, a word."""
    tokens = [token.rstrip(",") for token in TOKEN.findall(_newest(game))]
    numbers = [token for token in tokens if token[-1].isdigit()]
    chosen = tokens if words or not numbers else numbers
    return chosen[index] if chosen else ""


_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00",
    "time": "00:00:00",
    "duration": "PT0S",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
"""A valid text for each format of JSON schemas that not every text has."""

_PICKS: list[Text] = [partial(_pick, index, words) for index, words in ((0, False), (-1, False), (-1, True))]


def _calling(tools: Sequence[Mapping[str, Any]], argument: Text = _nothing, text: Text = _nothing) -> Policy:
    """Return a policy that first calls tools with a text, or the number in it, for each required argument.

    In later turns, it says `text`.
    """

    def policy(game: Game) -> Message | str:
        return text(game) if game.turn else _call(tools, argument(game))

    return policy


def _call(tools: Sequence[Mapping[str, Any]], text: str) -> Message:
    calls = []
    for function in (tool["function"] for tool in tools):
        arguments = _value({"type": "object", **function["parameters"]}, text)
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
        return {name: _value(schema["properties"][name], text) for name in schema.get("required", ())}
    if kind == "array":
        return [_value(part, text) for part in schema.get("prefixItems", ())]
    number = int(text[:9]) if text[:9].isdecimal() else 0
    return {"string": text, "integer": number, "number": float(number), "boolean": False}.get(kind)


def _mix(value: Any, others: Sequence[Any]) -> Any:
    """Return a value in which each text is between the texts that other values have in the same place."""
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
