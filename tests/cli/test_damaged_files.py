"""Files of every kind that commands read, damaged in every standard way: one line, no traceback, nothing written."""

import gzip
import json
import random
import runpy

import pyarrow
import pyarrow.parquet
import pytest
from helpers import report_runs
from helpers.damage import VALUES, WHOLE, content, damaged, outcome, places, with_value
from helpers.fresh_imports import RECIPES
from helpers.made_runs import make_run
from helpers.pushed_runs import make_merged, write_evaluation
from helpers.pushed_runs import make_run as make_pushed_run

from lora_grpo.cli import parse
from lora_grpo.config import DataConfig, RunConfig
from lora_grpo.data import load_split
from lora_grpo.evaluation import EvaluateOptions, evaluate_and_report, read_report
from lora_grpo.hub import PushOptions, push_to_hub
from lora_grpo.merging import read_report as read_merge_report
from lora_grpo.models import ModelFlags, resolve
from lora_grpo.runs import read_run

PRESETS = runpy.run_path(str(RECIPES[0].with_name("gsm8k_lora.py")))["PRESETS"]
NUM_VALUES = 5
"""Values that are tried for each JSON file, at random places of it."""


def damages(path):
    """Yield the name of each damage of a file and a function of its path."""
    yield from WHOLE.items()
    if path.suffix not in (".json", ".jsonl"):
        return
    if path.suffix == ".jsonl":
        first_line, *other_lines = path.read_text().splitlines()
    else:
        first_line, other_lines = path.read_text(), []
    value = json.loads(first_line)
    changes = [(place, text) for place in places(value) if place for text in VALUES]
    for place, text in random.Random(path.name).sample(changes, min(NUM_VALUES, len(changes))):
        damaged_text = "\n".join([with_value(value, place, text), *other_lines]) + "\n"
        name = f"{'.'.join(map(str, place))} = {text[:20]}"
        yield name, lambda path, damaged_text=damaged_text: path.write_text(damaged_text)


def check(folder, paths, main):
    """Run a command on each damaged file. It succeeds, or it ends in one line and writes nothing."""
    exit_code, stderr = outcome(main)
    assert exit_code == 0, stderr
    for path in paths:
        for name, damage in damages(path):
            case = f"{path.name}, {name}"
            with damaged(path, damage):
                content_before = content(folder)
                exit_code, stderr = outcome(main)
                errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
                assert (exit_code, len(errors)) in ((0, 0), (1, 1), (2, 1)), f"{case}: {exit_code}, {stderr}"
                if exit_code != 0:
                    assert content(folder) == content_before, case


def files(folder, *suffixes):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes)


def test_a_run_that_is_read(tmp_path):
    record = {
        "alarms": [{"step": 1, "name": "nan", "message": "x", "stopped": False}],
        "best": {"step": 1, "reward": 0.5, "accuracy": 0.4},
        "start": {"name": "x", "run": "../x"},
    }
    run = report_runs.write_run(tmp_path / "run", **record)
    (run / "validation").mkdir()
    (run / "validation" / "step-00000.jsonl").write_text((run / "completions" / "step-00001.jsonl").read_text())
    check(run, files(run, ".json", ".jsonl"), lambda: (read_run(run), read_report(run / "evaluation")))


@pytest.mark.slow
def test_a_run_that_is_pushed(tmp_path):
    run = make_pushed_run(tmp_path / "run")
    make_merged(run)
    write_evaluation(run, run / "adapter")
    for what in ("adapter", "merged"):
        options = PushOptions(str(run), "me/x", what=what, dry_run=True)
        paths = [*files(run / what, ".json", ".jinja", ".safetensors"), *files(run / "evaluation", ".json")]
        check(run, [*paths, run / "run.json"], lambda options=options: push_to_hub(options))


def test_a_run_that_is_resolved(tmp_path):
    run = make_run(tmp_path / "run")
    check(run, files(run, ".json"), lambda: resolve(str(run), ModelFlags()).identity)


def test_the_report_of_a_merge(tmp_path):
    merged = make_merged(make_pushed_run(tmp_path / "run"))
    check(merged, [merged / "merge_report.json"], lambda: read_merge_report(merged))


@pytest.mark.parametrize("name", ["settings.json", "settings.yaml"])
def test_a_settings_file(name, tmp_path):
    path = tmp_path / name
    path.write_text(json.dumps(RunConfig(output_dir=str(tmp_path / "run")).to_dict()))
    arguments = ["--config", str(path), "--plan", "--preset", "starter"]
    check(tmp_path, [path], lambda: parse(arguments, recipe="gsm8k_lora", description="", presets=PRESETS))


ROWS = [{"question": f"What is {number} + 1?", "answer": f"so #### {number + 1}"} for number in range(4)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
MBPP = {"task_id": 1, "text": "Write f", "code": "def f(): return 1", "test_list": ["assert f() == 1"]}
HUMANEVAL = {
    "task_id": "HumanEval/1",
    "prompt": "def f():\n    'One.'\n",
    "canonical_solution": "    return 1\n",
    "entry_point": "f",
    "test": "def check(f):\n    assert f() == 1\n",
}


@pytest.mark.parametrize(
    "name", ["gsm8k.jsonl", "gsm8k.csv", "gsm8k.parquet", "gsm8k.jsonl.gz", "mbpp.jsonl", "humaneval.jsonl"]
)
def test_rows(name, tmp_path):
    path = tmp_path / name
    task = name.partition(".")[0]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(LINES.encode()))
    elif path.suffix == ".csv":
        path.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in ROWS))
    elif task == "gsm8k":
        path.write_text(LINES)
    else:
        path.write_text(json.dumps({"mbpp": MBPP, "humaneval": HUMANEVAL}[task]) + "\n")
    data = DataConfig(task, train=str(path), eval=str(path))
    check(tmp_path, [path], lambda: load_split(data, "eval"))


def test_samples_and_what_an_evaluation_leaves(tmp_path):
    samples = tmp_path / "samples.jsonl"
    rows = tmp_path / "rows.jsonl"
    output = tmp_path / "out"
    rows.write_text(LINES)
    lines = [{"task_id": f"gsm8k/test/{number}", "completion": f"#### {number + 1}"} for number in range(4)]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = EvaluateOptions(str(samples), task="gsm8k", data=str(rows), output_dir=output)
    check(tmp_path, [samples], lambda: evaluate_and_report(options))
    check(tmp_path, [output / "evaluation.json", output / "results.jsonl"], lambda: evaluate_and_report(options))
