"""Arguments of tools: every type that the schema offers can be given, and no other value of it is accepted."""

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import pydantic
import pytest
from transformers.utils import get_json_schema
from typing_extensions import TypedDict

from lora_grpo.audit.policies import _call
from lora_grpo.errors import UserError
from lora_grpo.tasks import Session, get_task
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
MAY_2ND = datetime.date(2026, 5, 2)

# JSON schemas

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
NULL = {"type": "null"}
DATE = {**STRING, "format": "date"}
COLOR = {**STRING, "enum": ["red", "blue"]}


def array(items, **limits):
    return {"type": "array", "items": items, **limits}


def objects(required, **properties):
    return {"type": "object", "properties": properties, "required": required}


POINT = objects(["x"], x=INTEGER, y={"default": 0.0, **NUMBER})
LINE = objects(["title", "ends"], title=STRING, ends=array(POINT))
ITEM = objects(["name"], name=STRING, count=INTEGER)
ORDER = objects(["when", "item"], when=DATE, item=ITEM)
TREE = objects(["children"], children=array({"type": "object"}))


class Case(NamedTuple):
    kind: Any
    """The type of the tool's argument."""
    written: Any
    """What the model writes, as JSON."""
    value: Any
    """What the tool gets."""
    schema: dict[str, Any] | None = None
    """The schema that the model reads. None: the one that transformers makes."""


ACCEPTED = [
    Case(int, 1, 1),
    Case(float, 1, 1.0),
    Case(str, "a", "a"),
    Case(int | None, None, None),
    Case(int | str, "1", "1"),
    Case(Literal["a", "b"], "b", "b"),
    Case(list[int], [1], [1]),
    Case(tuple[int, str], [1, "a"], (1, "a")),
    Case(dict[str, int], {"a": 1}, {"a": 1}),
    Case(Annotated[int, pydantic.Field(ge=1)], 1, 1),
    # Containers
    Case(list, [1, "a"], [1, "a"], array({})),
    Case(tuple[int, ...], [1, 2], (1, 2), array(INTEGER)),
    Case(Sequence[int], [1], [1], array(INTEGER)),
    Case(set[int], [1, 1], {1}, array(INTEGER, uniqueItems=True)),
    Case(frozenset[str], ["a"], frozenset("a"), array(STRING, uniqueItems=True)),
    Case(dict[int, str], {"1": "a"}, {1: "a"}, {"type": "object", "additionalProperties": STRING}),
    # Types that are texts in JSON
    Case(datetime.date, "2026-05-02", MAY_2ND, DATE),
    Case(datetime.datetime, "2026-01-02T03:04:05", MOMENT, {**STRING, "format": "date-time"}),
    Case(datetime.time, "03:04", datetime.time(3, 4), {**STRING, "format": "time"}),
    Case(datetime.timedelta, "PT3S", datetime.timedelta(seconds=3), {**STRING, "format": "duration"}),
    Case(datetime.date | None, None, None, {"anyOf": [DATE, NULL]}),
    Case(
        tuple[datetime.date, int],
        ["2026-05-02", 1],
        (MAY_2ND, 1),
        {"type": "array", "minItems": 2, "maxItems": 2, "prefixItems": [DATE, INTEGER]},
    ),
    Case(decimal.Decimal, "1.50", decimal.Decimal("1.50"), {"anyOf": [NUMBER, STRING]}),
    Case(decimal.Decimal, 1.5, decimal.Decimal("1.5"), {"anyOf": [NUMBER, STRING]}),
    Case(uuid.UUID, str(ID), ID, {**STRING, "format": "uuid"}),
    Case(pathlib.Path, "a/b", pathlib.Path("a/b"), {**STRING, "format": "path"}),
    Case(bytes, "abc", b"abc", {**STRING, "format": "binary"}),
    # Enums
    Case(Color, "red", Color.RED, COLOR),
    Case(Level, 1, Level.LOW, {**INTEGER, "enum": [1]}),
    Case(list[Color], ["blue"], [Color.BLUE], array(COLOR)),
    # Classes with fields
    Case(Point, {"x": 1}, Point(1), POINT),
    Case(Line, {"title": "a", "ends": [{"x": 1, "y": 2}]}, Line("a", [Point(1, 2.0)]), LINE),
    Case(Item, {"name": "a"}, {"name": "a"}, ITEM),
    Case(
        Order,
        {"when": "2026-05-02", "item": {"name": "a", "count": 2}},
        Order(when=MAY_2ND, item={"name": "a", "count": 2}),
        ORDER,
    ),
    Case(Tree, {"children": [{"children": []}]}, Tree([Tree([])]), TREE),
]


def tool_of(kind):
    """Return a tool with an argument of a type, whose name is one of pydantic's own, and with one that has a default.

    The type that the tool returns is not checked.
    """

    def tool(self, model_fields: kind, with_default: int = 7) -> set[int]:
        """Get a value.

        Args:
            model_fields: the value.
            with_default: another value.
        """
        return model_fields, with_default

    return Tool.of("tool", tool)


def schema_of_transformers(kind):
    """Return the schema that transformers makes of an argument of a type."""

    def tool(value: kind):
        """Get a value.

        Args:
            value: the value.
        """

    return get_json_schema(tool)["function"]["parameters"]["properties"]["value"]


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: str(case.kind)[:40])
def test_what_the_schema_offers_can_be_given(case):
    tool = tool_of(case.kind)
    value, default = tool(None, model_fields=case.written)
    assert (value, default) == (case.value, 7)
    assert type(value) is type(case.value)

    parameters = tool.schema()["function"]["parameters"]
    if case.schema is None:
        expected = schema_of_transformers(case.kind)
    else:
        expected = {**case.schema, "description": "the value."}
    assert parameters["properties"]["model_fields"] == expected
    assert parameters["required"] == ["model_fields"]
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
def test_a_value_of_another_type_is_refused(kind, written):
    with pytest.raises(WrongArguments):
        tool_of(kind)(None, model_fields=written)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"argument_0": 1},
        {"model_fields": 1, "unknown": 1},
        {"model_fields": 1, "environment": 1},
        {"model_fields": 1, "self": 1},
    ],
    ids=str,
)
def test_missing_and_unknown_arguments_are_refused(arguments):
    with pytest.raises(WrongArguments):
        tool_of(int)(None, **arguments)


def calendar_task(type_of_day="datetime.date"):
    """Return a task file whose tool has an argument of this type. All its types are texts until they are needed."""
    return f'''
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
    return [dict(question="When?")]

class Environment:
    def reset(self, **row):
        self.day = None

    async def pick(self, day: {type_of_day}, *, note: str = "none"):
        """Pick a day.

        Args:
            day: the day.
            note: anything.
        """
        self.day = day
        return day.strftime("%d.%m.%Y ") + note

    async def get_reward(self):
        return float(self.day is not None)
'''


@pytest.mark.parametrize(
    "type_of_day", ["Callable[[int], int]", "Own", "list[Own]", "Unknown", "dict[str, Callable]", "Literal[Color.RED]"]
)
def test_a_type_that_cannot_be_offered_is_refused_when_the_file_is_loaded(tmp_path, type_of_day):
    path = tmp_path / "my_task.py"
    path.write_text(calendar_task(type_of_day))
    with pytest.raises(UserError) as error:
        _ = get_task(str(path)).environment.schemas
    assert "\n" not in str(error.value) and "my_task.py" in str(error.value)


def test_an_environment_gets_the_values_and_the_audit_can_call_its_tools(tmp_path):
    path = tmp_path / "my_task.py"
    path.write_text(calendar_task())
    environment = get_task(str(path)).environment
    session = Session(environment, {"id": "a"})

    [result] = session.answer({"tool_calls": [{"function": {"name": "pick", "arguments": {"day": "2026-01-02"}}}]})
    assert result["content"] == "02.01.2026 none"
    assert session.verdict("reply").passed

    [refusal] = session.answer({"tool_calls": [{"function": {"name": "pick", "arguments": {"day": 5}}}]})
    assert refusal["content"].startswith("error: argument 'day'")
    assert session.failed_calls == 1

    [result_for_audit] = session.answer(_call(environment.schemas, "anything"))
    assert result_for_audit["content"] == "01.01.2026 none"
