"""MBPP and MBPP+: short Python problems, each with a sentence and asserts, or a file in the same format.

The task ids define the splits: 601 to 974 for training and 11 to 510 for evaluation. A file is split the same way if it
has ids from both ranges and none outside 1 to 974. Otherwise, all rows of the file are used for either split. MBPP+ is
evaluated on all of its rows, as in EvalPlus; those from 601 are for training.

Source: Austin et al. 2021 (arXiv:2108.07732), https://github.com/google-research/google-research/tree/master/mbpp, and
Liu et al. 2023 (arXiv:2305.01210), https://github.com/evalplus/evalplus (`evalplus/data/mbpp.py` of 0.3.1). The
question is the prompt in MBPP's README without `[BEGIN]`, which is for models that are not chat-tuned.
"""

import ast
from collections.abc import Mapping
from typing import Any

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.grading import Row, bound_names, programs
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import with_record
from lora_grpo.tasks.evalplus_columns import plus_columns

HUB_DATASET, PLUS_DATASET = "google-research-datasets/mbpp", "evalplus/mbppplus"
COLUMNS = ("text", "code", "task_id", "test_list", "test_setup_code")
_UPSTREAM_IDS = range(1, 975)
_SPLIT_IDS = {"train": range(601, 975), "eval": range(11, 511)}
_QUESTION = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n{tests}"
)

_SLOW = "amicable_numbers_sum"
"""The function of MBPP/123, whose reference program takes 5 seconds. Those of all other rows pass in 3."""

check = programs.check
check_many = programs.check_many
gold = programs.gold


def load(split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Return the rows of a split; see `Task.load`."""
    if sources.is_on_hub(source or HUB_DATASET):
        return read(source, split, columns)
    rows = read(source, columns=columns)
    ids = {_number(row) for row in rows}
    if ids <= {*_UPSTREAM_IDS} and all(not ids.isdisjoint(part) for part in _SPLIT_IDS.values()):
        return [row for row in rows if _number(row) in _SPLIT_IDS[split]]
    return rows


def load_plus(split: str, source: str | None = None) -> list[Row]:
    """Return the rows of MBPP+, from a file of EvalPlus's release or from the Hub."""
    source = source or PLUS_DATASET
    records = sources.read(source, "test", ("task_id", "prompt"))
    rows = sources.unique([_plus_row(record, where) for where, record in records], source)
    return rows if split == "eval" else [row for row in rows if _number(row) in _SPLIT_IDS["train"]]


def read(
    source: str | None, split: str = "train+validation+test+prompt", columns: Mapping[str, str] | None = None
) -> list[Row]:
    """Return the rows of a split, by default of all of them."""
    source = source or HUB_DATASET
    records = sources.read(source, split, COLUMNS[:-1], columns, "full" if source == HUB_DATASET else None)
    rows = [with_record(_row(record, where), record, where) for where, record in records]
    return sources.unique(rows, source)


def _number(row: Row) -> int:
    """Return the MBPP task number, or 0 if the id is not a number."""
    number = row["id"].removeprefix("mbpp/")
    return int(number) if number.isdecimal() and len(number) < 9 else 0


def _asserts(record: Row, where: str) -> list[str]:
    """Return the asserts of a row. A CSV cell holds them as a list in Python or JSON, or as plain statements."""
    tests = record.get("test_list")
    if isinstance(tests, str):
        try:
            tests = ast.literal_eval(tests.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            tests = [tests]
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) and t.strip() for t in tests):
        raise UserError(f"{where}: 'test_list' is {tests!r:.60}; expected a list of assert statements")
    return [test.replace("\r\n", "\n").strip() for test in tests]


def _row(record: Row, where: str) -> Row:
    text, code = (part.replace("\r\n", "\n") for part in sources.texts(record, ("text", "code"), where))
    asserts, setup = "\n".join(_asserts(record, where)), str(record.get("test_setup_code") or "")
    test = f"{setup.replace(chr(13), '')}\n{asserts}\n".lstrip("\n")
    body = sources.check_python(code, "code", where).body
    tree = sources.check_python(test, "test_list", where)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    entry_point = _entry_point(body, tree, where)
    helpers = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))} & used - {entry_point}
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom)) and bound_names(node) & used]
    return {
        "id": f"mbpp/{record['task_id']}",
        "question": _QUESTION.format(text=text.strip(), tests=asserts),
        "answer": code,
        "entry_point": entry_point,
        # Some tests construct their arguments with classes from the program.
        "functions": [entry_point, *sorted(helpers)],
        "test": test,
        # Tests use the real modules, even if the candidate assigns other values to their names.
        "prelude": "\n".join(map(ast.unparse, imports)),
        **({"seconds": sandbox.LONGEST} if entry_point == _SLOW else {}),
    }


def _entry_point(body: list[ast.stmt], tree: ast.Module, where: str) -> str:
    """Return the first function that the tests call and that the reference program defines."""
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in defined:
            return node.func.id
    raise UserError(f"{where}: 'test_list' calls no function that 'code' defines; fix the row or remove it")


def _plus_row(record: Row, where: str) -> Row:
    """Return a row of MBPP+. The question shows one assert, as in the release."""
    number = str(record["task_id"]).removeprefix("Mbpp/")
    if "base_input" in record:
        prompt, entry_point, code = sources.texts(record, ("prompt", "entry_point", "canonical_solution"), where)
        text, _, first = prompt.strip().removeprefix('"""').removesuffix('"""').partition("\nassert ")
        shown = f"assert {first.strip()}"
    else:
        text, code = sources.texts(record, ("prompt", "code"), where)
        shown = _asserts(record, where)[0]
        tree = sources.check_python(shown, "test_list", where)
        entry_point = _entry_point(sources.check_python(code, "code", where).body, tree, where)
    return {
        "id": f"mbpp/{number}",
        "question": _QUESTION.format(text=text.strip(), tests=shown),
        "answer": code,
        "entry_point": entry_point,
        **plus_columns(record, where, code, entry_point, lambda call: _arguments(number, call)),
    }


_TYPES = {
    ("t",) * 9: "2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809",
    ("lt",) * 9: "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780",
    ("tt",) * 9: "259 278 401 445",
    ("t" * 9,) * 9: "580 615 791",
    ("t",): "250 307 405 446 617 720 763 808",
    ("lt",): "75 413 444 753",
    ("", "t"): "106 750",
    ("ls",): "115",
    ("f", "c"): "124",
    ("c",): "252",
    ("dt",): "722",
}
"""The types of the arguments of tasks, from the outside: tuple, list, set, dict, float, complex. A release is JSON."""


def _arguments(number: str, call: list[Any]) -> list[Any]:
    kinds = next((kinds for kinds, numbers in _TYPES.items() if number in numbers.split()), ())
    return [_typed(value, kind) for value, kind in zip(call, (*kinds, *[""] * len(call)), strict=False)]


def _typed(value: Any, kinds: str) -> Any:
    inner = kinds[1:]
    match kinds[:1]:
        case "f" | "c":
            return {"f": float, "c": complex}[kinds](value)
        case "d":
            return {key: _typed(item, inner) for key, item in value.items()}
        case "s":
            return set(value) if isinstance(value, list) and value else {}  # as in EvalPlus
        case "t" | "l" if isinstance(value, list):
            return {"t": tuple, "l": list}[kinds[0]](_typed(item, inner) for item in value)
    return value
