"""Environments of task files: tools, replies, rewards, wrong files, and the text of turns."""

import dataclasses
import json
import textwrap
import time

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

LOAD = """
def load(split):
    first, last = (0, 12) if split == "train" else (20, 24)
    return [{"question": f"What is {n} plus 1?", "n": n} for n in range(first, last)]
"""
TOOLS = (
    LOAD
    + '''
class Environment:
    def reset(self, n, **row):
        self.n, self.done, self.count = n, None, 0
        return " Use the tools."

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first number.
            b: the second number.
        """
        self.count += 1
        return a + b

    async def fail(self, how: str) -> str:
        """Fail.

        Args:
            how: slowly, or with an exception.
        """
        while how == "slowly":
            try:
                pass
            except Exception:
                pass
        raise KeyError(how)

    def answer(self, number: int) -> str:
        """Give the answer.

        Args:
            number: the answer.
        """
        self.done = number
        return "ok"

    def _hidden(self):
        pass

    def get_reward(self):
        return float(self.done == self.n + 1)

def gold(row):
    call = lambda name, **arguments: {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call("add", a=row["n"], b=1)]},
        {"role": "tool", "name": "add", "content": "anything"},
        {"role": "assistant", "content": "So:", "tool_calls": [call("answer", number=row["n"] + 1)]},
        {"role": "assistant", "content": "Done."},
    ]
'''
)
REPLY = (
    LOAD
    + """
class Environment:
    def reset(self, n, **row):
        self.n, self.right = n, False
    def reply(self, text):
        self.right = text.strip() == str(self.n + 1)
        return None if self.right else "No."
    def get_reward(self):
        return float(self.right)
MAX_TURNS = 3
"""
)
ODD = (
    LOAD
    + '''
import pydantic, time
SECONDS_PER_CALL = 1.0

class Text:
    def __init__(self, write): self.write = write
    def __str__(self): return self.write()

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
'''
)
TAKE_CALLS = """
    def take_calls(self, calls):
        self.numbers = calls[0]["function"]["arguments"]["result"]
"""
RESET = "def reset(self, **row): pass"
REPLIES = "def reply(self, text): pass"
REWARD = "def get_reward(self): return 1"


def environment(*members, load=LOAD):
    """Return a task file whose Environment has these members."""
    return f"{load}class Environment:\n" + textwrap.indent("\n".join(members), "    ") + "\n"


def adder(arguments, described=("a", "b")):
    """Return a tool that adds two numbers."""
    entries = "".join(f"    {name}: a number.\n" for name in described)
    docstring = f"Add two numbers.\n\nArgs:\n{entries}"
    return f"def add(self, {arguments}):\n" + textwrap.indent(f'"""{docstring}"""\nreturn a + b', "    ")


def task_of(folder, text, **changes):
    path = folder / "my_task.py"
    path.write_text(text)
    config = replace(RunConfig(), {"data": {"task": str(path)}})
    return replace(config, changes), get_task(str(path))


@pytest.fixture
def tokenizer():
    tokenizer = base_model.load_tokenizer(ModelConfig())
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    return tokenizer


@pytest.fixture
def begin(tmp_path, tokenizer):
    """Return a function that begins an episode of the first row of a task file."""

    def start(text, budget=1000, row=0):
        config, _ = task_of(tmp_path, text)
        row = load_data(config).train[row]
        prompt = chat.render_row(tokenizer, row)
        form = turns.response_format(tokenizer) if row["tools"] else None
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return Episode(row, prompt, ids, tokenizer, [tokenizer.eos_token_id], budget, form)

    return start


def take(episode, text, truncated=False):
    ids = episode.tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += [] if truncated else [episode.tokenizer.eos_token_id]
    episode.take(ids, text, [-1.0] * len(ids), truncated)
    return episode.messages[-1]["content"]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_schemas_are_those_that_trl_gives_the_template(tmp_path):
    _, task = task_of(tmp_path, TOOLS)
    instance = task.environment.python_class()
    expected = [get_json_schema(getattr(instance, name)) for name in ("add", "answer", "fail")]
    assert task.environment.schemas == expected
    config, _ = task_of(tmp_path, TOOLS)
    row = load_data(config).train[0]
    assert row["tools"] == expected and row["prompt"][-1]["content"].endswith("plus 1? Use the tools.")


def test_a_call_is_run_and_its_result_follows_as_the_template_renders_it(begin):
    episode = begin(TOOLS)
    assert take(episode, call("add", a=0, b=1)) == "1"
    assert take(episode, "Well. " + call("answer", number=1)) == "ok"
    take(episode, "Done.")
    assert (episode.ended_by, episode.turns, episode.session.calls, episode.session.failed_calls) == ("reply", 3, 2, 0)
    assert grade(episode.row["task"], [episode])[0].passed
    whole = episode.tokenizer.decode(episode.prompt_ids + episode.token_ids)
    rendered = chat.render(episode.tokenizer, [*episode.row["prompt"], *episode.messages], episode.row["tools"])
    assert rendered.startswith(whole.replace("Well. <tool_call>", "Well.\n<tool_call>"))
    own = episode.tokenizer.decode(episode.sampled_ids)
    assert own == f"{call('add', a=0, b=1)}<|im_end|>Well. {call('answer', number=1)}<|im_end|>Done.<|im_end|>"
    assert [logprob != 0 for logprob in episode.logprobs] == [is_trained != 0 for is_trained in episode.loss_mask]


@pytest.mark.parametrize(
    "text",
    [
        call("add", a=0),
        call("add", a="0", b=1),
        call("add", a=0, b=1, c=2),
        call("add", a=0.5, b=1),
        call("subtract", a=0, b=1),
        call("_hidden"),
        call("get_reward"),
        call("reset", n=1),
        '<tool_call>\n{"name": "add", "arguments": {"a": 0, "b": 1}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 0, "b": 1}}',
        '<tool_call>\n{"name": "add", "arguments": [0, 1]}\n</tool_call>',
        '<tool_call>\n["add"]\n</tool_call>',
        '<tool_call>\n"add"\n</tool_call>',
        '<tool_call>\n{"name": ["add"], "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add"}\n</tool_call>',
        call("fail", how="loudly"),
    ],
)
def test_a_wrong_call_is_answered_with_an_error_and_counted(begin, text):
    episode = begin(TOOLS)
    assert take(episode, text).startswith("error: ") and episode.text
    assert episode.session.failed_calls == 1 and episode.session.environment.count == 0 and not episode.is_over
    take(episode, "I give up.")
    assert episode.ended_by == "reply" and not grade(episode.row["task"], [episode])[0].passed


def test_a_tool_that_hangs_has_a_time_limit(begin):
    episode = begin(TOOLS + "SECONDS_PER_CALL = 1.0\n")
    started = time.monotonic()
    assert "took more than 1 s" in take(episode, call("fail", how="slowly"))
    assert time.monotonic() - started < 30 and episode.session.failed_calls == 1


def test_an_exception_in_a_tool_can_stop_the_run(begin):
    with pytest.raises(CheckError, match="loudly"):
        take(begin(TOOLS + "RAISE_ERRORS = True\n"), call("fail", how="loudly"))


@pytest.mark.parametrize(
    "result", ["10 ** 5000", "(1, 10 ** 5000)", "Text(lambda: time.sleep(9))", "Text(lambda: 1 / 0)", "Text(lambda: 5)"]
)
def test_a_result_without_a_text_is_an_error(begin, result):
    episode = begin(ODD)
    assert take(episode, call("show", result=result)).startswith("error: ")
    assert episode.session.failed_calls == 1 and not episode.is_over


OWN = ["pydantic.TypeAdapter(int).validate_python('x')", "pydantic.create_model('M', a=(int, ...))(a='x')"]


@pytest.mark.parametrize("result", OWN)
def test_a_validation_error_of_a_tool_is_not_one_of_its_arguments(begin, result):
    episode = begin(ODD)
    assert take(episode, call("show", result=result)).startswith("error: ValidationError: ")
    assert episode.session.failed_calls == 1


@pytest.mark.parametrize("result", OWN)
def test_a_validation_error_of_a_tool_can_stop_the_run(begin, result):
    with pytest.raises(CheckError, match="ValidationError"):
        take(begin(ODD + "RAISE_ERRORS = True\n"), call("show", result=result))


@pytest.mark.parametrize("constant", ["", "RAISE_ERRORS = True\n"])
def test_a_refused_argument_is_named_and_never_stops_the_run(begin, constant):
    assert take(begin(TOOLS + constant), call("add", a="0", b=1)).startswith("error: argument 'a': ")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_no_tool_gets_a_number_that_is_not_finite(begin, number):
    episode = begin(ODD)
    assert take(episode, call("say", number=0).replace("0", number)).startswith("error: ")
    function = {"name": "say", "arguments": {"number": float(number)}}  # as of a format that is not JSON
    [result] = episode.session.answer({"tool_calls": [{"type": "function", "function": function}]})
    assert result["content"].startswith("error: ")
    assert episode.session.failed_calls == 2 and episode.session.environment.numbers == []


def test_calls_that_are_taken_may_be_nested(begin):
    episode = begin(ODD + "class Environment(Environment):" + TAKE_CALLS)
    nested = "[" * 600 + "]" * 600
    take(episode, call("show", result="nested").replace('"nested"', nested))
    assert (episode.ended_by, episode.session.calls, episode.verdict.passed) == ("reply", 1, True)
    assert nested in episode.text


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        (environment(RESET, "def reply(self, text): return 'No' + chr(0xD800)", REWARD), "5"),
        (ODD, call("show", result="chr(0xD800)")),
        (ODD, call("show", result="exec('raise ValueError(chr(0xD800))')")),
    ],
)
def test_half_a_character_does_not_end_the_episode(begin, text, turn):
    episode = begin(text)
    take(episode, turn)
    take(episode, turn)
    assert not episode.is_over and episode.turns == 2


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        (environment(RESET, "def reply(self, text): return 'No ' * 7_000_000", REWARD), "5"),
        (ODD, call("show", result="'No ' * 7_000_000")),
    ],
)
def test_a_huge_answer_is_not_tokenized(begin, monkeypatch, text, turn):
    episode = begin(text)
    monkeypatch.setattr(turns, "following_text", None)
    take(episode, turn)
    assert episode.ended_by == "budget" and episode.messages[-1]["role"] == "assistant"


def test_replies_and_the_limit_of_turns(begin):
    episode = begin(REPLY)
    assert [take(episode, text) for text in ("5", "no idea", call("add", a=1, b=2))][:2] == ["No.", "No."]
    assert (episode.ended_by, episode.turns, episode.verdict.reason) == ("limit", 3, "turn_limit")
    episode = begin(REPLY)
    take(episode, "1")
    assert episode.ended_by == "reply" and episode.verdict.passed and episode.loss_mask == [1] * len(episode.token_ids)


def test_what_leaves_no_room_is_left_out(begin):
    episode = begin(REPLY, budget=12)
    take(episode, "5")
    assert episode.ended_by == "budget" and episode.messages[-1]["role"] == "assistant" and not episode.truncated
    episode = begin(REPLY)
    take(episode, "1 is the", truncated=True)
    assert episode.ended_by == "budget" and episode.truncated and episode.verdict.reason == "token_limit"


def test_reference_conversations_are_played(tmp_path, tokenizer):
    config, _ = task_of(tmp_path, TOOLS)
    rows = load_data(config).train
    for row, episode in zip(rows, gold_episodes(tokenizer, rows), strict=True):
        assert episode.verdict.passed and episode.turns == 3
        assert [message["role"] for message in episode.messages] == [
            *("assistant", "tool", "assistant", "tool", "assistant")
        ]
        assert episode.messages[1]["content"] == str(row["n"] + 1), "the environment answers, not the reference"
        whole = tokenizer.decode(episode.prompt_ids + episode.token_ids)
        assert chat.render(tokenizer, [*row["prompt"], *episode.messages], row["tools"]).startswith(whole)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (environment(REPLIES, REWARD), "'reset'"),
        (environment(RESET, REPLIES), "'get_reward'"),
        (environment(RESET, REWARD), "neither"),
        (environment(RESET, adder("a, b: int"), REWARD), "'add'"),
        (environment(RESET, adder("a: Strange, b: int"), REWARD), "Strange"),
        (environment(RESET, adder("a: int, b: int", described=["b"]), REWARD), "'add'"),
        (environment("def reset(self, **row): raise KeyError('n')", REPLIES, REWARD), "KeyError"),
        (environment("def reset(self, **row): return 5", REPLIES, REWARD), "5"),
        (environment(RESET, REPLIES, REWARD) + "MAX_TURNS = 0\n", "MAX_TURNS"),
        (environment(RESET, REPLIES, REWARD) + "SECONDS_PER_CALL = -1\n", "SECONDS_PER_CALL"),
        (environment("MAX_TURNS = 4", RESET, REPLIES, REWARD), "top level"),
        (environment(RESET, REPLIES, REWARD) + "def check(completion, row): return True\n", "both"),
        (environment(RESET, REPLIES, REWARD, load="def load(split): return [{'n': 1}]\n"), "question"),
        (environment(RESET, REPLIES, REWARD, "@staticmethod", "def add(): pass"), "add is static"),
        (environment(RESET, REPLIES, REWARD, "@classmethod", "def add(cls): pass"), "add is static"),
        (environment(RESET, REPLIES, REWARD, "class Add: pass"), "Add is static"),
    ],
)
def test_a_wrong_environment_is_one_line(tmp_path, text, said):
    with pytest.raises((UserError, CheckError)) as error:
        load_data(task_of(tmp_path, text)[0])
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["None", "'1'", "2", "-0.1", "float('nan')"])
def test_a_wrong_reward_stops_the_run(begin, value):
    with pytest.raises(CheckError, match="get_reward"):
        take(begin(environment(RESET, REPLIES, f"def get_reward(self): return {value}")), "1")


def test_settings_that_leave_no_conversation_are_refused_before_weights_are_loaded(tmp_path, tokenizer):
    config, _ = task_of(tmp_path, TOOLS, sampling={"max_completion_tokens": 8})
    with pytest.raises(UserError, match="max-completion-tokens"):
        fit_data(load_data(config), tokenizer, config)
    config, _ = task_of(tmp_path, TOOLS)
    without = base_model.load_tokenizer(ModelConfig())
    with pytest.raises(UserError, match="chat template"):
        fit_data(load_data(config), without, config)
    with pytest.raises(UserError, match="engine peft"):
        load_data(replace(config, {"model": {"engine": "unsloth"}}))
    with pytest.raises(UserError, match="few-shot"):
        load_data(replace(config, {"data": {"few_shot": 1}}))


def test_a_random_reset_stops_the_run(begin):
    counting = "import itertools\nnumbers = itertools.count()\n"
    with pytest.raises(CheckError, match="random"):
        begin(counting + environment("def reset(self, **row): return str(next(numbers))", REPLIES, REWARD))


def test_an_episode_keeps_the_columns_that_its_environment_got(begin):
    episode = begin(REPLY)
    assert episode.row["loaded_row"]["n"] == episode.session.environment.n
    assert dataclasses.fields(episode)
