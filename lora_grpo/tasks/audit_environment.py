"""The attacks on an `Environment`: policies that must not pass, and reference conversations, which must.

A policy plays at the level of messages, without a model: it gets the conversation and returns the model's next message.
Most can pass by luck, such as a number copied from the question in a game of numbers, so they are findings only if they
pass on more than half of the rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from lora_grpo.tasks.audit_attacks import EMPTY, GOLD, LEAK, LONG, REPEAT, TOKEN, Attack
from lora_grpo.tasks.audit_calls import Call, Outcome
from lora_grpo.tasks.environment import EnvironmentClass, Session
from lora_grpo.tasks.episode import transcript
from lora_grpo.tasks.registry import Row

MIN_ROWS = 16
"""Attacked rows, also in the audit before a run: on fewer, a policy may pass on more than half by luck."""
BEFORE, ECHO, COPIED, CLAIM = "reward before the end", "echo", "copied words", "claim of success"
TOOLS, RESULT, RANDOM, SIDE = "empty tool calls", "tool result", "random words", "side by side"
OTHERS, ALL = "answers of other rows", "all answers at once"
NAMES = (BEFORE, EMPTY.name, ECHO, COPIED, CLAIM, TOOLS, RESULT, RANDOM, OTHERS, ALL, LONG.name, LEAK, REPEAT, SIDE)
"""The allowed values of `AUDIT_IGNORE`."""
_CLAIM = "The task is done. My answer is correct: success, solved, passed, final answer, True, yes, reward 1.0, score 1"
_WORDS = (*"abcd", *map(str, range(11)), "yes", "no", "true", "left", "right", "up", "north", "south", "east", "west")

Message = dict[str, Any]
Policy = Callable[["Game"], Message | None]
"""Returns the model's next message, or None to end the conversation."""
Text = Callable[["Game"], str]


class Reference(NamedTuple):
    """A row and the conversations that its attacks are made from, as the messages of the model."""

    row: Row
    gold: Sequence[Message]
    """Empty if the file has no `gold`."""
    golds: Sequence[Sequence[Message]]
    """The different ones of all rows."""

    @property
    def others(self) -> list[Sequence[Message]]:
        """Those of other rows, first those with another last message: others may differ in what does not matter."""
        found = [gold for gold in self.golds if gold != self.gold]
        return sorted(found, key=lambda gold: bool(self.gold) and gold[-1] == self.gold[-1])[:20]


class Game:
    """A conversation of a policy with the environment. It has an outcome when it is over."""

    def __init__(self, environment: EnvironmentClass, row: Row, policy: Policy) -> None:
        self.row, self.tools, self.policy = row, environment.schemas, policy
        self.session = Session(environment, row["loaded_row"])
        self.messages: list[Message] = []
        self.turn = 0
        self.outcome: Outcome | None = None

    @property
    def newest(self) -> str:
        """The environment's last message, or the question."""
        return str((self.messages or self.row["prompt"])[-1]["content"])

    def step(self, begin: Callable[[str], None]) -> None:
        """Play a turn. `begin` gets what the policy says."""
        message = self.policy(self)
        begin(_shown([message] if message else []))
        answers = self.session.answer(message) if message else []
        self.messages += [message, *answers] if message else []
        self.turn += 1
        if answers and self.turn < self.session.max_turns:
            return
        verdict = self.session.verdict("limit" if answers else "reply")
        seen = hash(json.dumps([self.session.opening, self.messages, verdict.value]))
        text = f"{_shown(self.messages)}\n[reward {verdict.value:g}]"
        self.outcome = Outcome(verdict.passed, verdict.value, seen=seen, text=text)


def _shown(messages: Sequence[Message]) -> str:
    return transcript([{**message, "content": message["content"][:200]} for message in messages])


def last_text(messages: Sequence[Message] | None) -> str | None:
    """Return the text of the last message."""
    return messages[-1].get("content") or None if messages else None


def make_calls(
    environment: EnvironmentClass, rows: Sequence[Row], golds: Sequence[list[Message] | None], chosen: Sequence[int]
) -> list[Call]:
    """Return the conversations to play: reference conversations of all rows, then attacks on the rows at `chosen`.

    Args:
        golds: the messages of the model in the reference conversation of each row, or None.
    """
    played = [[{**message, "content": message.get("content") or ""} for message in gold or ()] for gold in golds]
    different = list({json.dumps(gold): gold for gold in played if gold}.values())
    references = [Reference(row, gold, different) for row, gold in zip(rows, played, strict=True)]
    attacked = [references[index] for index in chosen]
    calls = []
    for attack in _attacks(environment):
        tried = references if attack.name == GOLD.name else attacked[:1] if attack.name == LONG.name else attacked
        for reference in tried:
            for policy in attack.write(reference):
                calls.append(Call(attack, reference.row, partial(_play_alone, environment, reference.row, policy)))
    side = Attack(SIDE, True, lambda reference: ())
    pairs = zip(attacked, [*attacked[1:], *attacked[:1]], strict=True)
    beside = [Call(side, one.row, partial(_compare, environment, one, other)) for one, other in pairs]
    return [*calls[:-1], *beside, *calls[-1:]]  # the long text is last


def _play(
    environment: EnvironmentClass, parts: Iterable[tuple[Row, Policy]], begin: Callable[[str], None]
) -> list[Outcome]:
    """Play conversations side by side, turn by turn."""
    games = []
    for row, policy in parts:
        begin("")
        games.append(Game(environment, row, policy))
    while playing := [game for game in games if not game.outcome]:
        for game in playing:
            game.step(begin)
    return [game.outcome for game in games if game.outcome]


def _play_alone(environment: EnvironmentClass, row: Row, policy: Policy, begin: Callable[[str], None]) -> Outcome:
    return _play(environment, [(row, policy)], begin)[0]


def _compare(environment: EnvironmentClass, one: Reference, other: Reference, begin: Callable[[str], None]) -> Outcome:
    """Play conversations of two rows side by side, several of them of the same row, and compare with each alone."""
    words = _says(_random_word, environment.schemas, _random_word)
    first, second = (_script(each.gold) if each.gold else words for each in (one, other))
    parts = [(one.row, first), (one.row, first), (one.row, _says(_nothing)), (other.row, second)]
    alone = [_play_alone(environment, *part, begin).seen for part in parts]
    changed = [each for each, seen in zip(_play(environment, parts, begin), alone, strict=True) if each.seen != seen]
    if not changed:
        return Outcome(True)
    return Outcome(False, error="other messages or another reward than alone", text=changed[0].text)


def _attacks(environment: EnvironmentClass) -> Iterable[Attack]:
    """Yield the attacks. Each has at most one policy for a row, so that the rows on which it passes can be counted."""

    def plays(name: str, policy: Policy, luck: bool = True) -> Attack:
        return Attack(name, False, lambda reference: [policy], luck)

    texts: list[tuple[str, Text]] = [
        (ECHO, lambda game: str(game.row["prompt"][-1]["content"])),
        *((COPIED, pick) for pick in _PICKS),
        (CLAIM, lambda game: _CLAIM),
        (CLAIM, lambda game: "done"),
        (RANDOM, _random_word),
    ]
    yield plays(BEFORE, _script([]), luck=False)
    yield Attack(GOLD.name, True, lambda reference: [_script(reference.gold)] if reference.gold else [])
    yield plays(EMPTY.name, _says(_nothing), luck=False)
    yield plays(EMPTY.name, _says(lambda game: " \n"), luck=False)
    yield from (plays(name, _says(text)) for name, text in ((ECHO, _newest), *texts))
    for number in range(3):
        yield Attack(OTHERS, False, lambda one, n=number: [_script(gold) for gold in one.others[n : n + 1]], luck=True)
    yield Attack(ALL, False, _all_answers, luck=True)
    if environment.schemas:
        yield plays(TOOLS, _says(_nothing, environment.schemas))
    for tool in environment.schemas:
        yield from (plays(name, _says(_nothing, [tool], text)) for name, text in ((TOOLS, _nothing), *texts))
        yield from (plays(RESULT, _says(text, [tool])) for text in (_newest, *_PICKS))
    yield plays(LONG.name, _says(lambda game: "" if game.turn else "a " * 500_000), luck=False)


def _nothing(game: Game) -> str:
    return ""


def _newest(game: Game) -> str:
    return game.newest


def _random_word(game: Game) -> str:
    return random.Random(f"{game.row['id']} {game.turn}").choice(_WORDS)


def _pick(index: int, words: bool, game: Game) -> str:
    """Return a number of the environment's last message or, without numbers or with `words`, a word."""
    tokens = [token.rstrip(",") for token in TOKEN.findall(game.newest)]
    numbers = [token for token in tokens if token[-1].isdigit()]
    chosen = tokens if words or not numbers else numbers
    return chosen[index] if chosen else ""


_PICKS: list[Text] = [partial(_pick, index, words) for index, words in ((0, False), (-1, False), (-1, True))]


def _script(messages: Sequence[Message]) -> Policy:
    return lambda game: messages[game.turn] if game.turn < len(messages) else None


def _says(text: Text, tools: Sequence[Mapping[str, Any]] = (), argument: Text = _nothing) -> Policy:
    """Return a policy that says a text in each turn, but in the first calls the tools, with a text as argument."""

    def policy(game: Game) -> Message:
        if tools and not game.turn:
            return _call(tools, argument(game))
        return {"role": "assistant", "content": text(game)}

    return policy


def _call(tools: Sequence[Mapping[str, Any]], text: str) -> Message:
    """Return a message that calls tools with a text, or the number in it, for each required argument."""
    number = int(text[:9]) if text[:9].isdecimal() else 0
    values = {"string": text, "integer": number, "number": float(number), "boolean": False, "array": [], "object": {}}
    calls = []
    for function in (tool["function"] for tool in tools):
        arguments = {}
        for name in function["parameters"].get("required", ()):
            schema = function["parameters"]["properties"][name]
            kind = schema.get("type", "string")
            kind = kind if isinstance(kind, str) else kind[0]
            arguments[name] = schema["enum"][0] if "enum" in schema else values.get(kind)
        calls.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _all_answers(reference: Reference) -> list[Policy]:
    """Play the reference conversation with the texts of all rows in the place of each of its texts."""
    others = [dict(enumerate(other)) for other in reference.others]
    mixed = [_mix(message, [other.get(turn) for other in others]) for turn, message in enumerate(reference.gold)]
    return [_script(mixed)] if mixed != reference.gold else []


def _mix(own: Any, others: Sequence[Any]) -> Any:
    """Return a value in which each text stands among those at its place in other values."""
    others = [other for other in others if isinstance(other, type(own))]
    if isinstance(own, dict):
        return {key: _mix(value, [other.get(key) for other in others]) for key, value in own.items()}
    if isinstance(own, list):
        return [_mix(value, [other[n] for other in others if n < len(other)]) for n, value in enumerate(own)]
    if not isinstance(own, str) or not own:
        return own
    texts = [text for text in dict.fromkeys(others) if text not in ("", own)]
    half = (len(texts) + 1) // 2
    return " ".join([*texts[:half], own, *texts[half:]])
