"""The audit of a checker: broken ones are caught by the attack that their mistake invites; good ones are not.

The name of a broken checker's class is its mistake.
"""

import dataclasses
import difflib
import json
import os
import random
import re
import time
from pathlib import Path

import pytest
from helpers.fresh_imports import ROOT, run_recipe

from lora_grpo.audit import audit, audit_tasks, refuse_problems
from lora_grpo.audit.attacks import GOLD, NAMES
from lora_grpo.audit.audit_tasks import QUICK, Limits, audit_task
from lora_grpo.config import RunConfig, replace
from lora_grpo.data import Data, load_data
from lora_grpo.errors import RunError, UserError

BROKEN = []
"""The broken checkers, and for each the attack that must find it."""
GOOD = []
"""Checkers in which no attack may find anything."""


def caught_by(attack):
    """Add a task to the table of broken checkers."""

    def add(task):
        BROKEN.append((task, attack))
        return task

    return add


def good(task):
    """Add a task to the good checkers."""
    GOOD.append(task)
    return task


# Rows and their references


class SumsWithoutGold:
    def load(self, split):
        numbers = range(10, 22) if split == "train" else range(30, 42)
        return [self._row(number, number * number % 31 + 50) for number in numbers]

    def _row(self, first, second):
        return {"question": f"What is {first} plus {second}?", "sum": first + second}


class Sums(SumsWithoutGold):
    def gold(self, row):
        return str(row["sum"])


class TaggedSums(SumsWithoutGold):
    def gold(self, row):
        return f"<answer>{row['sum']}</answer>"


class SumsInJson(SumsWithoutGold):
    def gold(self, row):
        return json.dumps({"sum": row["sum"]})


class SumsWithColumnAnswer(SumsWithoutGold):
    def _row(self, first, second):
        return {**super()._row(first, second), "answer": str(first + second)}


class Prices(SumsWithoutGold):
    """The reference has separators of thousands: 2,000.5."""

    def _row(self, first, second):
        return {"question": f"What is {first} plus {second + 1900.5}?", "sum": first + second + 1900.5}

    def gold(self, row):
        return f"{row['sum']:,}"


class Capitals:
    CITIES = {  # noqa: RUF012
        "France": "Paris",
        "Spain": "Madrid",
        "Italy": "Rome",
        "Peru": "Lima",
        "Cuba": "Havana",
        "Iran": "Tehran",
    }

    def load(self, split):
        return [
            {"question": f"What is the capital of {country}?", "city": city} for country, city in self.CITIES.items()
        ]

    def gold(self, row):
        return row["city"]


class CapitalsInSentences(Capitals):
    def gold(self, row):
        return f"The capital is {row['city']} and no other city"


# Broken checkers


@caught_by("gold")
class LowercasesOneSide(Capitals):
    def check(self, completion, row):
        return completion.lower().strip() == row["city"]


@caught_by("wrong value")
class AcceptsATextWithTheAnswer(Sums):
    def check(self, completion, row):
        return str(row["sum"]) in completion


@caught_by("wrong value")
class AcceptsZero(Sums):
    def check(self, completion, row):
        return completion.strip() in (str(row["sum"]), "0")


@caught_by("contradiction")
class FirstNumberCounts(Sums):
    def check(self, completion, row):
        return re.findall(r"\d+", completion)[:1] == [str(row["sum"])]


@caught_by("all answers at once")
class LastNumberCounts(Sums):
    def check(self, completion, row):
        return re.findall(r"\d+", completion)[-1:] == [str(row["sum"])]


@caught_by("answers of other rows")
class AcceptsTheAnswerOfAnyRow(Capitals):
    def check(self, completion, row):
        return completion.strip() in self.CITIES.values()


@caught_by("reversed words")
class ComparesSetsOfWords(CapitalsInSentences):
    def check(self, completion, row):
        return set(completion.split()) == set(self.gold(row).split())


@caught_by("answer on its own line")
class PatternWithoutDotall(TaggedSums):
    def check(self, completion, row):
        match = re.search(r"<answer>(.*)</answer>", completion)
        return match is not None and match[1].strip() == str(row["sum"])


@caught_by("surrounding spaces")
class StripsNoSpaces(Sums):
    def check(self, completion, row):
        return completion == str(row["sum"])


@caught_by("empty text")
class ExceptionsCountAsRight(Sums):
    def check(self, completion, row):
        try:
            return int(completion) == row["sum"]
        except ValueError:
            return True


@caught_by("empty text")
class EndsTheProcess(Sums):
    def check(self, completion, row):
        if not completion:
            os._exit(0)
        return completion.strip() == str(row["sum"])


@caught_by("long text")
class AcceptsLongTexts(Sums):
    def check(self, completion, row):
        return len(completion) > 100 or completion.strip() == str(row["sum"])


@caught_by("tags and formats")
class OnlyTheFormatCounts(TaggedSums):
    def check(self, completion, row):
        return bool(re.search(r"<answer>.*</answer>", completion, re.DOTALL))


@caught_by("tags and formats")
class AcceptsNan(Sums):
    def check(self, completion, row):
        try:
            return not abs(float(completion) - row["sum"]) > 0.01
        except ValueError:
            return False


@caught_by("tags and formats")
class AcceptsNanInAScore(Sums):
    def check(self, completion, row):
        try:
            distance = abs(float(completion) - row["sum"])
        except ValueError:
            return 0.0
        return max(0.0, min(1.0, 1 - distance))


@caught_by("code that runs")
class Evaluates(Sums):
    def check(self, completion, row):
        try:
            return eval(completion) == row["sum"]
        except Exception:  # noqa: BLE001 - of any program
            return False


@caught_by("code that runs")
class EvaluatesArithmetic(Sums):
    def check(self, completion, row):
        if not re.fullmatch(r"[-+*/(). \d]+", completion):
            return False
        try:
            return eval(completion) == row["sum"]
        except Exception:  # noqa: BLE001 - of any formula
            return False


@caught_by("repeated calls")
class DrawsAtRandom(Sums):
    def check(self, completion, row):
        return random.random() < 0.5


@caught_by("answer in the prompt")
class AnswerInThePrompt(Sums):
    def prompt(self, row):
        return f"{row['question']} (answer: {row['sum']})"

    def check(self, completion, row):
        return completion.strip() == str(row["sum"])


@caught_by("answer in the prompt")
class PartOfTheGoldInThePrompt(SumsWithColumnAnswer):
    prompt = AnswerInThePrompt.prompt
    gold = TaggedSums.gold

    def check(self, completion, row):
        return completion.strip() == self.gold(row)


@caught_by("answer in the prompt")
class ColumnAnswerInThePrompt(SumsWithColumnAnswer):
    prompt = AnswerInThePrompt.prompt

    def check(self, completion, row):
        return completion.strip() == row["answer"]


@caught_by("prompt")
class AcceptsTheLetterAWithoutGold(SumsWithoutGold):
    def check(self, completion, row):
        return "a" in completion.lower()


# Good checkers


@good
class Exact(Sums):
    def check(self, completion, row):
        return completion.strip() == str(row["sum"])


@good
class ExactWithoutGold(SumsWithoutGold):
    check = Exact.check


@good
class NumbersWithOrWithoutSeparators(Prices):
    def check(self, completion, row):
        return completion.strip().replace(",", "") == str(row["sum"])


@good
class OnePairOfTags(TaggedSums):
    def check(self, completion, row):
        answers = re.findall(r"<answer>([^<]*)</answer>", completion)
        return len(answers) == 1 and answers[0].strip() == str(row["sum"])


@good
class AnyTextAroundTags(TaggedSums):
    AUDIT_IGNORE = ("contradiction", "answer on its own line")

    def check(self, completion, row):
        return self.gold(row) in completion


@good
class UpperAndLowerCase(Capitals):
    def check(self, completion, row):
        return completion.strip().casefold() == row["city"].casefold()


@good
class DigitsThatAreNoNumbers(Capitals):
    CITIES = {  # noqa: RUF012
        "water": "H₂O",
        "ammonia": "NH₃",
        "methane": "CH₄",
        "ozone": "O₃",
        "hydrogen": "H₂",
        "a square meter": "m²",
    }

    def check(self, completion, row):
        return completion.strip() == row["city"]


@good
class PartialCredit(Capitals):
    def check(self, completion, row):
        return difflib.SequenceMatcher(None, completion.strip()[:99], row["city"]).ratio()


@good
class WordsInAnyOrder(CapitalsInSentences):
    AUDIT_IGNORE = ("reversed words",)

    def check(self, completion, row):
        return sorted(completion.split()) == sorted(self.gold(row).split())


@good
class JsonObject(SumsInJson):
    def check(self, completion, row):
        try:
            return json.loads(completion) == {"sum": row["sum"]}
        except (ValueError, RecursionError):
            return False


@good
class ChoicesInThePrompt(Exact):
    def prompt(self, row):
        return "Pick the sum: " + str([choice["sum"] for choice in self.load("train")])


@good
class ChoicesInThePromptWithoutGold(SumsWithColumnAnswer):
    def prompt(self, row):
        return "Pick: " + str([choice["answer"] for choice in self.load("train")])

    def check(self, completion, row):
        return completion.strip() == row["answer"]


@pytest.mark.parametrize(("task", "attack"), BROKEN, ids=[task.__name__ for task, _ in BROKEN])
def test_a_broken_checker_is_caught(opened, task, attack):
    name, rows = opened(task)
    findings = audit_task(name, rows, Limits(seconds_per_call=4.0))
    assert attack in findings.problems
    assert findings.problems[attack].startswith(f"{attack}: ")


def test_the_table_has_a_broken_checker_for_every_attack():
    assert {attack for _, attack in BROKEN} == {GOLD, *NAMES}


@pytest.mark.parametrize("task", GOOD, ids=lambda task: task.__name__)
def test_a_good_checker_raises_no_alarm(opened, task):
    name, rows = opened(task)
    assert audit_task(name, rows).problems == {}


@pytest.mark.parametrize(
    ("task", "style"),
    [
        ("starter", "xml"),
        ("starter", "think"),
        ("starter", "hashes"),
        (str(ROOT / "recipes" / "your_task.py"), "xml"),
    ],
)
def test_the_audit_of_the_bundled_tasks_and_of_the_example_raises_no_alarm(capsys, task, style):
    data = {"train_limit": 20, "eval_limit": 4, "task": task, "prompt_style": style}
    config = replace(RunConfig(), {"data": data})
    audit(config, load_data(config))
    assert capsys.readouterr().out.count(": passed; ") == 1


def settings(name):
    return replace(RunConfig(), {"data": {"task": name}})


def data_of(rows):
    return Data(rows, [], {})


class HangsOnAnEmptyText(AcceptsATextWithTheAnswer):
    def check(self, completion, row):
        while not completion:
            pass
        return super().check(completion, row)


def test_a_check_that_hangs_is_ended(opened):
    name, rows = opened(HangsOnAnEmptyText)
    findings = audit_task(name, rows, Limits(seconds_per_call=2.0))
    assert "check took more than 2 s on 1 of 1 rows" in findings.problems["empty text"]


class ScoresEveryText(Sums):
    def check(self, completion, row):
        return 1.0 if completion.strip() == str(row["sum"]) else 0.25


def test_a_score_for_an_empty_text_is_reported(opened):
    name, rows = opened(ScoresEveryText)
    findings = audit_task(name, rows)
    assert findings.problems == {}
    assert "empty text: gets a score of up to 0.25, which a model is rewarded for" in findings.notes


def test_the_audit_prints_the_texts_and_ends_in_one_line(opened, capsys):
    name, rows = opened(AcceptsATextWithTheAnswer)
    message = r"^the audit found problems in AcceptsATextWithTheAnswer \(.*wrong value.*\); fix check"
    with pytest.raises(RunError, match=message):
        refuse_problems(audit(settings(name), data_of(rows)))
    found = "FOUND wrong value: accepted on 12 of 12 rows, such as AcceptsATextWithTheAnswer/train/0: '677'"
    assert found in capsys.readouterr().out


def test_before_a_run_a_good_task_is_one_line_and_a_bundled_one_none(opened, capsys):
    name, rows = opened(Exact)
    audit(settings(name), data_of(rows), quick=True)
    assert capsys.readouterr().err == "audit of Exact: passed; 10 attacks on 4 of 12 rows\n"
    audit(RunConfig(), data_of([]), quick=True)
    assert capsys.readouterr().err == ""


class TakesItsTime(Exact):
    def check(self, completion, row):
        time.sleep(0.06)
        return super().check(completion, row)


def test_before_a_run_a_slow_check_gets_a_limited_time(opened, capsys, monkeypatch):
    monkeypatch.setattr(audit_tasks, "QUICK", dataclasses.replace(QUICK, seconds=0.4))
    name, rows = opened(TakesItsTime)
    audit(settings(name), data_of(rows), quick=True)
    not_checked, result = capsys.readouterr().err.splitlines()
    assert not_checked.startswith("warning: audit: ") and not_checked.endswith("were not checked")
    assert result.startswith("audit of ")


def test_before_a_run_findings_are_warnings(opened, capsys):
    name, rows = opened(AcceptsATextWithTheAnswer)
    audit(settings(name), data_of(rows), quick=True)
    assert "warning: audit: wrong value: accepted on 4 of 4 rows" in capsys.readouterr().err


def test_before_a_run_a_rejected_gold_is_an_error(opened):
    name, rows = opened(LowercasesOneSide)
    with pytest.raises(UserError, match=r"gold: rejected on 6 of 6 rows.*; fix gold or check"):
        audit(settings(name), data_of(rows), quick=True)


def test_the_command_needs_no_model_and_ends_with_1_where_an_attack_passed():
    files = Path(__file__).parent / "task_files"
    options = ["--preset", "8gb", "--model.name", "nobody/no-such-model", "--audit"]
    result = run_recipe(
        ROOT / "recipes" / "your_task.py",
        ["--task", str(files / "substring.py"), *options],
        ["--task", str(files / "exact.py"), *options],
    )
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("loaded")] == ["loaded [] code 1", "loaded [] code 0"]
    assert lines[-2] == "audit of exact: passed; 10 attacks on 16 of 24 rows"
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: the audit found problems in substring")
