"""Compare the verdicts of tools/bfcl.py with those of the wheel bfcl-eval, on ground truth and on mutated calls.

    PYTHONPATH=.:tools python tools/compare_bfcl.py FOLDER_OF_THE_WHEEL MUTATIONS_PER_ROW

Only the wheel's checker of Python calls is imported, so its dependencies need not be installed.
"""

import collections
import copy
import importlib
import json
import random
import sys
import types

import bfcl

random.seed(0)


def wheel_checker(folder):
    """Return the wheel's `ast_checker`, with names in place of what it imports for other languages and models."""
    sys.path.append(folder)
    model = types.SimpleNamespace(underscore_to_dot=False)
    stand_ins = {
        "constants.model_config": {"MODEL_CONFIG_MAPPING": collections.defaultdict(lambda: model)},
        "eval_checker.ast_eval.type_convertor.java_type_converter": {"java_type_converter": None},
        "eval_checker.ast_eval.type_convertor.js_type_converter": {"js_type_converter": None},
    }
    for name, values in stand_ins.items():
        module = sys.modules[f"bfcl_eval.{name}"] = types.ModuleType(name)
        vars(module).update(values)
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
    python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
    return lambda row, calls, category: checker(row["functions"], calls, row["ground_truth"], python, category, "m")


def other_values(value):
    """Return values that are near a value, or of other types."""
    found = [0, 1, 1.0, True, "x", "", [], [1], ["a"], {}, {"a": 1}, None, [value], str(value)]
    if isinstance(value, str):
        found += [value.upper(), value + ".", value.replace(" ", ""), value + "x"]
    if isinstance(value, (int, float)):
        found += [float(value), int(value), value + 1, -value]
    if isinstance(value, list):
        found += [value[::-1], value[:-1], value + value[:1], [str(each).upper() for each in value]]
    if isinstance(value, dict):
        found += [{**value, "z": 1}, dict([*value.items()][1:]), {key: str(each) for key, each in value.items()}]
    return found


def mutate(calls):
    """Return calls with one change."""
    calls = copy.deepcopy(calls)
    call = random.choice(calls)
    arguments, kind = call["arguments"], random.randrange(9)
    if kind == 0:
        calls.append(copy.deepcopy(call))
    elif kind == 1:
        calls.remove(call)
    elif kind == 2:
        random.shuffle(calls)
    elif kind == 3:
        call["name"] += "x"
    elif kind == 4:
        arguments["extra"] = 1
    elif arguments:
        name = random.choice([*arguments])
        value = arguments.pop(name)
        if kind > 5:
            arguments[name] = random.choice(other_values(value))
    return calls


def main(folder, mutations):
    check, counts = wheel_checker(folder), collections.Counter()
    for category in bfcl.CATEGORIES[:-1]:
        for row in bfcl.load("eval", f"{folder}:{category}"):
            gold = [call["function"] for call in bfcl.gold(row)[0]["tool_calls"]]
            for calls in [gold, *(mutate(gold) for _ in range(int(mutations)))]:
                decoded = [{call["name"]: call["arguments"]} for call in copy.deepcopy(calls)]
                theirs = check(row, decoded, category)["valid"]
                ours = bfcl.agrees(calls, row["ground_truth"], row["functions"])
                kind = "reference" if calls is gold else "mutated"
                counts[kind, "passed" if theirs else "failed", "same" if ours == theirs else "DIFFERENT"] += 1
                if ours != theirs:
                    print(row["id"], json.dumps(calls), json.dumps(row["ground_truth"]))
    for key, count in sorted(counts.items()):
        print(*key, count)


main(*sys.argv[1:])
