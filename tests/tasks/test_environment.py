"""Environments of tasks: tools, replies, rewards, wrong classes, and the text of turns."""

import contextlib
import itertools
import json
import time

import pydantic
import pytest
from transformers.utils import get_json_schema
from trl import chat_template_utils

from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.data import fit_data, gold_episodes, load_data
from lora_grpo.errors import UserError
from lora_grpo.grading import CheckError
from lora_grpo.models import base_model
from lora_grpo.prompts import chat, turns
from lora_grpo.rollouts import Episode, grade
from lora_grpo.tasks import get_task


class Numbers:
    """Rows for the tasks below: what is a number plus 1?"""

    def load(self, split):
        numbers = range(12) if split == "train" else range(20, 24)
        return [{"question": f"What is {number} plus 1?", "number": number} for number in numbers]


def called(name, **arguments):
    """Return a tool call as an entry of `tool_calls`."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


class Adder(Numbers):
    """Tools add numbers, fail, and take the answer."""

    class Environment:
        def reset(self, number, **row):
            self.number = number
            self.given_answer = None
            self.additions = 0
            return " Use the tools."

        def add(self, a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: the first number.
                b: the second number.
            """
            self.additions += 1
            return a + b

        async def fail(self, how: str) -> str:
            """Fail.

            Args:
                how: slowly, or with an exception.
            """
            while how == "slowly":
                with contextlib.suppress(Exception):  # a tool that goes on after every exception
                    pass
            raise KeyError(how)

        def answer(self, number: int) -> str:
            """Give the answer.

            Args:
                number: the answer.
            """
            self.given_answer = number
            return "ok"

        def _hidden(self):
            pass

        def get_reward(self):
            return float(self.given_answer == self.number + 1)

    def gold(self, row):
        return [
            {"role": "assistant", "content": "", "tool_calls": [called("add", a=row["number"], b=1)]},
            {"role": "tool", "name": "add", "content": "anything"},
            {"role": "assistant", "content": "So:", "tool_calls": [called("answer", number=row["number"] + 1)]},
            {"role": "assistant", "content": "Done."},
        ]


class AdderOfOneSecond(Adder):
    SECONDS_PER_CALL = 1.0


class AdderThatRaises(Adder):
    RAISE_ERRORS = True


class Guesses(Numbers):
    """The environment says "No." until the answer is right, three times at most."""

    MAX_TURNS = 3

    class Environment:
        def reset(self, number, **row):
            self.number = number
            self.is_right = False

        def reply(self, text):
            self.is_right = text.strip() == str(self.number + 1)
            return None if self.is_right else "No."

        def get_reward(self):
            return float(self.is_right)


class Text:
    """An object whose text is what a function returns."""

    def __init__(self, make_text):
        self.make_text = make_text

    def __str__(self):
        return self.make_text()


class Evaluator(Numbers):
    """A tool returns the value of an expression, which may be anything."""

    SECONDS_PER_CALL = 1.0

    class Environment:
        def reset(self, **row):
            self.numbers = []

        def show(self, result: str):
            """Show a result.

            Args:
                result: in Python.
            """
            return eval(result)

        def say(self, number: float):
            """Say a number.

            Args:
                number: any.
            """
            self.numbers.append(number)

        def get_reward(self):
            return float(bool(self.numbers))


class EvaluatorThatRaises(Evaluator):
    RAISE_ERRORS = True


class EvaluatorThatTakesCalls(Evaluator):
    class Environment(Evaluator.Environment):
        def take_calls(self, calls):
            self.numbers = calls[0]["function"]["arguments"]["result"]


class WithoutReply:
    """What an environment needs beside tools or `reply`."""

    def reset(self, **row):
        pass

    def get_reward(self):
        return 1


class WithReply(WithoutReply):
    def reply(self, text):
        pass


# How the tests play


@pytest.fixture
def settings_of(known_task):
    """Return a function that returns the settings of a run of a task."""

    def settings(task, **changes):
        return replace(RunConfig(), {"data": {"task": known_task(task)}, **changes})

    return settings


@pytest.fixture
def tokenizer():
    tokenizer = base_model.load_tokenizer(ModelConfig())
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    return tokenizer


@pytest.fixture
def begin(settings_of, tokenizer):
    """Return a function that begins an episode of the first row of a task."""

    def first_episode(task, budget=1000):
        row = load_data(settings_of(task)).train[0]
        prompt = chat.render_row(tokenizer, row)
        response_format = turns.response_format(tokenizer) if row["tools"] else None
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return Episode(row, prompt, prompt_ids, tokenizer, [tokenizer.eos_token_id], budget, response_format)

    return first_episode


def take(episode, text, truncated=False):
    """Let an episode take a turn of the model, and return the text of its last message."""
    token_ids = episode.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not truncated:
        token_ids.append(episode.tokenizer.eos_token_id)
    episode.take(token_ids, text, [-1.0] * len(token_ids), truncated)
    return episode.messages[-1]["content"]


def call(name, **arguments):
    """Return the text of a tool call in the format of Qwen2.5."""
    return tool_call(json.dumps({"name": name, "arguments": arguments}))


def tool_call(text):
    return f"<tool_call>\n{text}\n</tool_call>"


# Calls


def test_schemas_are_those_that_trl_gives_the_template(settings_of):
    config = settings_of(Adder)
    task = get_task(config.data.task)
    instance = task.environment.python_class()
    expected = [get_json_schema(tool) for tool in (instance.add, instance.answer, instance.fail)]
    assert task.environment.schemas == expected
    row = load_data(config).train[0]
    assert row["tools"] == expected
    assert row["prompt"][-1]["content"].endswith("plus 1? Use the tools.")


def test_a_call_is_run_and_its_result_follows_as_the_template_renders_it(begin):
    episode = begin(Adder)
    assert take(episode, call("add", a=0, b=1)) == "1"
    assert take(episode, "Well. " + call("answer", number=1)) == "ok"
    take(episode, "Done.")
    assert (episode.ended_by, episode.turns) == ("reply", 3)
    assert (episode.session.calls, episode.session.failed_calls) == (2, 0)
    assert grade(episode.row["task"], [episode])[0].passed

    # The template begins a line for a call that follows a text; the model did not.
    conversation = episode.tokenizer.decode(episode.prompt_ids + episode.token_ids)
    rendered = chat.render(episode.tokenizer, [*episode.row["prompt"], *episode.messages], episode.row["tools"])
    assert rendered.startswith(conversation.replace("Well. <tool_call>", "Well.\n<tool_call>"))

    sampled = episode.tokenizer.decode(episode.sampled_ids)
    assert sampled == f"{call('add', a=0, b=1)}<|im_end|>Well. {call('answer', number=1)}<|im_end|>Done.<|im_end|>"
    assert [logprob != 0 for logprob in episode.logprobs] == [is_sampled != 0 for is_sampled in episode.loss_mask]


WRONG_CALLS = {
    "an argument is missing": call("add", a=0),
    "an argument of another type": call("add", a="0", b=1),
    "an unknown argument": call("add", a=0, b=1, c=2),
    "a fraction for an integer": call("add", a=0.5, b=1),
    "an unknown tool": call("subtract", a=0, b=1),
    "a private method": call("_hidden"),
    "the reward": call("get_reward"),
    "the reset": call("reset", n=1),
    "a brace is missing": tool_call('{"name": "add", "arguments": {"a": 0, "b": 1}'),
    "the end is missing": '<tool_call>\n{"name": "add", "arguments": {"a": 0, "b": 1}}',
    "a list of arguments": tool_call('{"name": "add", "arguments": [0, 1]}'),
    "a list": tool_call('["add"]'),
    "a text": tool_call('"add"'),
    "a list as name": tool_call('{"name": ["add"], "arguments": {}}'),
    "no arguments": tool_call('{"name": "add"}'),
    "the tool raises": call("fail", how="loudly"),
}


@pytest.mark.parametrize("text", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_is_answered_with_an_error_and_counted(begin, text):
    episode = begin(Adder)
    assert take(episode, text).startswith("error: ") and episode.text
    assert episode.session.failed_calls == 1
    assert episode.session.environment.additions == 0
    assert not episode.is_over
    take(episode, "I give up.")
    assert episode.ended_by == "reply"
    assert not grade(episode.row["task"], [episode])[0].passed


def test_a_tool_that_hangs_has_a_time_limit(begin):
    episode = begin(AdderOfOneSecond)
    started = time.monotonic()
    assert "took more than 1 s" in take(episode, call("fail", how="slowly"))
    assert time.monotonic() - started < 30
    assert episode.session.failed_calls == 1


def test_an_exception_in_a_tool_can_stop_the_run(begin):
    with pytest.raises(CheckError, match="loudly"):
        take(begin(AdderThatRaises), call("fail", how="loudly"))


@pytest.mark.parametrize(
    "result", ["10 ** 5000", "(1, 10 ** 5000)", "Text(lambda: time.sleep(9))", "Text(lambda: 1 / 0)", "Text(lambda: 5)"]
)
def test_a_result_without_a_text_is_an_error(begin, result):
    episode = begin(Evaluator)
    assert take(episode, call("show", result=result)).startswith("error: ")
    assert episode.session.failed_calls == 1
    assert not episode.is_over


class Model(pydantic.BaseModel):
    number: int


RAISES_VALIDATION_ERROR = ["pydantic.TypeAdapter(int).validate_python('x')", "Model(number='x')"]
"""What a tool does with pydantic in its body, which is not about its arguments."""


@pytest.mark.parametrize("result", RAISES_VALIDATION_ERROR)
def test_a_validation_error_of_a_tool_is_not_one_of_its_arguments(begin, result):
    episode = begin(Evaluator)
    assert take(episode, call("show", result=result)).startswith("error: ValidationError: ")
    assert episode.session.failed_calls == 1


@pytest.mark.parametrize("result", RAISES_VALIDATION_ERROR)
def test_a_validation_error_of_a_tool_can_stop_the_run(begin, result):
    with pytest.raises(CheckError, match="ValidationError"):
        take(begin(EvaluatorThatRaises), call("show", result=result))


@pytest.mark.parametrize("task", [Adder, AdderThatRaises])
def test_a_refused_argument_is_named_and_never_stops_the_run(begin, task):
    assert take(begin(task), call("add", a="0", b=1)).startswith("error: argument 'a': ")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_no_tool_gets_a_number_that_is_not_finite(begin, number):
    episode = begin(Evaluator)
    assert take(episode, tool_call(f'{{"name": "say", "arguments": {{"number": {number}}}}}')).startswith("error: ")
    # As of a format that is not JSON.
    [result] = episode.session.answer({"tool_calls": [called("say", number=float(number))]})
    assert result["content"].startswith("error: ")
    assert episode.session.failed_calls == 2
    assert episode.session.environment.numbers == []


def test_calls_that_are_taken_may_be_nested(begin):
    episode = begin(EvaluatorThatTakesCalls)
    nested = "[" * 600 + "]" * 600
    take(episode, tool_call(f'{{"name": "show", "arguments": {{"result": {nested}}}}}'))
    assert (episode.ended_by, episode.session.calls, episode.verdict.passed) == ("reply", 1, True)
    assert nested in episode.text


# Tools that are known only when a row is


def schema(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


class Shop(Numbers):
    """The tools depend on the row; `stop` is a method, the others are not."""

    SECONDS_PER_CALL = 0.2

    class Environment(WithoutReply):
        def reset(self, number, **row):
            self.calls = []

        @staticmethod
        def tools_of(row):
            return [schema(f"buy_{row['number']}", pieces={"type": "integer"}), schema("wait"), schema("stop")]

        def call_tool(self, name, arguments):
            self.calls.append((name, arguments))
            if name == "wait":
                time.sleep(60)
            return 10 // arguments["pieces"]

        def stop(self) -> str:
            """Stop."""
            return "stopped"


class ShopThatRaises(Shop):
    RAISE_ERRORS = True


class AsyncShop(Shop):
    class Environment(Shop.Environment):
        async def call_tool(self, name, arguments):
            return super().call_tool(name, arguments)


@pytest.mark.parametrize("task", [Shop, AsyncShop])
def test_a_tool_that_is_no_method_is_called_by_name(begin, task):
    episode = begin(task)
    name = f"buy_{episode.row['loaded_row']['number']}"
    assert take(episode, call(name, pieces=2)) == "5"
    assert episode.messages[-1]["name"] == name
    assert take(episode, call("stop")) == "stopped", "a method with the name of a tool"
    assert episode.session.environment.calls == [(name, {"pieces": 2})]
    assert (episode.session.calls, episode.session.failed_calls) == (2, 0)


def test_a_failed_call_of_such_a_tool_is_answered_with_an_error(begin):
    episode = begin(Shop)
    name = f"buy_{episode.row['loaded_row']['number']}"
    assert take(episode, call(name, pieces=0)).startswith("error: ZeroDivisionError")
    assert "0.2 s" in take(episode, call("wait"))
    assert "no tool named 'buy_99'" in take(episode, call("buy_99", pieces=1)), "the row has no such tool"
    assert [called_name for called_name, _ in episode.session.environment.calls] == [name, "wait"]
    assert episode.session.failed_calls == 3 and not episode.is_over


def test_an_exception_in_such_a_tool_can_stop_the_run(begin):
    episode = begin(ShopThatRaises)
    name = f"buy_{episode.row['loaded_row']['number']}"
    with pytest.raises(CheckError, match=f"{name} raised ZeroDivisionError"):
        take(episode, call(name, pieces=0))


class Ledger(Numbers):
    """Gets all calls of a turn. The results are what a test has put into the class."""

    class Environment(WithoutReply):
        results = None

        @staticmethod
        def tools_of(row):
            return [schema("book")]

        def take_calls(self, calls):
            return self.results


def test_results_of_taken_calls_go_on_with_the_conversation(begin, monkeypatch):
    episode = begin(Ledger)
    monkeypatch.setattr(Ledger.Environment, "results", ["first", "second"])
    take(episode, call("book") + "\n" + call("book"))
    assert [message["content"] for message in episode.messages[1:]] == ["first", "second"]
    assert [message["name"] for message in episode.messages[1:]] == ["book", "book"]
    assert not episode.is_over and episode.session.calls == 2

    monkeypatch.setattr(Ledger.Environment, "results", None)
    take(episode, call("book"))
    assert (episode.ended_by, episode.session.calls) == ("reply", 3)


@pytest.mark.parametrize("results", [[], ["a", "b"], "a", [1], True])
def test_wrong_results_of_taken_calls_stop_the_run(begin, monkeypatch, results):
    monkeypatch.setattr(Ledger.Environment, "results", results)
    with pytest.raises(CheckError, match=r"take_calls returned .* for 1 calls; expected a list") as error:
        take(begin(Ledger), call("book"))
    assert "\n" not in str(error.value)


# Replies and results that are hard to write


class RepliesHalfACharacter(Numbers):
    class Environment(WithoutReply):
        def reply(self, text):
            return "No" + chr(0xD800)


class RepliesAtLength(Numbers):
    class Environment(WithoutReply):
        def reply(self, text):
            return "No " * 7_000_000


@pytest.mark.parametrize(
    ("task", "turn"),
    [
        (RepliesHalfACharacter, "5"),
        (Evaluator, call("show", result="chr(0xD800)")),
        (Evaluator, call("show", result="exec('raise ValueError(chr(0xD800))')")),
    ],
)
def test_half_a_character_does_not_end_the_episode(begin, task, turn):
    episode = begin(task)
    take(episode, turn)
    take(episode, turn)
    assert not episode.is_over and episode.turns == 2


@pytest.mark.parametrize(
    ("task", "turn"), [(RepliesAtLength, "5"), (Evaluator, call("show", result="'No ' * 7_000_000"))]
)
def test_a_huge_answer_is_not_tokenized(begin, monkeypatch, task, turn):
    episode = begin(task)
    monkeypatch.setattr(turns, "following_text", None)
    take(episode, turn)
    assert episode.ended_by == "budget" and episode.messages[-1]["role"] == "assistant"


# How conversations end


def test_a_conversation_ends_at_the_limit_of_turns(begin):
    episode = begin(Guesses)
    assert take(episode, "5") == "No."
    assert take(episode, "no idea") == "No."
    take(episode, call("add", a=1, b=2))
    assert (episode.ended_by, episode.turns, episode.verdict.reason) == ("limit", 3, "turn_limit")


def test_a_conversation_ends_where_reply_returns_none(begin):
    episode = begin(Guesses)
    take(episode, "1")
    assert episode.ended_by == "reply" and episode.verdict.passed
    assert episode.loss_mask == [1] * len(episode.token_ids)


def test_a_reply_for_which_no_tokens_are_left_is_left_out(begin):
    episode = begin(Guesses, budget=12)
    take(episode, "5")
    assert episode.ended_by == "budget" and not episode.truncated
    assert episode.messages[-1]["role"] == "assistant"


def test_a_truncated_turn_ends_the_conversation(begin):
    episode = begin(Guesses)
    take(episode, "1 is the", truncated=True)
    assert episode.ended_by == "budget" and episode.truncated
    assert episode.verdict.reason == "token_limit"


def test_reference_conversations_are_played(settings_of, tokenizer):
    rows = load_data(settings_of(Adder)).train
    for row, episode in zip(rows, gold_episodes(tokenizer, rows), strict=True):
        assert episode.verdict.passed and episode.turns == 3
        roles = [message["role"] for message in episode.messages]
        assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]
        assert episode.messages[1]["content"] == str(row["number"] + 1), "the environment answers, not the reference"
        conversation = tokenizer.decode(episode.prompt_ids + episode.token_ids)
        assert chat.render(tokenizer, [*row["prompt"], *episode.messages], row["tools"]).startswith(conversation)


# Wrong classes

WRONG_TASKS = []
"""Tasks that are refused, and for each a word of the message."""


def refused_for(word):
    """Add a task to the table."""

    def add(task):
        WRONG_TASKS.append((task, word))
        return task

    return add


@refused_for("'reset'")
class HasNoReset(Numbers):
    class Environment:
        def reply(self, text):
            pass

        def get_reward(self):
            return 1


@refused_for("'get_reward'")
class HasNoReward(Numbers):
    class Environment:
        def reset(self, **row):
            pass

        def reply(self, text):
            pass


@refused_for("neither")
class HasNeitherToolsNorReply(Numbers):
    Environment = WithoutReply


@refused_for("'add'")
class ToolHasAnArgumentWithoutAType(Numbers):
    class Environment(WithoutReply):
        def add(self, a, b: int):
            """Add two numbers.

            Args:
                a: a number.
                b: a number.
            """


@refused_for("Strange")
class ToolHasAnUnknownType(Numbers):
    class Environment(WithoutReply):
        def add(self, a: "Strange", b: int):  # noqa: F821
            """Add two numbers.

            Args:
                a: a number.
                b: a number.
            """


@refused_for("'add'")
class ToolHasAnArgumentWithoutADescription(Numbers):
    class Environment(WithoutReply):
        def add(self, a: int, b: int):
            """Add two numbers.

            Args:
                b: a number.
            """


@refused_for("KeyError")
class ResetRaises(Numbers):
    class Environment(WithReply):
        def reset(self, **row):
            raise KeyError("number")


@refused_for("5")
class ResetReturnsANumber(Numbers):
    class Environment(WithReply):
        def reset(self, **row):
            return 5


@refused_for("MAX_TURNS")
class HasNoTurns(Numbers):
    MAX_TURNS = 0
    Environment = WithReply


@refused_for("SECONDS_PER_CALL")
class HasANegativeTimeLimit(Numbers):
    SECONDS_PER_CALL = -1
    Environment = WithReply


@refused_for("top level")
class HasAConstantInTheEnvironment(Numbers):
    class Environment(WithReply):
        MAX_TURNS = 4


@refused_for("both")
class HasACheckToo(Numbers):
    Environment = WithReply

    def check(self, completion, row):
        return True


@refused_for("question")
class HasNoQuestion:
    Environment = WithReply

    def load(self, split):
        return [{"number": 1}]


@refused_for("tools_of(row)")
class HasACallToolWithoutSchemas(Numbers):
    class Environment(WithReply):
        def call_tool(self, name, arguments):
            pass


@refused_for("tools_of returned ['look_up']")
class HasNamesForSchemas(Numbers):
    class Environment(WithReply):
        @staticmethod
        def tools_of(row):
            return ["look_up"]


@refused_for("tools_of returned None")
class HasNoSchemas(Numbers):
    class Environment(WithReply):
        @staticmethod
        def tools_of(row):
            return None


@refused_for("add is static")
class HasAStaticTool(Numbers):
    class Environment(WithReply):
        @staticmethod
        def add():
            pass


@refused_for("add is static")
class HasAToolOfTheClass(Numbers):
    class Environment(WithReply):
        @classmethod
        def add(cls):
            pass


@refused_for("Add is static")
class HasAClassAsTool(Numbers):
    class Environment(WithReply):
        class Add:
            pass


@pytest.mark.parametrize(("task", "word"), WRONG_TASKS, ids=[task.__name__ for task, _ in WRONG_TASKS])
def test_a_wrong_environment_is_refused_in_one_line(settings_of, task, word):
    with pytest.raises((UserError, CheckError)) as error:
        load_data(settings_of(task))
    assert word in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, "1", 2, -0.1, float("nan")])
def test_a_wrong_reward_stops_the_run(begin, value):
    class Rewards(Numbers):
        class Environment(WithReply):
            def get_reward(self):
                return value

    with pytest.raises(CheckError, match="get_reward"):
        take(begin(Rewards), "1")


openings = itertools.count()


class ResetReturnsAnotherTextEachTime(Numbers):
    class Environment(WithReply):
        def reset(self, **row):
            return str(next(openings))


def test_a_random_reset_stops_the_run(begin):
    with pytest.raises(CheckError, match="random"):
        begin(ResetReturnsAnotherTextEachTime)


# Settings


def test_a_completion_without_tokens_for_the_reference_is_refused(settings_of, tokenizer):
    config = settings_of(Adder, sampling={"max_completion_tokens": 8})
    with pytest.raises(UserError, match="max-completion-tokens"):
        fit_data(load_data(config), tokenizer, config)


def test_a_model_without_a_chat_template_is_refused(settings_of):
    config = settings_of(Adder)
    tokenizer_without_template = base_model.load_tokenizer(ModelConfig())
    with pytest.raises(UserError, match="chat template"):
        fit_data(load_data(config), tokenizer_without_template, config)


@pytest.mark.parametrize(
    ("changes", "message"), [({"model": {"engine": "unsloth"}}, "engine peft"), ({"data": {"few_shot": 1}}, "few-shot")]
)
def test_settings_that_leave_no_conversation_are_refused(settings_of, changes, message):
    config = replace(settings_of(Adder), changes)
    with pytest.raises(UserError, match=message):
        load_data(config)


def test_an_episode_has_the_columns_that_its_environment_got(begin):
    episode = begin(Guesses)
    assert episode.row["loaded_row"]["number"] == episode.session.environment.number
