"""Function calls: the single-turn Python categories of the Berkeley Function-Calling Leaderboard (BFCL).

    pip download bfcl-eval --no-deps && python -m zipfile -e bfcl_eval-*.whl bfcl_wheel
    lora-grpo evaluate RUN --task bfcl --data.eval bfcl_wheel                # all of CATEGORIES
    lora-grpo evaluate RUN --task bfcl --data.eval bfcl_wheel:multiple       # some of them, with commas between them
    lora-grpo train task --task bfcl --data.train my_calls.jsonl --data.eval bfcl_wheel

Rows of a file have a `question`, `functions` (described as in BFCL) and `ground_truth`, [] if no function fits.

The model's calls are parsed as in conversations and graded by the leaderboard's rules. A row without ground truth
passes with a text and without calls. A call that cannot be parsed, and a turn that is cut, fail in every row: the
leaderboard counts them as no call, and a model would be rewarded for writing them. Names of functions keep their dots.

Source: https://github.com/ShishirPatil/gorilla (`eval_checker/ast_eval/ast_checker.py`), bfcl-eval 2026.3.23.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, suggestion
from lora_grpo.grading import Row, Verdict
from lora_grpo.tasks.sources import read_rows
from lora_grpo.tasks.task_file import TaskFile, task_of_module

CATEGORIES = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance")
MAX_TURNS = 1
AUDIT_IGNORE = ("empty text", "long text")  # both are no call, which is right in a row without ground truth

_PYTHON_TYPES = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
"""The type of an argument in the model's JSON, by the type in BFCL's descriptions."""
_SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""The types of JSON schemas that have other names in BFCL's descriptions."""


def make_task(name: str) -> TaskFile:
    """Return the task: this module has the form of a task file."""
    return task_of_module(Path(__file__), sys.modules[__name__])


def load(split: str, source: str | None = None) -> list[Row]:
    """Return the rows of a file, or those of categories of an unpacked wheel."""
    folder_name, _, categories = (source or "").partition(":")
    folder = Path(folder_name).expanduser()
    if source and folder.is_dir():
        return _read_wheel(folder, categories.split(",") if categories else CATEGORIES)
    rows = read_rows(source, split)
    for number, row in enumerate(rows):
        for column in ("functions", "ground_truth"):
            if not isinstance(row.get(column), list):
                raise UserError(f"{source} row {number}: {column} is {row.get(column)!r:.60}; expected a list")
    return rows


def gold(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of the row's ground truth, or a text without calls."""
    functions_by_name = {function["name"]: function for function in row["functions"]}
    calls = []
    for expected_call in row["ground_truth"]:
        [(name, allowed_values)] = expected_call.items()
        required = functions_by_name[name]["parameters"].get("required", ())
        call = {"name": name, "arguments": _first_allowed(allowed_values, required)}
        calls.append({"type": "function", "function": call})
    if not calls:
        return [{"role": "assistant", "content": "None of the functions fits this question."}]
    return [{"role": "assistant", "content": "", "tool_calls": calls}]


class Environment:
    """The only turn of a row."""

    def reset(self, functions: Any, ground_truth: Any, **row: Any) -> None:
        self.functions = functions
        self.ground_truth = ground_truth
        self.calls: list[Mapping[str, Any]] | None = None
        """The calls of the turn; None if it was cut, or if one of them cannot be parsed."""

    @staticmethod
    def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the JSON schemas of a row's functions."""
        return [{"type": "function", "function": _json_schema(function)} for function in row["functions"]]

    def take_calls(self, calls: Sequence[Mapping[str, Any]]) -> None:
        self.calls = [call["function"] for call in calls]

    def reply(self, text: str) -> None:
        self.calls = []

    def get_reward(self) -> Verdict:
        if self.calls is not None and agrees(self.calls, self.ground_truth, self.functions):
            return Verdict(True, "correct")
        return Verdict(False, "wrong_answer" if self.calls else "no_call")


def agrees(
    calls: Sequence[Mapping[str, Any]], ground_truth: Sequence[Mapping[str, Any]], functions: Sequence[Any]
) -> bool:
    """Return whether calls are those of the ground truth, in any order.

    Args:
        calls: each with a `name` and `arguments`.
        ground_truth: for each call, {name: {argument: [allowed values]}}. "" allows to leave an argument out.
        functions: their descriptions.
    """
    if len(calls) != len(ground_truth):
        return False
    functions_by_name = {function["name"]: function for function in functions}
    remaining_calls = list(calls)
    for expected_call in ground_truth:  # each takes the first call that fits, as in the source
        [(name, allowed_values)] = expected_call.items()
        for call in remaining_calls:
            if call["name"] == name and _arguments_fit(call["arguments"], allowed_values, functions_by_name[name]):
                remaining_calls.remove(call)
                break
        else:
            return False
    return True


def _arguments_fit(
    arguments: Mapping[str, Any], allowed_values: Mapping[str, list], function: Mapping[str, Any]
) -> bool:
    properties = function["parameters"]["properties"]
    required = set(function["parameters"].get("required", ()))
    required |= {name for name, values in allowed_values.items() if "" not in values}
    known = properties.keys() & allowed_values.keys()
    if required - arguments.keys() or arguments.keys() - known:
        return False
    return all(_is_allowed(value, allowed_values[name], properties[name]) for name, value in arguments.items())


def _is_allowed(value: Any, allowed_values: list, schema: Mapping[str, Any]) -> bool:
    """Return whether a value has an allowed type and is one of the allowed values.

    The allowed types are the described one and that of the allowed values. If these differ, the allowed values are the
    names of variables, and are compared as they are.
    """
    described_type = _PYTHON_TYPES[schema["type"]]
    item_type = None
    if schema["type"] in ("array", "tuple"):
        item_type = _PYTHON_TYPES[schema["items"]["type"]]
    allowed_type = _type_of_first(allowed_values)
    if schema["type"] == "float" and type(value) is int:
        value = float(value)

    # The type.
    if type(value) is described_type:
        if item_type and not _items_have_type(value, allowed_values, item_type):
            return False
        is_variable = allowed_type not in (None, described_type)
    elif allowed_type is not None and type(value) is allowed_type:
        is_variable = True
    else:
        return False

    # The value.
    if is_variable:
        return value in allowed_values
    if described_type is dict:
        return any(_object_fits(value, allowed) for allowed in allowed_values)
    if item_type is dict:
        return any(_objects_fit(value, allowed) for allowed in allowed_values)
    return any(_standardized(value) == _standardized(allowed) for allowed in allowed_values)


def _type_of_first(allowed_values: list) -> type | None:
    """Return the type of the first allowed value; None if the argument may only be left out."""
    return next((type(allowed) for allowed in allowed_values if allowed != ""), None)


def _items_have_type(items: Any, allowed_values: list, item_type: type) -> bool:
    """Return whether the items of a list have the described type, or that of the items of an allowed list."""
    for allowed in allowed_values:
        if not isinstance(allowed, list):  # a variable, or "": as in the source, any items pass
            return True
        item_types = (item_type, _type_of_first(allowed))
        if all(type(item) in item_types for item in items):
            return True
    return False


def _objects_fit(values: Any, allowed_objects: Any) -> bool:
    """Return whether each value in a list fits the allowed object at the same place."""
    if not isinstance(allowed_objects, list) or len(values) != len(allowed_objects):
        return False
    return all(_object_fits(value, allowed) for value, allowed in zip(values, allowed_objects, strict=True))


def _object_fits(value: Any, allowed_values: Any) -> bool:
    """Return whether a value is an object with allowed values, and with all keys that cannot be left out.

    Args:
        allowed_values: {key: [allowed values]}. "" allows to leave a key out. Anything else allows no object.
    """
    if not isinstance(value, dict) or not isinstance(allowed_values, dict) or value.keys() - allowed_values.keys():
        return False
    missing_keys = allowed_values.keys() - value.keys()
    if any("" not in allowed_values[key] for key in missing_keys):
        return False
    for key, item in value.items():
        if _standardized(item) not in [_standardized(allowed) for allowed in allowed_values[key]]:
            return False
    return True


def _standardized(value: Any) -> Any:
    """Return a text without spaces, punctuation and case, or a list with such texts. Other values stay."""
    if isinstance(value, list):
        return [_standardized_text(item) for item in value]
    return _standardized_text(value)


def _standardized_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')


def _first_allowed(allowed: Any, required: Sequence[str] = ()) -> Any:
    """Return the first allowed value of each argument, without those that may be left out."""
    if isinstance(allowed, list):
        return [_first_allowed(item) for item in allowed]
    if not isinstance(allowed, dict):
        return allowed
    first_values = {}
    for name, values in allowed.items():
        if name in required or "" not in values:
            first_value = next((value for value in values if value != ""), "")
            first_values[name] = _first_allowed(first_value)
    return first_values


def _json_schema(description: Any) -> Any:
    """Return a description with the types of JSON schemas."""
    if isinstance(description, list):
        return [_json_schema(item) for item in description]
    if not isinstance(description, dict):
        return description
    schema = {name: _json_schema(item) for name, item in description.items()}
    bfcl_type = description.get("type")
    if isinstance(bfcl_type, str):  # else `type` is the name of an argument
        schema["type"] = _SCHEMA_TYPES.get(bfcl_type, bfcl_type)
    return schema


def _read_wheel(folder: Path, categories: Sequence[str]) -> list[Row]:
    rows = []
    for category in categories:
        if category not in CATEGORIES:
            raise UserError(f"no category {category!r}; {suggestion(category, CATEGORIES)}")
        name_in_wheel = "simple_python" if category == "simple" else category
        file_name = f"BFCL_v4_{name_in_wheel}.json"
        path = next(folder.rglob(f"data/{file_name}"), None)
        if path is None:
            raise UserError(
                f"{folder / 'bfcl_eval' / 'data' / file_name} is missing; unpack the wheel bfcl-eval in {folder}: "
                "pip download bfcl-eval --no-deps"
            )
        answers = path.parent / "possible_answer" / file_name
        ground_truth = {}
        if answers.is_file():  # no function fits in the rows of `irrelevance`
            ground_truth = {answer["id"]: answer["ground_truth"] for answer in _read_lines(answers)}
        for record in _read_lines(path):
            rows.append(
                {
                    "id": record["id"],
                    "prompt": record["question"][0],
                    "category": category,
                    "functions": record["function"],
                    "ground_truth": ground_truth.get(record["id"], []),
                }
            )
    return rows


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
