"""EvalPlus's side of the comparison of verdicts, run by an interpreter that has evalplus 0.3.1, NumPy and psutil.

    python evalplus_side.py rows DATA OUT    # writes rows in the form of EvalPlus's release
    python evalplus_side.py grade FOLDER     # reads programs.jsonl and the rows, writes verdicts.json

The rows are built from HumanEval and MBPP: the arguments of their tests, and changed ones.
"""

import ast
import copy
import gzip
import io
import json
import random
import signal
import sys
import types
import warnings
from contextlib import redirect_stdout
from pathlib import Path

NUM_PLUS = 12
SECONDS = 0.5


def as_json(value):
    """Return the value with lists for tuples and sets, or raise TypeError if JSON has no such value."""
    if isinstance(value, (list, tuple, set)):
        return [as_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: as_json(item) for key, item in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is complex:
        return str(value)
    raise TypeError(type(value))


def is_json(value):
    try:
        as_json(value)
    except TypeError:
        return False
    return True


def changed(value, rng):
    """Return a similar value: the deterministic counterpart of EvalPlus's type-aware mutation."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, value * 2, value + rng.randint(2, 20), abs(value)])
    if isinstance(value, float):
        return rng.choice([value + 0.5, value * 1.5, value - 1.0, round(value, 1)])
    if isinstance(value, str):
        index = rng.randrange(len(value) + 1)
        kinds = [value.swapcase(), value[:index] + value[index + 1 :], value * 2, value[::-1]]
        return rng.choice([*kinds, value[:index] + rng.choice("aZ 1(") + value[index:]])
    if isinstance(value, list) and value:
        index = rng.randrange(len(value))
        kind = rng.randrange(4)
        if kind == 0:
            return value[:index] + value[index + 1 :]
        if kind == 1:
            return [*value, copy.deepcopy(value[index])]
        return [*value[:index], changed(value[index], rng), *value[index + 1 :]]
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return {**value, key: changed(value[key], rng)}
    return value


def stop(*_):
    raise TimeoutError


def works(program, entry_point, call, convert):
    """Return whether the program answers in time."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        namespace = {}
        exec(program, namespace)
        namespace[entry_point](*convert(copy.deepcopy(call)))
    except Exception:  # noqa: BLE001 - any
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def recorded(program, entry_point, test):
    """Return the arguments of the calls of a function in its tests."""
    calls = []
    namespace = {}
    exec(program, namespace)
    function = namespace[entry_point]

    def recorder(*args):
        calls.append(copy.deepcopy(args))
        return function(*args)

    tests = {**namespace, entry_point: recorder}
    exec(test, tests)
    return calls


def inputs(program, entry_point, calls, rng, convert):
    base = [as_json(call) for call in calls[:20] if is_json(call)]
    base = [call for call in base if works(program, entry_point, call, convert)]
    plus = []
    for _ in range(20 * NUM_PLUS if base else 0):
        call = [changed(value, rng) if rng.random() < 0.7 else value for value in rng.choice(base)]
        small = len(json.dumps(call)) < 2000
        if len(plus) < NUM_PLUS and small and call not in base + plus and works(program, entry_point, call, convert):
            plus.append(call)
    return {"base_input": base, "plus_input": plus}


def humaneval(folder):
    lines = gzip.decompress((folder / "humaneval" / "HumanEval.jsonl.gz").read_bytes()).decode().splitlines()
    for row in map(json.loads, lines):
        program = row["prompt"] + row["canonical_solution"]
        name = row["entry_point"]
        random.seed(0)
        calls = recorded(program, name, f"{row['test']}\ncheck({name})")
        columns = {key: row[key] for key in ("task_id", "prompt", "entry_point", "canonical_solution")}
        columns |= inputs(program, name, calls, random.Random(row["task_id"]), list)
        yield {**columns, "atol": 1e-4 if name == "find_zero" else 0, "contract": ""}


def mbpp(folder, convert):
    for line in (folder / "mbpp" / "mbpp.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        program = row["code"].replace("\r\n", "\n")
        defined = {node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)}
        called = [node.func for node in ast.walk(ast.parse("\n".join(row["test_list"]))) if isinstance(node, ast.Call)]
        name = next(node.id for node in called if isinstance(node, ast.Name) and node.id in defined)
        task = f"Mbpp/{row['task_id']}"
        try:
            calls = recorded(program, name, "\n".join([row["test_setup_code"], *row["test_list"]]))
        except Exception:  # noqa: BLE001 - its tests need more than the function
            calls = []
        inputs_of_row = inputs(
            program, name, calls, random.Random(task), lambda call, task=task: convert(task, [call])[0]
        )
        if inputs_of_row["base_input"]:  # not if JSON has no such arguments
            yield {
                "task_id": task,
                "prompt": f'"""\n{row["text"]}\n{row["test_list"][0]}\n"""\n',
                "entry_point": name,
                "canonical_solution": program,
                **inputs_of_row,
                "atol": 0,
                "contract": "",
                "assertion": "\n".join(row["test_list"]),
            }


def write(data, out, convert):
    signal.signal(signal.SIGALRM, stop)
    for name, rows in (("humaneval", humaneval(data)), ("mbpp", mbpp(data, convert))):
        with redirect_stdout(io.StringIO()):
            lines = [json.dumps(row) + "\n" for row in rows]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def grade(folder, convert):
    """Write whether each program passes, by EvalPlus's own functions, as `evalplus.evaluate` calls them."""
    from evalplus.eval import PASS, untrusted_check
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec

    verdicts = []
    for dataset in ("humaneval", "mbpp"):
        programs = [json.loads(line) for line in (folder / f"{dataset}.programs.jsonl").open(encoding="utf-8")]
        rows = {}
        for line in (folder / f"{dataset}.jsonl").open(encoding="utf-8"):
            row = json.loads(line)
            rows[row["task_id"]] = row
            for part in ("base", "plus"):
                if dataset == "mbpp":
                    row[f"{part}_input"] = convert(row["task_id"], row[f"{part}_input"])
                with redirect_stdout(io.StringIO()):
                    row[part] = trusted_exec(
                        row["prompt"] + row["canonical_solution"],
                        row[f"{part}_input"],
                        row["entry_point"],
                        record_time=True,
                        output_not_none=dataset == "mbpp" and row["entry_point"] in MBPP_OUTPUT_NOT_NONE_TASKS,
                    )
        for task, source in programs:
            row = rows[task]
            statuses = []
            for part in ("base", "plus"):
                expected, seconds = row[part]
                arguments = row[f"{part}_input"], row["entry_point"], expected, row["atol"], seconds
                status, _ = untrusted_check(dataset, source, *arguments, fast_check=True)
                statuses.append(status)
                if status != PASS:
                    break
            verdicts.append(statuses == [PASS, PASS])
    (folder / "verdicts.json").write_text(json.dumps(verdicts), encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.modules["datasets"] = types.ModuleType("datasets")  # evalplus.data imports it, for another benchmark
    sys.modules["datasets"].load_dataset = None
    from evalplus.data.mbpp import mbpp_deserialize_inputs

    if sys.argv[1] == "rows":
        write(Path(sys.argv[2]), Path(sys.argv[3]), mbpp_deserialize_inputs)
    else:
        grade(Path(sys.argv[2]), mbpp_deserialize_inputs)
