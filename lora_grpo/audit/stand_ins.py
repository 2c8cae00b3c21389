"""The attacks on an agent: models that must not pass.

A stand-in writes what a policy could sample. It reads the same prompt as a policy, and the agent cannot tell them
apart: requests, tokens and processes are those of a run. Most stand-ins can pass by luck, such as a number copied from
the question, so they are findings only if they pass on more than half of the rows.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lora_grpo.audit.attacks import ALL_ANSWERS, EMPTY_TEXT, LEAKED_ANSWER, REPEATED_CALLS
from lora_grpo.audit.policies import CLAIM_OF_SUCCESS, ECHO, RANDOM_WORD_LIST, RANDOM_WORDS, SIDE_BY_SIDE
from lora_grpo.grading import Row

ENDLESS_TEXT = "endless text"
MALFORMED_TEXT = "malformed text"
WRONG_TOOL_CALLS = "wrong tool calls"
UNKNOWN_TOOL = "unknown tool"
NAMES = (
    EMPTY_TEXT,
    ECHO,
    CLAIM_OF_SUCCESS,
    MALFORMED_TEXT,
    ENDLESS_TEXT,
    WRONG_TOOL_CALLS,
    UNKNOWN_TOOL,
    RANDOM_WORDS,
    LEAKED_ANSWER,
    ALL_ANSWERS,
    REPEATED_CALLS,
    SIDE_BY_SIDE,
)
"""The allowed values of `AUDIT_IGNORE`."""

TEMPLATE = "qwen2_5"
"""TRL's name of the chat template in which stand-ins read prompts and call tools."""
ENDLESS = "a " * 4096
"""Longer than any turn of an audit."""
_CLAIMS = ("Done. The task is solved. Score: 1.0", "correct")
_MALFORMED = (
    '<tool_call>\n{"name": "answer", "arguments": {"a": \n</tool_call>',
    '{"answer": "\ufffd',  # half a character, as tokens decode it
    "<think>It",
    "```json\n[",
    "\x00 \\u",
)
_UNKNOWN_TOOLS = ("submit", "finish", "get_reward", "__init__")
_MAX_COLUMNS = 8
_MAX_ANSWER_LENGTH = 100
"""Maximum number of characters of a column that may be an answer."""
_NO_ANSWERS = ("id", "question", "prompt")
"""Columns that ask."""


@dataclass(frozen=True)
class Asked:
    """One request that a stand-in answers."""

    prompt: str
    """The rendered prompt, as a policy reads it."""
    row: Row
    """The columns of the row."""
    row_number: int
    """Among the rows that are played together."""
    call_number: int
    """How many requests of the episode were answered before."""
    seed: int
    """It follows from the seed of the episode and from the prompt."""

    @property
    def newest_text(self) -> str:
        """The last message of the user or a tool; the whole prompt if it has no messages."""
        messages = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", self.prompt, re.DOTALL)
        newest = messages[-1] if messages else self.prompt
        return re.sub(r"</?tool_response>\n?", "", newest).strip()

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The functions that the request offers, as JSON schemas."""
        section = re.search(r"<tools>\n(.*?)\n</tools>", self.prompt, re.DOTALL)
        functions = []
        for line in section[1].splitlines() if section else ():
            try:
                functions.append(json.loads(line)["function"])
            except (ValueError, KeyError, TypeError):  # a text of the agent with the same marks
                continue
        return functions


@dataclass(frozen=True)
class StandIn:
    """A model that takes the place of the policy."""

    name: str
    doing: str
    """What it does, for messages: "writes nothing"."""
    text: Callable[[Asked], str]
    """Returns its answer."""
    needs_tools: bool = False
    """Whether it does something only if the agent offers tools."""


def _malformed(asked: Asked) -> str:
    return _MALFORMED[(asked.row_number + asked.call_number) % len(_MALFORMED)]


def _tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _wrong_tool_call(asked: Asked) -> str:
    """Call the first tool without arguments, with one that it does not have, or with values of another type."""
    if not asked.tools:
        return ""
    tool = asked.tools[0]
    properties = tool.get("parameters", {}).get("properties", {})
    kinds: list[dict[str, Any]] = [
        {},
        {"unexpected": "?"},
        {name: [] for name in properties},
        dict.fromkeys(properties),
    ]
    kind = (asked.row_number + asked.call_number) % len(kinds)
    return _tool_call(tool["name"], kinds[kind])


def _unknown_tool_call(asked: Asked) -> str:
    if not asked.tools:
        return ""
    name = _UNKNOWN_TOOLS[(asked.row_number + asked.call_number) % len(_UNKNOWN_TOOLS)]
    return _tool_call(name, {})


def _random_words(asked: Asked) -> str:
    """Call a tool with a random word for each argument in the first turn, and say one afterwards.

    The answer depends on the prompt alone, not on the order of parallel requests.
    """
    generator = random.Random(asked.seed)
    word = generator.choice(RANDOM_WORD_LIST)
    is_first_turn = asked.prompt.count("<|im_start|>assistant") <= 1
    if not asked.tools or not is_first_turn:
        return word
    tool = generator.choice(asked.tools)
    return _tool_call(tool["name"], dict.fromkeys(tool.get("parameters", {}).get("properties", {}), word))


def _shown_column(column: str, asked: Asked) -> str:
    """Return the value of a column if the prompt contains it."""
    value = str(asked.row[column])
    is_shown = re.search(rf"(?<!\w){re.escape(value)}(?!\w)", asked.prompt)
    return value if is_shown else ""


def _all_values(column: str, values: Sequence[str], asked: Asked) -> str:
    """Return the values of a column in all rows, that of this row in the middle."""
    own_value = str(asked.row[column])
    others = [value for value in values if value != own_value]
    half = (len(others) + 1) // 2
    return " ".join([*others[:half], own_value, *others[half:]])


EMPTY_STAND_IN = StandIn(EMPTY_TEXT, "writes nothing", lambda asked: "")
RANDOM_STAND_IN = StandIn(RANDOM_WORDS, "says random words", _random_words)


def stand_ins(rows: Sequence[Row]) -> list[StandIn]:
    """Return the stand-ins, in the order in which they play.

    Args:
        rows: the columns of the rows that are attacked.
    """
    models = [EMPTY_STAND_IN]
    models.append(StandIn(ECHO, "repeats the last message", lambda asked: asked.newest_text))
    for claim in _CLAIMS:
        models.append(StandIn(CLAIM_OF_SUCCESS, f"says {claim!r}", partial(_constant, claim)))
    models.append(StandIn(MALFORMED_TEXT, "writes broken JSON and half characters", _malformed))
    models.append(StandIn(ENDLESS_TEXT, "never ends", lambda asked: ENDLESS))
    models.append(RANDOM_STAND_IN)
    models.append(StandIn(WRONG_TOOL_CALLS, "calls a tool with wrong arguments", _wrong_tool_call, needs_tools=True))
    models.append(StandIn(UNKNOWN_TOOL, "calls a tool that is not offered", _unknown_tool_call, needs_tools=True))
    for column in _possible_answers(rows):
        values = list(dict.fromkeys(str(row[column]) for row in rows))
        repeats = partial(_shown_column, column)
        models.append(StandIn(LEAKED_ANSWER, f"repeats the column {column!r}, if the agent shows it", repeats))
        lists = partial(_all_values, column, values)
        models.append(StandIn(ALL_ANSWERS, f"lists the column {column!r} of all rows", lists))
    return models


def _constant(text: str, asked: Asked) -> str:
    return text


def _possible_answers(rows: Sequence[Row]) -> list[str]:
    """Return the names of columns that may be the answer: short texts or numbers, not the same in all rows."""
    columns = []
    for column in rows[0]:
        values = [row.get(column) for row in rows]
        are_short = all(_is_short(value) for value in values)
        if column not in _NO_ANSWERS and are_short and len(set(values)) > 1:
            columns.append(column)
    return columns[:_MAX_COLUMNS]


def _is_short(value: Any) -> bool:
    is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    return is_scalar and 0 < len(str(value)) <= _MAX_ANSWER_LENGTH
