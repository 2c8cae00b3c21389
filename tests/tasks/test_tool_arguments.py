"""Arguments of tools: every type that the schema offers can be given, and no other value of it is accepted."""

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

import pydantic
import pytest
from transformers.utils import get_json_schema
from typing_extensions import TypedDict

from lora_grpo.audit.policies import _call
from lora_grpo.errors import UserError
from lora_grpo.tasks import get_task
from lora_grpo.tasks.environment import Session
from lora_grpo.tasks.tool_arguments import Tool, WrongArguments


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Line:
    title: str
    ends: list[Point]


class Item(TypedDict):
    name: str
    count: NotRequired[int]


class Order(pydantic.BaseModel):
    when: datetime.date
    item: Item


@dataclasses.dataclass
class Tree:
    children: list["Tree"]


ID = uuid.UUID("778e009c-636d-4fb3-a7b4-2322c72da8b7")
MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5)
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
POINT = {"type": "object", "properties": {"x": INTEGER, "y": {"default": 0.0, **NUMBER}}, "required": ["x"]}
ITEM = {"type": "object", "properties": {"name": STRING, "count": INTEGER}, "required": ["name"]}
PAIR = {"maxItems": 2, "minItems": 2, "type": "array"}

# The type, what the model writes, what the tool gets, and the schema if it is not that of transformers.
GIVEN: list[tuple[Any, Any, Any, Any]] = [
    (int, 1, 1, None),
    (float, 1, 1.0, None),
    (str, "a", "a", None),
    (int | None, None, None, None),
    (int | str, "1", "1", None),
    (Literal["a", "b"], "b", "b", None),
    (list[int], [1], [1], None),
    (tuple[int, str], [1, "a"], (1, "a"), None),
    (dict[str, int], {"a": 1}, {"a": 1}, None),
    (list, [1, "a"], [1, "a"], {"type": "array", "items": {}}),
    (tuple[int, ...], [1, 2], (1, 2), {"type": "array", "items": INTEGER}),
    (Sequence[int], [1], [1], {"type": "array", "items": INTEGER}),
    (set[int], [1, 1], {1}, {"type": "array", "items": INTEGER, "uniqueItems": True}),
    (frozenset[str], ["a"], frozenset("a"), {"type": "array", "items": STRING, "uniqueItems": True}),
    (dict[int, str], {"1": "a"}, {1: "a"}, {"type": "object", "additionalProperties": STRING}),
    (datetime.date, "2026-01-02", datetime.date(2026, 1, 2), {**STRING, "format": "date"}),
    (datetime.datetime, "2026-01-02T03:04:05", MOMENT, {**STRING, "format": "date-time"}),
    (datetime.time, "03:04", datetime.time(3, 4), {**STRING, "format": "time"}),
    (datetime.timedelta, "PT3S", datetime.timedelta(seconds=3), {**STRING, "format": "duration"}),
    (decimal.Decimal, "1.50", decimal.Decimal("1.50"), {"anyOf": [NUMBER, STRING]}),
    (decimal.Decimal, 1.5, decimal.Decimal("1.5"), {"anyOf": [NUMBER, STRING]}),
    (uuid.UUID, str(ID), ID, {**STRING, "format": "uuid"}),
    (pathlib.Path, "a/b", pathlib.Path("a/b"), {**STRING, "format": "path"}),
    (bytes, "abc", b"abc", {**STRING, "format": "binary"}),
    (Color, "red", Color.RED, {**STRING, "enum": ["red", "blue"]}),
    (Level, 1, Level.LOW, {**INTEGER, "enum": [1]}),
    (list[Color], ["blue"], [Color.BLUE], {"type": "array", "items": {**STRING, "enum": ["red", "blue"]}}),
    (datetime.date | None, None, None, {"anyOf": [{**STRING, "format": "date"}, {"type": "null"}]}),
    (tuple[datetime.date, int], ["2026-01-02", 1], (datetime.date(2026, 1, 2), 1), {
        **PAIR, "prefixItems": [{**STRING, "format": "date"}, INTEGER],
    }),
    (Point, {"x": 1}, Point(1), POINT),
    (Line, {"title": "a", "ends": [{"x": 1, "y": 2}]}, Line("a", [Point(1, 2.0)]), {
        "type": "object", "properties": {"title": STRING, "ends": {"type": "array", "items": POINT}},
        "required": ["title", "ends"],
    }),
    (Item, {"name": "a"}, {"name": "a"}, ITEM),
    (Order, {"when": "2026-01-02", "item": {"name": "a", "count": 2}},
     Order(when=datetime.date(2026, 1, 2), item={"name": "a", "count": 2}),
     {"type": "object", "properties": {"when": {**STRING, "format": "date"}, "item": ITEM},
      "required": ["when", "item"]}),
    (Tree, {"children": [{"children": []}]}, Tree([Tree([])]), {
        "type": "object", "required": ["children"],
        "properties": {"children": {"type": "array", "items": {"type": "object"}}},
    }),
    (Annotated[int, pydantic.Field(ge=1)], 1, 1, None),
]  # fmt: skip


def tool_of(kind):
    def tool(self, model_fields: kind, other: int = 7) -> set[int]:
        """Get a value.

        Args:
            model_fields: the value.
            other: another.
        """
        return model_fields, other

    return Tool.of("tool", tool)


@pytest.mark.parametrize(("kind", "written", "value", "schema"), GIVEN, ids=lambda given: str(given)[:40])
def test_what_the_schema_offers_can_be_given(kind, written, value, schema):
    tool = tool_of(kind)
    found, other = tool(None, model_fields=written)
    assert (found, other) == (value, 7) and type(found) is type(value)
    function = tool.schema()["function"]
    parameters = function["parameters"]
    if schema is None:

        def plain(model_fields: kind):
            """Get a value.

            Args:
                model_fields: the value.
            """

        expected = get_json_schema(plain)["function"]["parameters"]["properties"]["model_fields"]
    else:
        expected = {**schema, "description": "the value."}
    assert parameters["properties"]["model_fields"] == expected and parameters["required"] == ["model_fields"]
    json.dumps(parameters)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (int, "1"),
        (int, 1.0),
        (int, True),
        (float, "1"),
        (bool, 1),
        (bool, "true"),
        (str, 1),
        (list[int], ["1"]),
        (tuple[int, str], [1]),
        (datetime.date, 5),
        (datetime.date, "5 May"),
        (datetime.timedelta, 5),
        (decimal.Decimal, "a"),
        (Color, "green"),
        (Color, "RED"),
        (Point, {"x": "1"}),
        (Point, {"x": 1, "y": float("nan")}),
        (Order, {"when": "2026-01-02", "item": {"name": 1}}),
        (dict[int, str], {"a": "a"}),
        (Any, float("inf")),
        (Annotated[int, pydantic.Field(ge=1)], 0),
        (str, "\ud800"),
    ],
    ids=str,
)
def test_another_value_is_refused(kind, written):
    with pytest.raises(WrongArguments):
        tool_of(kind)(None, model_fields=written)


def test_missing_and_unknown_arguments_are_refused():
    one = {"model_fields": 1}
    for arguments in ({}, {"argument_0": 1}, *({**one, name: 1} for name in ("more", "environment", "self"))):
        with pytest.raises(WrongArguments):
            tool_of(int)(None, **arguments)


@pytest.mark.parametrize(
    "kind", ["Callable[[int], int]", "Own", "list[Own]", "Unknown", "dict[str, Callable]", "Literal[Color.RED]"]
)
def test_a_type_that_cannot_be_offered_is_refused_when_the_file_is_loaded(tmp_path, kind):
    path = tmp_path / "my_task.py"
    path.write_text(TASK.replace("datetime.date", kind))
    with pytest.raises(UserError) as error:
        _ = get_task(str(path)).environment.schemas
    assert "\n" not in str(error.value) and "my_task.py" in str(error.value)


TASK = '''
from __future__ import annotations
import datetime
import enum
from collections.abc import Callable
from typing import Literal

class Own:
    pass

class Color(enum.Enum):
    RED = 1

def load(split):
    return [{"question": "When?"}]

class Environment:
    def reset(self, **row):
        self.day = None

    async def pick(self, day: datetime.date, *, note: str = "none"):
        """Pick a day.

        Args:
            day: the day.
            note: anything.
        """
        self.day = day
        return f"{day:%d.%m.%Y} {note}"

    async def get_reward(self):
        return float(self.day is not None)
'''


def test_an_environment_gets_the_values_and_the_audit_can_call_its_tools(tmp_path):
    path = tmp_path / "my_task.py"
    path.write_text(TASK)
    environment = get_task(str(path)).environment
    session = Session(environment, {"id": "a"})
    call = {"function": {"name": "pick", "arguments": {"day": "2026-01-02"}}}
    [message] = session.answer({"tool_calls": [call]})
    assert message["content"] == "02.01.2026 none" and session.verdict("reply").passed
    [refused] = session.answer({"tool_calls": [{"function": {"name": "pick", "arguments": {"day": 5}}}]})
    assert refused["content"].startswith("error: argument 'day'") and session.failed_calls == 1
    [message] = session.answer(_call(environment.schemas, "anything"))
    assert message["content"] == "01.01.2026 none"
