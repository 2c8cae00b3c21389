"""A task of function calls: the single-turn Python categories of the Berkeley Function-Calling Leaderboard (BFCL).

    pip download bfcl-eval --no-deps && python -m zipfile -e bfcl_eval-*.whl bfcl
    lora-grpo evaluate RUN --task tools/bfcl.py --data.eval bfcl              # all of CATEGORIES
    lora-grpo evaluate RUN --task tools/bfcl.py --data.eval bfcl:multiple     # some of them, with commas between them
    lora-grpo train task --task tools/bfcl.py --data.train my_calls.jsonl --data.eval bfcl

Rows of a file have a `question`, `functions` (described as in BFCL) and `ground_truth`, [] if no function fits.

The model's calls are parsed as in conversations and graded by the leaderboard's rules; a text that cannot be parsed is
no call. A row without ground truth passes without calls. Names of functions keep their dots.

Source: https://github.com/ShishirPatil/gorilla (`eval_checker/ast_eval/ast_checker.py`), bfcl-eval 2026.3.23.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, suggestion
from lora_grpo.grading import Row, Verdict
from lora_grpo.tasks import read_rows

CATEGORIES = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance")
MAX_TURNS = 1
AUDIT_IGNORE = ("empty text", "long text")  # both are no call, which is right in a row without ground truth
_TYPES = {"string": str, "integer": int, "float": float, "boolean": bool, "array": list, "tuple": list, "dict": dict}
_TYPES |= {"any": str}
_SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


class Environment:
    """The only turn of a row."""

    def reset(self, functions: Any, ground_truth: Any, **row: Any) -> None:
        self.functions, self.truth = functions, ground_truth
        self.called: list[Mapping[str, Any]] | None = None

    @staticmethod
    def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the JSON schemas of a row's functions."""
        return [{"type": "function", "function": _schema(each)} for each in row["functions"]]

    def take_calls(self, calls: Sequence[Mapping[str, Any]]) -> None:
        self.called = [call["function"] for call in calls]

    def reply(self, text: str) -> None:
        self.called = []

    def get_reward(self) -> Verdict:
        passed = self.called is not None and agrees(self.called, self.truth, self.functions)
        return Verdict(passed, "correct" if passed else "wrong_answer" if self.called else "no_call")


def load(split: str, source: str | None = None) -> list[Row]:
    """Return the rows of a file, or those of categories of an unpacked wheel."""
    name, _, chosen = (source or "").partition(":")
    folder = Path(name).expanduser()
    if source and folder.is_dir():
        return _read_wheel(folder, chosen.split(",") if chosen else CATEGORIES)
    rows = read_rows(source, split)
    for number, row in enumerate(rows):
        for column in ("functions", "ground_truth"):
            if not isinstance(row.get(column), list):
                raise UserError(f"{source} row {number}: {column} is {row.get(column)!r:.60}; expected a list")
    return rows


def gold(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of the row's ground truth, or a text without calls."""
    calls = []
    for expected in row["ground_truth"]:
        [(name, allowed)] = expected.items()
        [required] = [each["parameters"].get("required", ()) for each in row["functions"] if each["name"] == name]
        function = {"name": name, "arguments": _first(allowed, required)}
        calls.append({"type": "function", "function": function})
    if not calls:
        return [{"role": "assistant", "content": "None of the functions fits this question."}]
    return [{"role": "assistant", "content": "", "tool_calls": calls}]


def agrees(calls: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]], functions: Sequence[Any]) -> bool:
    """Return whether calls are those of the ground truth, in any order.

    Args:
        calls: each with a `name` and `arguments`.
        truth: for each call, {name: {argument: [allowed values]}}. "" allows to leave an argument out.
        functions: their descriptions.
    """
    if len(calls) != len(truth):
        return False
    described, left = {each["name"]: each for each in functions}, [*calls]
    for expected in truth:  # each takes the first call that fits, as in the source
        [(name, values)] = expected.items()
        fits = (each for each in left if each["name"] == name and _fits(each["arguments"], values, described[name]))
        if (found := next(fits, None)) is None:
            return False
        left.remove(found)
    return True


def _fits(arguments: Mapping[str, Any], allowed: Mapping[str, list], function: Mapping[str, Any]) -> bool:
    properties = function["parameters"]["properties"]
    required = {*function["parameters"].get("required", ())} | {name for name in allowed if "" not in allowed[name]}
    if required - arguments.keys() or arguments.keys() - (properties.keys() & allowed.keys()):
        return False
    return all(_is_allowed(value, allowed[name], properties[name]) for name, value in arguments.items())


def _is_allowed(value: Any, allowed: list, schema: Mapping[str, Any]) -> bool:
    """Return whether a value has the described type, or that of the allowed values, and is one of them."""
    kind = _TYPES[schema["type"]]
    if schema["type"] == "float" and type(value) is int:
        value = float(value)
    item = _TYPES[schema["items"]["type"]] if schema["type"] in ("array", "tuple") else None
    other = next((type(each) for each in allowed if each != ""), None)
    is_variable = other not in (None, kind)
    if type(value) is kind and item:
        if not any(not isinstance(each, list) or all(_has_type(one, each, item) for one in value) for each in allowed):
            return False
    elif type(value) is not kind:
        if other is None or type(value) is not other:
            return False
        is_variable = True
    if is_variable:
        return value in allowed
    if kind is dict:
        return any(_is_object(value, each) for each in allowed if each != "")
    if item is dict:
        return any(
            len(value) == len(each) and all(map(_is_object, value, each)) for each in allowed if isinstance(each, list)
        )
    if kind is list:
        return _plain(value) in [_plain(each) for each in allowed]
    return _plain(value) in map(_plain, allowed)


def _has_type(value: Any, allowed: list, kind: type) -> bool:
    other = next((type(each) for each in allowed if each != ""), None)
    return type(value) is kind or (other is not None and type(value) is other)


def _is_object(value: Any, allowed: Any) -> bool:
    """Return whether an object has allowed values, and all keys that cannot be left out."""
    if not isinstance(value, dict) or not isinstance(allowed, dict) or value.keys() - allowed.keys():
        return False
    missing = any("" not in allowed[key] for key in allowed.keys() - value.keys())
    return not missing and all(_plain(each) in map(_plain, allowed[key]) for key, each in value.items())


def _plain(value: Any) -> Any:
    """Return a text without spaces, punctuation and case, and a list of such texts. Other values stay."""
    if isinstance(value, list):
        return [_plain(each) if isinstance(each, str) else each for each in value]
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"') if isinstance(value, str) else value


def _first(allowed: Any, required: Sequence[str] = ()) -> Any:
    """Return the first allowed value of each argument, without those that may be left out."""
    if isinstance(allowed, dict):
        kept = {name: [each for each in values if each != ""] or [""] for name, values in allowed.items()}
        return {name: _first(kept[name][0]) for name in allowed if name in required or "" not in allowed[name]}
    return [_first(each) for each in allowed] if isinstance(allowed, list) else allowed


def _schema(value: Any) -> Any:
    """Return a description with the types of JSON schemas."""
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    changed = {"type": _SCHEMA_TYPES.get(kind, kind)} if isinstance(kind, str) else {}
    return {name: _schema(each) for name, each in value.items()} | changed


def _read_wheel(folder: Path, chosen: Sequence[str]) -> list[Row]:
    rows = []
    for category in chosen:
        if category not in CATEGORIES:
            raise UserError(f"no category {category!r}; {suggestion(category, CATEGORIES)}")
        stem = f"BFCL_v4_{'simple_python' if category == 'simple' else category}.json"
        [path] = [*folder.rglob(f"data/{stem}")] or [folder / "bfcl_eval" / "data" / stem]
        texts = [path.read_text(encoding="utf-8")] if path.is_file() else []
        if not texts:
            raise UserError(
                f"{path} is missing; unpack the wheel bfcl-eval in {folder}: pip download bfcl-eval --no-deps"
            )
        answers = path.parent / "possible_answer" / stem
        lines = answers.read_text(encoding="utf-8").splitlines() if answers.is_file() else []
        truth = {each["id"]: each["ground_truth"] for each in map(json.loads, lines)}
        for record in map(json.loads, texts[0].splitlines()):
            given = {"functions": record["function"], "ground_truth": truth.get(record["id"], [])}
            rows.append({"id": record["id"], "prompt": record["question"][0], "category": category, **given})
    return rows
