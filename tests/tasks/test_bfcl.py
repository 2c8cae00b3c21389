"""The task of function calls in tools/bfcl.py."""

import json
from pathlib import Path

import bfcl
import pytest
from trl import chat_template_utils

from lora_grpo.config import ModelConfig
from lora_grpo.data import gold_episodes
from lora_grpo.errors import UserError
from lora_grpo.models import base_model
from lora_grpo.tasks import Session, get_task

FILE = Path(bfcl.__file__)
BOOK = {
    "name": "hotel.book",
    "description": "Book a room.",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string", "description": "City."},
            "nights": {"type": "integer", "description": "Nights."},
            "price": {"type": "float", "description": "Highest price."},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags."},
            "guest": {"type": "dict", "description": "Guest."},
        },
        "required": ["city", "nights"],
    },
}
TRUTH = {"city": ["New York", "NY"], "nights": [2], "price": [99.5, 100.0, ""], "tags": [["sea", "quiet"], ""]}
TRUTH |= {"guest": [{"name": ["Ann"], "age": [30, ""]}, ""]}
ARGUMENTS = {"city": "New York", "nights": 2}


def call(**changes):
    return {"name": "hotel.book", "arguments": {**ARGUMENTS, **changes}}


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"city": "new-york"}, True),
        ({"city": "Boston"}, False),
        ({"nights": 2.0}, False),
        ({"nights": True}, False),
        ({"nights": "2"}, False),
        ({"price": 99.5}, True),
        ({"price": 100}, True),
        ({"price": 98.0}, False),
        ({"tags": ["Sea", "quiet"]}, True),
        ({"tags": ["quiet", "sea"]}, False),
        ({"guest": {"name": "ann"}}, True),
        ({"guest": {"name": "Ann", "age": 31}}, False),
        ({"guest": {"age": 30}}, False),
        ({"stars": 5}, False),
    ],
)
def test_arguments_are_compared_by_the_leaderboards_rules(changes, right):
    assert bfcl.agrees([call(**changes)], [{"hotel.book": TRUTH}], [BOOK]) is right


def test_calls_may_come_in_any_order_but_not_more_or_fewer():
    truth = [{"hotel.book": {"city": [city], "nights": [1]}} for city in ("Rome", "Oslo")]
    rome, oslo = call(city="Rome", nights=1), call(city="Oslo", nights=1)
    assert bfcl.agrees([oslo, rome], truth, [BOOK])
    for calls in ([], [rome], [rome, rome], [rome, oslo, rome]):
        assert not bfcl.agrees(calls, truth, [BOOK])


def test_rows_of_a_file_become_prompts_with_their_own_tools_and_their_references_pass(tmp_path):
    path, row = tmp_path / "calls.jsonl", {"question": "Book it.", "functions": [BOOK]}
    lines = [{**row, "ground_truth": [{"hotel.book": TRUTH}]}, {**row, "question": "Hi.", "ground_truth": []}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = get_task(str(FILE))
    evaluated = [task.open(each) for each in task.load("eval", str(path))]
    for each in evaluated:
        [tool] = each["tools"]
        assert tool["function"]["parameters"]["properties"]["price"]["type"] == "number"
        [message] = task.gold(each)
        session = Session(task.environment, each["loaded_row"])
        assert session.answer(message) == [] and session.verdict("reply").passed
    wrong = Session(task.environment, evaluated[1]["loaded_row"])
    wrong.answer(task.gold(evaluated[0])[0])
    assert not wrong.verdict("reply").passed
    unplayed = Session(task.environment, evaluated[1]["loaded_row"])
    assert not unplayed.verdict("budget").passed


def test_calls_are_parsed_in_the_format_of_the_chat_template(tmp_path):
    path = tmp_path / "calls.jsonl"
    row = {"question": "Book it.", "functions": [BOOK], "ground_truth": [{"hotel.book": TRUTH}]}
    path.write_text(json.dumps(row) + "\n")
    task = get_task(str(FILE))
    rows = [{**task.open(each), "task": str(FILE)} for each in task.load("eval", str(path))]
    tokenizer = base_model.load_tokenizer(ModelConfig())
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    [episode] = gold_episodes(tokenizer, rows)
    assert '"name": "hotel.book"' in episode.prompt and "<tool_call>" in tokenizer.decode(episode.token_ids)
    assert episode.verdict.passed and episode.session.calls == 1


def test_a_folder_without_the_wheel_and_an_unknown_category_are_refused(tmp_path):
    for source in (str(tmp_path), f"{tmp_path}:simpel"):
        with pytest.raises(UserError):
            bfcl.load("eval", source)
