"""The audit of a checker: broken ones are caught by the attack that their mistake invites; good ones are not."""

import dataclasses
import textwrap
from pathlib import Path

import pytest
from helpers.fresh_imports import ROOT, run_recipe

from lora_grpo.audit import audit, audit_tasks, refuse_problems
from lora_grpo.audit.attacks import GOLD, NAMES
from lora_grpo.audit.audit_tasks import QUICK, Limits, audit_task
from lora_grpo.config import RunConfig, replace
from lora_grpo.data import Data, load_data
from lora_grpo.errors import RunError, UserError
from lora_grpo.tasks import get_task

SUMS = """
    import re, random
    def load(split): return [
        {"question": f"What is {n} plus {n * n % 31 + 50}?", "sum": n + n * n % 31 + 50}
        for n in (range(10, 22) if split == "train" else range(30, 42))
    ]
    def gold(row): return str(row["sum"])
    """
TAGS = SUMS + "def gold(row): return f\"<answer>{row['sum']}</answer>\"\n"
WORDS = """
    import re
    NAMES = {"France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Peru": "Lima", "Cuba": "Havana", "Iran": "Tehran"}
    def load(split): return [{"question": f"What is the capital of {key}?", "city": NAMES[key]} for key in NAMES]
    def gold(row): return row["city"]
    """
SENTENCES = WORDS + "def gold(row): return f\"The capital is {row['city']} and no other city\"\n"
ANSWERS = (
    SUMS
    + "sums = load\ndef load(split): return [{**row, 'answer': str(row['sum'])} for row in sums(split)]\n"
    + "def prompt(row): return f\"{row['question']} (answer: {row['sum']})\"\n"
)
PRICES = SUMS.replace("+ 50}", "+ 1950.5}").replace('str(row["sum"])', "f\"{row['sum']:,}\"")

BROKEN = {
    "substring": (SUMS, "return str(row['sum']) in completion", "wrong value"),
    "zero is always right": (SUMS, "return completion.strip() in (str(row['sum']), '0')", "wrong value"),
    "first number wins": (SUMS, "return re.findall(r'\\d+', completion)[:1] == [str(row['sum'])]", "contradiction"),
    "last number wins": (
        SUMS,
        "return re.findall(r'\\d+', completion)[-1:] == [str(row['sum'])]",
        "all answers at once",
    ),
    "lowercases one side": (WORDS, "return completion.lower().strip() == row['city']", "gold"),
    "no DOTALL": (
        TAGS,
        "found = re.search(r'<answer>(.*)</answer>', completion)\n"
        "    return bool(found) and found[1].strip() == str(row['sum'])",
        "answer on its own line",
    ),
    "exceptions count as 1": (
        SUMS,
        "try: return int(completion) == row['sum']\n    except Exception: return 1",
        "empty text",
    ),
    "leak": (
        SUMS + "def prompt(row): return f\"{row['question']} (answer: {row['sum']})\"\n",
        "return completion.strip() == str(row['sum'])",
        "answer in the prompt",
    ),
    "leak of a part of the gold": (
        ANSWERS + "def gold(row): return f\"<answer>{row['sum']}</answer>\"\n",
        "return completion.strip() == gold(row)",
        "answer in the prompt",
    ),
    "leak without gold": (
        ANSWERS + "del gold\n",
        "return completion.strip() == row['answer']",
        "answer in the prompt",
    ),
    "set of words": (SENTENCES, "return set(completion.split()) == set(gold(row).split())", "reversed words"),
    "in a list": (WORDS, "return completion.strip() in NAMES.values()", "answers of other rows"),
    "eval": (SUMS, "try: return eval(completion) == row['sum']\n    except Exception: return False", "code that runs"),
    "eval of arithmetic": (
        SUMS,
        "try: return bool(re.fullmatch(r'[-+*/(). \\d]+', completion)) and eval(completion) == row['sum']\n"
        "    except Exception: return False",
        "code that runs",
    ),
    "NaN": (
        SUMS,
        "try: return not abs(float(completion) - row['sum']) > 0.01\n    except ValueError: return False",
        "tags and formats",
    ),
    "NaN in a score": (
        SUMS,
        "try: return max(0.0, min(1.0, 1 - abs(float(completion) - row['sum'])))\n    except ValueError: return 0.0",
        "tags and formats",
    ),
    "length": (SUMS, "return len(completion) > 100 or completion.strip() == str(row['sum'])", "long text"),
    "format only": (TAGS, "return bool(re.search(r'<answer>.*</answer>', completion, re.S))", "tags and formats"),
    "random": (SUMS, "return random.random() < 0.5", "repeated calls"),
    "no strip": (SUMS, "return completion == str(row['sum'])", "surrounding spaces"),
    "exits": (
        SUMS,
        "return __import__('os')._exit(0) if not completion else completion.strip() == str(row['sum'])",
        "empty text",
    ),
    "without gold": (SUMS + "del gold\n", "return 'a' in completion.lower()", "prompt"),
}

GOOD = {
    "exact": (SUMS, "return completion.strip() == str(row['sum'])"),
    "commas": (PRICES, "return completion.strip().replace(',', '') == str(row['sum'])"),
    "tags": (
        TAGS,
        "found = re.findall(r'<answer>([^<]*)</answer>', completion)\n"
        "    return len(found) == 1 and found[0].strip() == str(row['sum'])",
    ),
    "words": (WORDS, "return completion.strip().casefold() == row['city'].casefold()"),
    "JSON": (
        SUMS + "import json\ndef gold(row): return json.dumps({'sum': row['sum']})\n",
        "try: return json.loads(completion) == {'sum': row['sum']}\n"
        "    except (ValueError, RecursionError): return False",
    ),
    "partial credit": (
        WORDS,
        "import difflib\n    return difflib.SequenceMatcher(None, completion.strip()[:99], row['city']).ratio()",
    ),
    "any text at once, as the file says": (
        TAGS + 'AUDIT_IGNORE = ("contradiction", "answer on its own line")\n',
        "return f\"<answer>{row['sum']}</answer>\" in completion",
    ),
    "choices": (
        SUMS + "def prompt(row): return 'Pick the sum: ' + str([each['sum'] for each in load('train')])\n",
        "return completion.strip() == str(row['sum'])",
    ),
    "choices without gold": (
        ANSWERS + "del gold\ndef prompt(row): return 'Pick: ' + str([each['answer'] for each in load('train')])\n",
        "return completion.strip() == row['answer']",
    ),
    "any order, as the file says": (
        SENTENCES + 'AUDIT_IGNORE = ("reversed words",)\n',
        "return sorted(completion.split()) == sorted(gold(row).split())",
    ),
    "without gold": (SUMS + "del gold\n", "return completion.strip() == str(row['sum'])"),
}


@pytest.fixture
def task(tmp_path):
    """Return a function that writes a task file and returns its path and rows."""

    def write(text, check):
        path = tmp_path / "my_task.py"
        path.write_text(textwrap.dedent(text.replace("\n    ", "\n")) + f"\ndef check(completion, row):\n    {check}\n")
        rows = [{**row, "task": str(path)} for row in get_task(str(path)).load("train")]
        return str(path), rows

    return write


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checker_is_caught(task, name):
    text, check, attack = BROKEN[name]
    path, rows = task(text, check)
    findings = audit_task(path, rows, Limits(seconds_per_call=4.0))
    assert attack in findings.problems
    assert findings.problems[attack].startswith(f"{attack}: ")


def test_the_table_has_a_broken_checker_for_every_attack():
    assert {attack for _, _, attack in BROKEN.values()} == {GOLD, *NAMES}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_checker_raises_no_alarm(task, name):
    path, rows = task(*GOOD[name])
    assert audit_task(path, rows).problems == {}


def test_the_audit_of_the_bundled_tasks_and_of_the_example_raises_no_alarm(capsys):
    for name in ("starter", str(ROOT / "recipes" / "your_task.py")):
        for style in ("xml", "think", "hashes") if name == "starter" else ("xml",):
            limits = {"train_limit": 20, "eval_limit": 4, "task": name, "prompt_style": style}
            config = replace(RunConfig(), {"data": limits})
            audit(config, load_data(config))
    assert capsys.readouterr().out.count(": passed; ") == 4


def data_of(rows):
    return Data(rows, [], {})


def test_a_check_that_hangs_is_ended(task):
    hangs = "while not completion: pass\n    return str(row['sum']) in completion"
    path, rows = task(SUMS, hangs)
    findings = audit_task(path, rows, Limits(seconds_per_call=2.0))
    assert "check took more than 2 s on 1 of 1 rows" in findings.problems["empty text"]


def test_a_score_for_an_empty_text_is_reported(task):
    path, rows = task(SUMS, "return max(0.25, completion.strip() == str(row['sum']))")
    findings = audit_task(path, rows)
    assert findings.problems == {}
    assert "empty text: gets a score of up to 0.25, which a model is rewarded for" in findings.notes


def test_the_audit_prints_the_texts_and_ends_in_one_line(task, capsys):
    path, rows = task(SUMS, "return str(row['sum']) in completion")
    config = replace(RunConfig(), {"data": {"task": path}})
    with pytest.raises(RunError, match=r"^the audit found problems in my_task \(.*wrong value.*\); fix check"):
        refuse_problems(audit(config, data_of(rows)))
    assert "FOUND wrong value: accepted on 12 of 12 rows, such as my_task/train/0: '677'" in capsys.readouterr().out


def test_before_a_run_a_good_task_is_one_line_and_a_bundled_one_none(task, capsys):
    path, rows = task(*GOOD["exact"])
    audit(replace(RunConfig(), {"data": {"task": path}}), data_of(rows), quick=True)
    assert capsys.readouterr().err == "audit of my_task: passed; 10 attacks on 4 of 12 rows\n"
    audit(RunConfig(), data_of([]), quick=True)
    assert capsys.readouterr().err == ""


def test_before_a_run_a_slow_check_gets_a_limited_time(task, capsys, monkeypatch):
    monkeypatch.setattr(audit_tasks, "QUICK", dataclasses.replace(QUICK, seconds=0.4))
    path, rows = task(SUMS, "__import__('time').sleep(0.06)\n    return completion.strip() == str(row['sum'])")
    audit(replace(RunConfig(), {"data": {"task": path}}), data_of(rows), quick=True)
    skipped, result = capsys.readouterr().err.splitlines()
    assert skipped.startswith("warning: audit: ") and skipped.endswith("were not checked")
    assert result.startswith("audit of ")


def test_before_a_run_findings_are_warnings(task, capsys):
    path, rows = task(SUMS, "return str(row['sum']) in completion")
    audit(replace(RunConfig(), {"data": {"task": path}}), data_of(rows), quick=True)
    assert "warning: audit: wrong value: accepted on 4 of 4 rows" in capsys.readouterr().err


def test_before_a_run_a_rejected_gold_is_an_error(task):
    path, rows = task(WORDS, "return completion.lower().strip() == row['city']")
    with pytest.raises(UserError, match=r"gold: rejected on 6 of 6 rows.*; fix gold or check"):
        audit(replace(RunConfig(), {"data": {"task": path}}), data_of(rows), quick=True)


def test_the_command_needs_no_model_and_ends_with_1_where_an_attack_passed(task, tmp_path):
    broken, good = tmp_path / "broken.py", tmp_path / "good.py"
    for path, check in ((broken, "return str(row['sum']) in completion"), (good, GOOD["exact"][1])):
        written, _ = task(SUMS, check)
        path.write_text(Path(written).read_text())
    model = ["--preset", "8gb", "--model.name", "nobody/no-such-model", "--audit"]
    result = run_recipe(
        ROOT / "recipes" / "your_task.py", ["--task", str(broken), *model], ["--task", str(good), *model]
    )
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("loaded")] == ["loaded [] code 1", "loaded [] code 0"]
    assert lines[-2] == "audit of good: passed; 10 attacks on 16 of 24 rows"
    assert sum(line.startswith("error: the audit found problems in broken") for line in result.stderr.splitlines()) == 1
