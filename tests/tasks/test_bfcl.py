"""BFCL: the leaderboard's rules for calls, and rows of a file and of its wheel."""

import collections
import copy
import importlib
import json
import os
import random
import sys
import types
from pathlib import Path

import pytest
from trl import chat_template_utils

from lora_grpo.config import ModelConfig
from lora_grpo.data import gold_episodes
from lora_grpo.errors import UserError
from lora_grpo.models import base_model
from lora_grpo.prompts import chat, turns
from lora_grpo.rollouts import Episode
from lora_grpo.tasks import Session, bfcl, get_task

TASK = get_task("bfcl")
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
ALLOWED = {
    "city": ["New York", "NY"],
    "nights": [2],
    "price": [99.5, 100.0, ""],
    "tags": [["sea", "quiet"], ""],
    "guest": [{"name": ["Ann"], "age": [30, ""]}, ""],
}
ROW = {"question": "Book it.", "functions": [BOOK], "ground_truth": [{"hotel.book": ALLOWED}]}
NO_CALL = {"question": "Hi.", "functions": [BOOK], "ground_truth": []}


def booking(**arguments):
    return {"name": "hotel.book", "arguments": {"city": "New York", "nights": 2, **arguments}}


@pytest.mark.parametrize(
    ("arguments", "agrees"),
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
def test_arguments_are_compared_by_the_leaderboards_rules(arguments, agrees):
    assert bfcl.agrees([booking(**arguments)], ROW["ground_truth"], [BOOK]) is agrees


def test_calls_may_come_in_any_order_but_not_more_or_fewer():
    ground_truth = [{"hotel.book": {"city": [city], "nights": [1]}} for city in ("Rome", "Oslo")]
    rome, oslo = booking(city="Rome", nights=1), booking(city="Oslo", nights=1)
    assert bfcl.agrees([oslo, rome], ground_truth, [BOOK])
    for calls in ([], [rome], [rome, rome], [rome, oslo, rome]):
        assert not bfcl.agrees(calls, ground_truth, [BOOK])


def load(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{**TASK.with_opening(row), "task": "bfcl"} for row in TASK.load("eval", str(path))]


def graded(row, message=None):
    """Return whether a conversation passes in which the model writes one message, or is cut before its end."""
    session = Session(TASK.environment, row["loaded_row"])
    if message:
        assert session.answer(message) == []
    return session.verdict("reply" if message else "budget").passed


def test_rows_of_a_file_become_prompts_with_their_own_tools_and_their_references_pass(tmp_path):
    rows = load(tmp_path / "calls.jsonl", ROW, NO_CALL)
    for row in rows:
        [tool] = row["tools"]
        assert tool["function"]["parameters"]["properties"]["price"]["type"] == "number"
        [message] = TASK.gold(row)
        assert graded(row, message)
    [call_of_the_other_row] = TASK.gold(rows[0])
    assert not graded(rows[1], call_of_the_other_row)
    assert not graded(rows[1])


def test_calls_are_parsed_in_the_format_of_the_chat_template(tmp_path):
    tokenizer = base_model.load_tokenizer(ModelConfig())
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    [episode] = gold_episodes(tokenizer, load(tmp_path / "calls.jsonl", ROW))
    assert '"name": "hotel.book"' in episode.prompt and "<tool_call>" in tokenizer.decode(episode.token_ids)
    assert episode.verdict.passed and episode.session.calls == 1


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("None of them fits.", True),
        ('<tool_call>\n{"name": "hotel.book", "arguments": {\n</tool_call>', False),
        ('<tool_call>\n{"name": "hotel.book"}\n</tool_call>', False),
    ],
)
def test_a_malformed_call_fails_also_where_no_call_is_right(tmp_path, text, passed):
    tokenizer = base_model.load_tokenizer(ModelConfig())
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    [row] = load(tmp_path / "calls.jsonl", NO_CALL)
    prompt = chat.render_row(tokenizer, row)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    end_id = tokenizer.eos_token_id
    episode = Episode(row, prompt, prompt_ids, tokenizer, [end_id], 1000, turns.response_format(tokenizer))
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    episode.take([*token_ids, end_id], text, logprobs=None, truncated=False)
    assert episode.is_over and episode.verdict.passed is passed
    assert episode.session.failed_calls == (not passed)


@pytest.mark.parametrize("column", ["functions", "ground_truth"])
def test_a_row_without_a_list_is_named(tmp_path, column):
    with pytest.raises(UserError, match=f"row 1: {column} is None; expected a list"):
        load(tmp_path / "calls.jsonl", ROW, {**ROW, column: None})


def test_a_folder_without_the_wheel_and_an_unknown_category_are_refused(tmp_path):
    for source, problem in ((str(tmp_path), "unpack the wheel"), (f"{tmp_path}:simpel", "did you mean 'simple'")):
        with pytest.raises(UserError, match=problem):
            TASK.load("eval", source)


# Against the leaderboard's own checker, of the wheel bfcl-eval 2026.3.23


@pytest.fixture
def wheel(monkeypatch):
    """The folder of the unpacked wheel. Of its modules, only the checker of Python calls is imported."""
    folder = os.environ.get("LORA_GRPO_BFCL_WHEEL")
    if not folder:
        pytest.skip("LORA_GRPO_BFCL_WHEEL, the folder of the unpacked wheel bfcl-eval, is not set")
    monkeypatch.syspath_prepend(folder)
    model = types.SimpleNamespace(underscore_to_dot=False)
    # What the checker imports for other languages and models.
    stand_ins = {
        "constants.model_config": {"MODEL_CONFIG_MAPPING": collections.defaultdict(lambda: model)},
        "eval_checker.ast_eval.type_convertor.java_type_converter": {"java_type_converter": None},
        "eval_checker.ast_eval.type_convertor.js_type_converter": {"js_type_converter": None},
    }
    for name, attributes in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, f"bfcl_eval.{name}", module)
    return Path(folder)


def near_values(value):
    """Return values that are near a value, or of other types."""
    values = [0, 1, 1.0, True, "x", "", [], [1], ["a"], {}, {"a": 1}, None, [value], str(value)]
    if isinstance(value, str):
        values += [value.upper(), value + ".", value.replace(" ", ""), value + "x"]
    if isinstance(value, (int, float)):
        values += [float(value), int(value), value + 1, -value]
    if isinstance(value, list):
        values += [value[::-1], value[:-1], value + value[:1], [str(item).upper() for item in value]]
    if isinstance(value, dict):
        values += [{**value, "z": 1}, dict(list(value.items())[1:]), {key: str(item) for key, item in value.items()}]
    return values


def mutated(calls, generator):
    """Return calls with one change."""
    calls = copy.deepcopy(calls)
    call = generator.choice(calls)
    arguments = call["arguments"]
    changes = ("repeat", "drop", "shuffle", "rename", "add an argument", "drop an argument", "change an argument")
    match generator.choices(changes, weights=[1, 1, 1, 1, 1, 1, 3])[0]:
        case "repeat":
            calls.append(copy.deepcopy(call))
        case "drop":
            calls.remove(call)
        case "shuffle":
            generator.shuffle(calls)
        case "rename":
            call["name"] += "x"
        case "add an argument":
            arguments["extra"] = 1
        case "drop an argument" if arguments:
            arguments.pop(generator.choice(list(arguments)))
        case "change an argument" if arguments:
            name = generator.choice(list(arguments))
            arguments[name] = generator.choice(near_values(arguments[name]))
    return calls


@pytest.mark.slow
def test_verdicts_are_those_of_the_leaderboard(wheel):
    """On the calls of the ground truth, and on twenty mutations of each row's: 21,000 verdicts, in seconds."""
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
    python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
    generator = random.Random(0)
    compared = 0
    different = []
    for row in TASK.load("eval", f"{wheel}:simple,multiple,parallel,parallel_multiple"):
        columns = row["loaded_row"]
        functions, ground_truth = columns["functions"], columns["ground_truth"]
        reference = [call["function"] for call in TASK.gold(row)[0]["tool_calls"]]
        for calls in [reference, *(mutated(reference, generator) for _ in range(20))]:
            decoded = [{call["name"]: call["arguments"]} for call in copy.deepcopy(calls)]
            theirs = checker(functions, decoded, ground_truth, python, columns["category"], "model")["valid"]
            compared += 1
            if bfcl.agrees(calls, ground_truth, functions) != theirs or (calls is reference and not theirs):
                different.append((row["id"], calls))
    assert (compared, different) == (21_000, [])
