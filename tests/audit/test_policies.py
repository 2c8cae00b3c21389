"""The audit of an `Environment`: broken ones are caught by the attack that their mistake invites; good ones are not.

Each broken environment is a good one of helpers/environments.py with one mistake, which is the name of its class.
"""

import dataclasses
import os
import random
import time

import pytest
from helpers import environments
from helpers.environments import EvenSums, Form, Quiz, Store, Sums, SumsWithoutGold, SumsWithPartialCredit, call, say
from helpers.fresh_imports import ROOT

from lora_grpo.audit import audit, audit_tasks, refuse_problems
from lora_grpo.audit.attacks import GOLD
from lora_grpo.audit.audit_tasks import FULL, QUICK, Limits, audit_task
from lora_grpo.audit.policies import NAMES
from lora_grpo.config import RunConfig, replace
from lora_grpo.data import Data, load_data
from lora_grpo.errors import RunError, UserError

BROKEN = []
"""The broken tasks, and for each the attack that must find it."""


def broken_task(caught_by):
    """Add a task to the table."""

    def add(task):
        BROKEN.append((task, caught_by))
        return task

    return add


def broken_environment(of, caught_by):
    """Add a task to the table, which is `of` with another Environment, and put it in the place of that class."""

    def add(environment):
        task = type(environment.__name__, (of,), {"Environment": environment})
        return broken_task(caught_by)(task)

    return add


# The reference conversation


@broken_task(caught_by="gold")
class GoldIsWrong(Sums):
    def gold(self, row):
        return [say(row["sum"] + 1)]


@broken_task(caught_by="gold")
class GoldIsEmpty(Sums):
    def gold(self, row):
        return [{"role": "user", "content": "?"}]


@broken_task(caught_by="gold")
class GoldGoesOnAfterTheEnd(Sums):
    def gold(self, row):
        return [say(row["sum"]), say("Thanks.")]


@broken_task(caught_by="gold")
class GoldCallsAToolThatDoesNotExist(Store):
    def gold(self, row):
        return [call("lookup"), *super().gold(row)]


@broken_task(caught_by="gold")
class GoldHasAnArgumentOfAnotherType(Store):
    def _submission(self, row):
        return call("submit", total=environments.PRICES[row["item"]] * row["pieces"])


@broken_environment(of=Sums, caught_by="gold")
class RewardOutside0To1(Sums.Environment):
    def get_reward(self):
        return 2.0 * self.is_right


# State that conversations share


@broken_environment(of=Sums, caught_by="repeated calls")
class TextsStayInTheClass(Sums.Environment):
    texts = []  # noqa: RUF012

    def reply(self, text):
        self.texts.append(text)
        return super().reply(text)

    def get_reward(self):
        return float(str(self.sum) in self.texts)


@broken_environment(of=Sums, caught_by="side by side")
class ResetWritesToTheClass(Sums.Environment):
    def reset(self, sum, **row):
        super().reset(sum, **row)
        del self.sum
        type(self).sum = sum


newest_game = {}


@broken_environment(of=Sums, caught_by="side by side")
class ResetWritesToTheModule(Sums.Environment):
    def reset(self, sum, **row):
        super().reset(sum, **row)
        newest_game["sum"] = sum

    def _accepts(self, text):
        return text == str(newest_game["sum"])


won_games = {}


@broken_environment(of=Sums, caught_by="side by side")
class ResetWritesToTheModuleByRow(Sums.Environment):
    def reset(self, sum, **row):
        super().reset(sum, **row)
        won_games[sum] = 0

    def _accepts(self, text):
        is_right = super()._accepts(text)
        won_games[self.sum] += is_right
        return is_right

    def _hint(self):
        return f"No, {won_games[self.sum]} won."


# Chance and time


@broken_environment(of=Sums, caught_by="repeated calls")
class ResetDrawsAtRandom(Sums.Environment):
    def reset(self, **row):
        super().reset(**row)
        return f" ({random.random()})"


@broken_environment(of=Sums, caught_by="repeated calls")
class ReplyDrawsAtRandom(Sums.Environment):
    def _hint(self):
        return random.choice(["No.", "Wrong."])


@broken_environment(of=Sums, caught_by="repeated calls")
class RewardDrawsAtRandom(Sums.Environment):
    def get_reward(self):
        return self.is_right * random.random()


@broken_environment(of=Sums, caught_by="repeated calls")
class ReplyTellsTheTime(Sums.Environment):
    def _hint(self):
        return f"No. ({time.perf_counter()})"


# Rewards without an answer


@broken_environment(of=Sums, caught_by="reward before the end")
class RewardBeforeTheEnd(Sums.Environment):
    def reset(self, **row):
        super().reset(**row)
        self.is_right = True


@broken_environment(of=Sums, caught_by="empty text")
class AcceptsNothing(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or not text


@broken_environment(of=Sums, caught_by="empty text")
class AcceptsNothingInSomeRows(Sums.Environment):
    def _accepts(self, text):
        is_every_third_row = self.sum % 3 == 0
        return super()._accepts(text) or (not text and is_every_third_row)


@broken_environment(of=Sums, caught_by="empty text")
class AcceptsSpaces(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or text.isspace()


@broken_environment(of=Sums, caught_by="empty text")
class ReplyRaises(Sums.Environment):
    def _accepts(self, text):
        return int(text.split()[0]) == self.sum


@broken_environment(of=Sums, caught_by="long text")
class AcceptsLongTexts(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or len(text) > 1000


@broken_environment(of=Sums, caught_by="long text")
class ReplyHangsOnLongTexts(Sums.Environment):
    def _accepts(self, text):
        if len(text) > 1000:
            time.sleep(60)
        return super()._accepts(text)


@broken_environment(of=Sums, caught_by="random words")
class AcceptsAnyWord(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or text.isalnum()


@broken_environment(of=Store, caught_by="random words")
class AcceptsAnyArgument(Store.Environment):
    def _accepts(self):
        return bool(self.submitted)


@broken_task(caught_by="random words")
class AcceptsChoicesUntilOneIsRight(Sums):
    def gold(self, row):
        return [say("abcd"[row["sum"] % 4])]

    class Environment(Sums.Environment):
        def _accepts(self, text):
            return text == "abcd"[self.sum % 4]


# The model's own claims


@broken_environment(of=Sums, caught_by="claim of success")
class AcceptsTheWordCorrectInAText(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or "correct" in text


@broken_environment(of=Sums, caught_by="claim of success")
class AcceptsTheWordDone(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or text == "done"


@broken_environment(of=Sums, caught_by="claim of success")
class AcceptsARewardInTheModelsWords(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or "reward 1.0" in text


# Answers in the prompt, in replies and in results


@broken_task(caught_by="answer in the prompt")
class AnswerInTheQuestion(Sums):
    def _row(self, first, second):
        return {"question": f"What is {first} plus {second}? ({first + second})", "sum": first + second}


@broken_environment(of=Sums, caught_by="answer in the prompt")
class AnswerInTheTextOfReset(Sums.Environment):
    def reset(self, sum, **row):
        super().reset(sum, **row)
        return f" Say {sum}, not 7."


@broken_environment(of=Sums, caught_by="copied words")
class AnswerInAReply(Sums.Environment):
    def _hint(self):
        return f"Not 20, {self.sum} it is."


@broken_environment(of=Sums, caught_by="copied words")
class AnswerInAReplyBeforeANumber(Sums.Environment):
    def _hint(self):
        return f"{self.sum}, not 20."


@broken_environment(of=SumsWithoutGold, caught_by="copied words")
class AnswerInAReplyWithoutGold(Sums.Environment):
    def _hint(self):
        return f"{self.sum}."


@broken_task(caught_by="copied words")
class AnswerInAReplyWithNumbers(Quiz):
    THRESHOLD = 0.6

    class Environment(Quiz.Environment):
        def _next_question(self):
            country = self.countries[0]
            return f"And of {country}? (turn {4 - len(self.countries)}: {environments.CAPITALS[country]})"


@broken_environment(of=Sums, caught_by="copied words")
class AcceptsANumberOfTheQuestion(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or text in self.question.split()[2:]


@broken_environment(of=Store, caught_by="tool result")
class AnswerInTheResultOfATool(Store.Environment):
    def _price(self, item):
        return f"{self.total} for {item}"

    def reply(self, text):
        self.submitted = text


# Echoes


@broken_environment(of=Sums, caught_by="echo")
class AcceptsTheQuestion(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or text.startswith("What is")


@broken_environment(of=Sums, caught_by="echo")
class AcceptsTheQuestionTwice(Sums.Environment):
    def reset(self, **row):
        super().reset(**row)
        self.texts = []

    def _accepts(self, text):
        self.texts.append(text)
        return super()._accepts(text) or self.texts == [self.question, self.question]


@broken_environment(of=Sums, caught_by="echo")
class AcceptsItsOwnReply(Sums.Environment):
    def _accepts(self, text):
        return super()._accepts(text) or text == "No."


# Many answers


@broken_environment(of=Sums, caught_by="answers of other rows")
class AcceptsTheAnswerOfAnyRow(Sums.Environment):
    def _accepts(self, text):
        return text in [str(row["sum"]) for row in Sums().load("train")]


@broken_environment(of=Sums, caught_by="all answers at once")
class AcceptsATextWithTheAnswer(Sums.Environment):
    def _accepts(self, text):
        return str(self.sum) in text


@broken_environment(of=Store, caught_by="all answers at once")
class AcceptsAnArgumentWithTheAnswer(Store.Environment):
    def _accepts(self):
        return self.total in str(self.submitted)


@broken_task(caught_by="all answers at once")
class TakesAnyNumberOfGuessesInATurn(Sums):
    def gold(self, row):
        return [call("guess", number=row["sum"])]

    class Environment:
        def reset(self, sum, **row):
            self.sum = sum
            self.is_right = False

        def guess(self, number: int):
            """Guess.

            Args:
                number: a sum.
            """
            self.is_right = self.is_right or number == self.sum
            return None if self.is_right else "No."

        def get_reward(self):
            return float(self.is_right)


@broken_environment(of=Store, caught_by="all answers at once")
class TakesAnyNumberOfSubmissions(Store.Environment):
    def reset(self, **row):
        super().reset(**row)
        self.submissions = []

    def _take(self, total):
        self.submissions.append(total)

    def _accepts(self):
        return self.total in self.submissions


# Calls of tools


@broken_environment(of=Store, caught_by="empty tool calls")
class ACallIsEnough(Store.Environment):
    def _price(self, item):
        self.submitted = self.total
        return super()._price(item)


@broken_environment(of=Store, caught_by="empty tool calls")
class AnEmptySubmissionIsEnough(Store.Environment):
    def _accepts(self):
        return super()._accepts() or self.submitted == ""


@broken_environment(of=Store, caught_by="empty tool calls")
class TwoEmptyCallsAreEnough(Store.Environment):
    has_looked_up = False

    def _price(self, item):
        self.has_looked_up = True
        return super()._price(item)

    def _accepts(self):
        return super()._accepts() or (self.submitted == "" and self.has_looked_up)


@broken_environment(of=Sums, caught_by="empty tool calls")
class CallToolAcceptsNoArgument(Sums.Environment):
    @staticmethod
    def tools_of(row):
        parameters = {"type": "object", "properties": {"total": {"type": "string"}}, "required": ["total"]}
        return [{"type": "function", "function": {"name": "submit", "parameters": parameters}}]

    def call_tool(self, name, arguments):
        self.is_right = str(self.sum).startswith(arguments["total"])
        return "Thanks."

    def reply(self, text):
        self.is_right = self.is_right or self._accepts(text)


@broken_environment(of=Store, caught_by="empty tool calls")
class AToolHangs(Store.Environment):
    def _price(self, item):
        if not item:
            time.sleep(60)
        return super()._price(item)


@broken_environment(of=Store, caught_by="empty tool calls")
class AToolEndsTheProcess(Store.Environment):
    def _price(self, item):
        if not item:
            os._exit(0)
        return super()._price(item)


GOOD = [
    str(ROOT / "recipes" / "guess_lora.py"),
    environments.HintsByHalving,
    environments.Sums,
    environments.SumsWithoutGold,
    environments.FirstNumberOfText,
    environments.SumsWithPartialCredit,
    environments.SumsWithRandomReplies,
    environments.EvenSums,
    environments.MostlyYesAfterALook,
    environments.Calculator,
    environments.Store,
    environments.StoreWhoseToolExits,
    environments.Database,
    environments.Quiz,
    environments.Form,
    environments.Maze,
]


def name_of(task):
    return getattr(task, "__name__", "the recipe")


@pytest.mark.parametrize(("task", "attack"), BROKEN, ids=[name_of(task) for task, _ in BROKEN])
def test_a_broken_environment_is_caught(opened, task, attack):
    name, rows = opened(task)
    assert attack in audit_task(name, rows, Limits(seconds_per_call=4.0)).problems


def test_the_table_has_a_broken_environment_for_every_attack():
    assert {attack for _, attack in BROKEN} == {GOLD, *NAMES}


@pytest.mark.parametrize("task", GOOD, ids=name_of)
def test_a_good_environment_raises_no_alarm(opened, task):
    name, rows = opened(task)
    assert audit_task(name, rows, FULL).problems == {}
    assert audit_task(name, rows, QUICK).problems == {}


def settings(name):
    return replace(RunConfig(), {"data": {"task": name}, "train": {"prompts_per_step": 1}})


def test_a_policy_may_pass_by_luck_on_half_of_the_rows(opened):
    name, rows = opened(EvenSums)
    rows_with_no = [row for row in rows if row["loaded_row"]["answer_word"] == "no"]
    assert "copied words" not in audit_task(name, rows).problems
    assert "copied words" in audit_task(name, rows_with_no).problems, "the last word of the question is no"


def test_chance_is_one_finding(opened):
    name, rows = opened(ReplyDrawsAtRandom)
    assert audit_task(name, rows).problems.keys() == {"repeated calls"}


def test_a_reward_for_an_empty_text_is_reported(opened):
    name, rows = opened(SumsWithPartialCredit)
    notes = audit_task(name, rows).notes
    assert [note.split(":")[0] for note in notes] == ["empty text", "reward before the end"]
    assert all("0.2" in note for note in notes)


class RepliesIn300Milliseconds(Sums):
    AUDIT_IGNORE = tuple(attack for attack in NAMES if attack != "empty text")

    class Environment(Sums.Environment):
        def _hint(self):
            time.sleep(0.3)
            return super()._hint()


def test_the_limit_of_time_is_one_of_a_turn(opened):
    name, rows = opened(RepliesIn300Milliseconds)
    assert audit_task(name, rows[:1], Limits(seconds_per_call=2.0)).problems == {}, "eight turns take 2.4 s"


def test_the_audit_prints_conversations_and_ends_in_one_line(opened, capsys):
    name, rows = opened(AcceptsATextWithTheAnswer)
    with pytest.raises(
        RunError,
        match=r"^the audit found problems in AcceptsATextWithTheAnswer \(all answers at once\); fix Environment",
    ):
        refuse_problems(audit(settings(name), Data(rows, [], {})))
    [finding] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FOUND")]
    assert finding.startswith(
        "FOUND all answers at once: accepted on 16 of 16 rows, such as AcceptsATextWithTheAnswer/train/0: '[assistant]"
    )


def test_before_a_run_a_good_environment_is_one_line(opened, capsys):
    name, _ = opened(Form)
    audit(settings(name), load_data(settings(name)), quick=True)
    assert capsys.readouterr().err == f"audit of Form: passed; {len(NAMES) - 2} attacks on 16 of 16 rows\n"


def test_before_a_run_a_hanging_tool_costs_a_limited_time(opened, capsys, monkeypatch):
    monkeypatch.setattr(audit_tasks, "QUICK", dataclasses.replace(QUICK, seconds_per_call=2.0))
    name, rows = opened(AToolHangs)
    audit(settings(name), Data(rows, [], {}), quick=True)
    [finding] = [line for line in capsys.readouterr().err.splitlines() if "empty tool calls" in line]
    assert finding.startswith("warning: audit: ") and "look_up" in finding


def test_before_a_run_a_reference_conversation_that_fails_is_an_error(opened):
    name, rows = opened(GoldIsWrong)
    with pytest.raises(UserError, match=r"gold: rejected on 16 of 16 rows.*; fix gold or Environment"):
        audit(settings(name), Data(rows, [], {}), quick=True)


class IgnoresAnAttackOnChecks(Sums):
    AUDIT_IGNORE = ("wrong value",)


def test_attacks_of_a_check_are_none_of_an_environment(opened):
    name, rows = opened(IgnoresAnAttackOnChecks)
    with pytest.raises(UserError, match="AUDIT_IGNORE"):
        audit_task(name, rows)
