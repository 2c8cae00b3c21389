"""MBPP and MBPP+: short Python problems, each with a sentence and asserts, or a file in the same format.

The task ids define the splits: 601 to 974 for training and 11 to 510 for evaluation. A file is split the same way if it
has ids from both ranges and none outside 1 to 974. Otherwise, all rows of the file are used for either split. MBPP+ is
evaluated on all of its rows, as in EvalPlus; those from 601 are for training.

Source: Austin et al. 2021 (arXiv:2108.07732), https://github.com/google-research/google-research/tree/master/mbpp, and
Liu et al. 2023 (arXiv:2305.01210), https://github.com/evalplus/evalplus (`evalplus/data/mbpp.py` of 0.3.1). The
question is the prompt in MBPP's README without `[BEGIN]`, which is for models that are not chat-tuned.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo import console, sandbox
from lora_grpo.errors import UserError
from lora_grpo.grading import Row, bound_names
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import with_loaded_columns
from lora_grpo.tasks.evalplus_columns import plus_columns
from lora_grpo.tasks.task import ProgramTask

_ALL_IDS = range(1, 975)
_SPLIT_IDS = {"train": range(601, 975), "eval": range(11, 511)}
_QUESTION = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n{tests}"
)

_SLOW = "amicable_numbers_sum"
"""The function of MBPP/123, whose reference program takes 5 seconds. Those of all other rows pass in 3."""


class MBPP(ProgramTask):
    """The problems with their original asserts, which the question shows."""

    COLUMNS = ("text", "code", "task_id", "test_list", "test_setup_code")
    HUB_DATASET = "google-research-datasets/mbpp"

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of a split; see `Task.load`."""
        source = source or self.HUB_DATASET
        if sources.is_on_hub(source):
            return self._read(source, split, columns)
        rows = self.load_all_splits(source, columns)
        ids = {_number(row) for row in rows}
        lacks_a_split = any(ids.isdisjoint(split_ids) for split_ids in _SPLIT_IDS.values())
        if lacks_a_split or not ids.issubset(_ALL_IDS):
            return rows
        wanted = _SPLIT_IDS[split]
        of_split = [row for row in rows if _number(row) in wanted]
        console.note(
            f"{source}: used {len(of_split)} of {len(rows)} rows for {split}, those with MBPP's task ids "
            f"{wanted[0]} to {wanted[-1]}; give other ids to rows of your own"
        )
        return of_split

    def load_all_splits(self, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of all splits of MBPP, or of a file."""
        return self._read(source or self.HUB_DATASET, "train+validation+test+prompt", columns)

    def _read(self, source: str, split: str, columns: Mapping[str, str] | None) -> list[Row]:
        required = self.COLUMNS[:-1]  # only a few rows have a `test_setup_code`
        hub_config = "full" if source == self.HUB_DATASET else None
        records = sources.read(source, split, required, columns, hub_config)
        rows = [with_loaded_columns(_row(record), record.columns, record.where) for record in records]
        return sources.unique(rows, source)


class MBPPPlus(ProgramTask):
    """The problems with the tests of EvalPlus. The question shows one assert, as in the release."""

    HUB_DATASET = "evalplus/mbppplus"

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of MBPP+, from a file of EvalPlus's release or from the Hub."""
        source = source or self.HUB_DATASET
        records = sources.read(source, "test", ("task_id", "prompt"))
        rows = sources.unique([_plus_row(record) for record in records], source)
        if split == "eval":
            return rows
        return [row for row in rows if _number(row) in _SPLIT_IDS["train"]]


def make_task(name: str) -> ProgramTask:
    """Return the task `mbpp` or `mbpp-plus`."""
    return MBPP() if name == "mbpp" else MBPPPlus()


def _number(row: Row) -> int:
    """Return the MBPP task number, or 0 if the id is not a number."""
    number = row["id"].removeprefix("mbpp/")
    is_number = number.isdecimal() and len(number) < 9
    return int(number) if is_number else 0


def _asserts(record: sources.Record) -> list[str]:
    """Return the asserts of a record. A CSV cell holds them as a list in Python or JSON, or as plain statements."""
    tests = record.columns.get("test_list")
    if isinstance(tests, str):
        try:
            tests = ast.literal_eval(tests.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            tests = [tests]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise UserError(f"{record.where}: 'test_list' is {tests!r:.60}; expected a list of assert statements")
    return [test.replace("\r\n", "\n").strip() for test in tests]


def _row(record: sources.Record) -> Row:
    text, code = sources.texts(record.columns, ["text", "code"], record.where)
    text = text.replace("\r\n", "\n")
    code = code.replace("\r\n", "\n")
    asserts = "\n".join(_asserts(record))
    setup = str(record.columns.get("test_setup_code") or "").replace("\r", "")
    test = f"{setup}\n{asserts}\n".lstrip("\n")

    program = sources.check_python(code, "code", record.where).body
    tests = sources.check_python(test, "test_list", record.where)
    used_names = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    entry_point = _entry_point(program, tests, record.where)
    # Some tests construct their arguments with classes from the program.
    definitions = {node.name for node in program if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    helpers = (definitions & used_names) - {entry_point}
    # Tests use the real modules, even if the candidate assigns other values to their names.
    imports = []
    for node in program:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and bound_names(node) & used_names:
            imports.append(ast.unparse(node))

    row: Row = {
        "id": f"mbpp/{record.columns['task_id']}",
        "question": _QUESTION.format(text=text.strip(), tests=asserts),
        "answer": code,
        "entry_point": entry_point,
        "functions": [entry_point, *sorted(helpers)],
        "test": test,
        "prelude": "\n".join(imports),
    }
    if entry_point == _SLOW:
        row["seconds"] = sandbox.MAX_PROGRAM_SECONDS
    return row


def _entry_point(program: list[ast.stmt], tests: ast.Module, where: str) -> str:
    """Return the first function that the tests call and that the reference program defines."""
    functions = {node.name for node in program if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tests):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            return node.func.id
    raise UserError(f"{where}: 'test_list' calls no function that 'code' defines; fix the row or remove it")


def _plus_row(record: sources.Record) -> Row:
    number = str(record.columns["task_id"]).removeprefix("Mbpp/")
    if "base_input" in record.columns:  # EvalPlus's release, whose prompt is a docstring that ends with the assert
        names = ["prompt", "entry_point", "canonical_solution"]
        prompt, entry_point, code = sources.texts(record.columns, names, record.where)
        docstring = prompt.strip().removeprefix('"""').removesuffix('"""')
        text, _, first_assert = docstring.partition("\nassert ")
        shown_assert = f"assert {first_assert.strip()}"
    else:  # the Hub
        text, code = sources.texts(record.columns, ["prompt", "code"], record.where)
        shown_assert = _asserts(record)[0]
        program = sources.check_python(code, "code", record.where).body
        tests = sources.check_python(shown_assert, "test_list", record.where)
        entry_point = _entry_point(program, tests, record.where)
    row: Row = {
        "id": f"mbpp/{number}",
        "question": _QUESTION.format(text=text.strip(), tests=shown_assert),
        "answer": code,
        "entry_point": entry_point,
        **plus_columns(record, code, entry_point, lambda call: _typed_arguments(number, call)),
    }
    return with_loaded_columns(row, record.columns, record.where)


# A release of EvalPlus is JSON, which has no tuples, sets and complex numbers. These are the types of the arguments of
# MBPP's functions, by task number. A type is written from the outside: ("list", "tuple") is a list of tuples, and ()
# stays as it is.
_Type = tuple[str, ...]
_TYPE_OF_EVERY_ARGUMENT: dict[_Type, str] = {
    ("tuple",): "2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809",
    ("list", "tuple"): "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780",
    ("tuple", "tuple"): "259 278 401 445",
    ("tuple",) * 9: "580 615 791",  # at any depth
}
_TYPES_BY_POSITION: dict[tuple[_Type, ...], str] = {
    (("tuple",),): "250 307 405 446 617 720 763 808",
    (("list", "tuple"),): "75 413 444 753",
    ((), ("tuple",)): "106 750",
    (("list", "set"),): "115",
    (("float",), ("complex",)): "124",
    (("complex",),): "252",
    (("dict", "tuple"),): "722",
}


def _typed_arguments(number: str, call: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call in a release with the types of MBPP's task of this number."""
    for argument_type, numbers in _TYPE_OF_EVERY_ARGUMENT.items():
        if number in numbers.split():
            return [_typed(argument, argument_type) for argument in call]
    for argument_types, numbers in _TYPES_BY_POSITION.items():
        if number in numbers.split():
            typed = [_typed(argument, type_) for argument, type_ in zip(call, argument_types, strict=False)]
            return [*typed, *call[len(typed) :]]
    return list(call)


def _typed(value: Any, argument_type: _Type) -> Any:
    if not argument_type:
        return value
    outer, *inner = argument_type
    item_type = tuple(inner)
    match outer:
        case "float":
            return float(value)
        case "complex":
            return complex(value)
        case "dict":
            return {key: _typed(item, item_type) for key, item in value.items()}
        case "set":
            # As in EvalPlus, an empty set is an empty dictionary.
            return set(value) if isinstance(value, list) and value else {}
        case "tuple" if isinstance(value, list):
            return tuple(_typed(item, item_type) for item in value)
        case "list" if isinstance(value, list):
            return [_typed(item, item_type) for item in value]
    return value
