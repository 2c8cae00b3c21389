"""The rewards of this package: their values, and that every one is in the help and in the docs."""

import math
import re
from pathlib import Path

import pytest
from trl import rewards as of_trl

from lora_grpo import sandbox
from lora_grpo.config import RunConfig
from lora_grpo.flags import read_flags
from lora_grpo.grading import programs
from lora_grpo.rewards import functions, parse_reward_specs, resolve
from lora_grpo.tasks import grade_all

XML = "<reasoning>\n16 - 3 = 13\nand 13 - 4 = 9\n</reasoning>\n<answer>\n18\n</answer>"
XML_ON_ONE_LINE = "<reasoning>r</reasoning> <answer>18</answer>"
THOUGHT = "sixteen minus three\nminus four, doubled"


def chat(text):
    return [{"role": "assistant", "content": text}]


def rewards_of_tests(completion, **row):
    """Return the values of both rewards of unit tests."""
    verdicts = grade_all("mbpp", [functions.completion_text(completion)], [row])
    return [
        reward([completion], verdicts=verdicts)[0]
        for reward in (functions.passes_tests, functions.share_of_tests_passed)
    ]


def help_of_rewards(capsys):
    """Return what `--help` says of `--rewards`, on one line."""
    with pytest.raises(SystemExit):
        read_flags(RunConfig, ["--help"], None)
    text = " ".join(capsys.readouterr().out.split())
    return text.partition("Rewards as NAME")[2].partition("Use my_file.py")[0]


def test_every_reward_is_in_the_help_and_in_the_docs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "your-task.md").read_text(encoding="utf-8")
    in_table = set(re.findall(r"`(\w+)", page.partition("| reward |")[2].partition("\n\n")[0]))
    in_help = set(re.findall(r"\w+", help_of_rewards(capsys)))
    assert functions.REWARDS.keys() - in_help == set()
    assert functions.REWARDS.keys() - in_table == set()


FOR_ANY_TASK = [name for name, reward in functions.REWARDS.items() if not (reward.argument or reward.needs_tests)]


@pytest.mark.parametrize("name", FOR_ANY_TASK)
@pytest.mark.parametrize("text", ["", XML, XML_ON_ONE_LINE, "#### 18"])
def test_strings_and_conversations_get_the_same_reward_from_0_to_1(name, text):
    columns = {"answer": ["18"], "prompts": ["?"], "completion_ids": [[1]], "trainer_state": object()}
    columns["verdicts"] = grade_all("gsm8k", [text], [{"answer": "18"}])
    function = functions.REWARDS[name].function
    (reward,) = function([text], **columns)
    assert 0 <= reward <= 1
    assert function([chat(text)], **columns) == [reward]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (XML, 1),
        ("<answer>-1,800</answer>", 1),
        ("#### 7", 1),
        ("<answer>18.0</answer>", 0),
        ("<answer>18 dollars</answer>", 0),
        ("<answer>1,8</answer>", 0),
        ("<answer>²</answer>", 0),
        ("18", 0),
    ],
)
def test_integer_answer(text, reward):
    assert functions.integer_answer([text]) == [reward]


@pytest.mark.parametrize(
    ("text", "strict", "soft"),
    [
        (XML, 1, 1),
        (XML_ON_ONE_LINE, 0, 1),
        ("Well. " + XML + " Done.", 0, 1),
        ("<think>\nWell.\n</think>\n\n" + XML, 1, 1),
        ("<think>\nWell.\n" + XML, 0, 0),
        (XML + XML, 0, 1),
        ("<reasoning>\n16 - 3 = 13\n</reasoning> so\n<answer>\n18\n</answer>", 0, 0),
        ("<think>\n16 - 3 = 13\n</think>\n<answer>\n18\n</answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_strict_and_soft_xml_format(text, strict, soft):
    assert functions.strict_xml_format([text]) == [strict]
    assert functions.soft_xml_format([text]) == [soft]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (XML, 1),
        (XML_ON_ONE_LINE, 1),
        ("<reasoning><reasoning>", 0),
        ("</answer>", 0.25),
        (XML + "\n" * 500, 1),
        (XML + "x" * 125, 0.75),
        ("</answer>" + "x" * 10_000, 0),
        ("", 0),
    ],
)
def test_xml_tag_count(text, reward):
    assert functions.xml_tag_count([text]) == [pytest.approx(reward)]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (f"<think>{THOUGHT}</think><answer>18</answer>", 1),
        (f"\n<think>\n{THOUGHT}\n</think>\n<answer>\n18\n</answer>\n", 1),
        (f"<think>{'x' * 21}</think><answer>18</answer>", 1),
        (f"<think>{'x' * 20}</think><answer>18</answer>", 0.5),
        (f"<think>{THOUGHT}</think><answer> </answer>", 0.5),
        (f"Well: <think>{THOUGHT}</think><answer>18</answer>", 0.5),
        (f"<think>{THOUGHT}</think><answer>18</answer> Done.", 0.5),
        (f"<think>{THOUGHT}</think> so <answer>18</answer>", 0),
        (f"<answer>18</answer><think>{THOUGHT}</think>", 0),
        (XML, 0),
    ],
)
def test_think_answer_format(text, reward):
    assert functions.think_answer_format([text]) == [reward]


@pytest.mark.parametrize(
    ("pattern", "text", "reward"),
    [
        (r"^\d+$", "18", 1),
        (r"^\d+$", "x\n18", 0),
        (r"(?m)^\d+$", "x\n18\ny", 1),
        ("<a>.*</a>", "so <a>1\n2</a>", 1),
        ("(?-s:a.*b)", "a\nb", 0),
    ],
)
def test_matches_pattern(pattern, text, reward):
    assert functions.matches_pattern(pattern)([text]) == [reward]


def test_longer_is_better_stops_at_its_cap():
    assert functions.longer_is_better(4)(["", "ab", "abcd", "abcdefgh"]) == [0, 0.5, 1, 1]


def test_near_length_falls_linearly_on_both_sides():
    texts = ["x" * n for n in (0, 5, 10, 15, 20, 99)]
    assert functions.near_length(10)(texts) == [0, 0.5, 1, 0.5, 0, 0]


@pytest.mark.parametrize("factory", [functions.longer_is_better, functions.near_length])
def test_a_length_in_tokens_counts_the_trainers_ids(factory):
    reward = factory(4, "tokens")
    assert reward(["a long text", "x"], completion_ids=[[1, 2], [1, 2, 3, 4]]) == [0.5, 1]


def of_spec(item, lengths, **columns):
    """Return the values of a reward for texts of such lengths, which repeat their tokens from the fifth on."""
    (reward,) = resolve(parse_reward_specs([item]))
    ids = [[min(position, 4) for position in range(length)] for length in lengths]
    return reward.function(completions=["x" * length for length in lengths], completion_ids=ids, **columns), ids


LENGTHS = (0, 1, 3, 4, 8, 9, 10, 11, 30)
"""Of texts, in characters and tokens."""


def test_repetition_penalty_and_soft_overlong_punishment_are_those_of_trl():
    values, ids = of_spec("repetition_penalty", LENGTHS)
    assert values == of_trl.get_repetition_penalty_reward(3, -1.0)(ids)
    value_of_length = dict(zip(LENGTHS, values, strict=True))
    assert value_of_length[0] == value_of_length[4] == 0 > value_of_length[9] > value_of_length[30] > -1
    values, ids = of_spec("repetition_penalty:1", LENGTHS)
    assert values == of_trl.get_repetition_penalty_reward(1, -1.0)(ids)
    values, ids = of_spec("soft_overlong_punishment:10,4", LENGTHS)
    assert values == of_trl.get_soft_overlong_punishment(10, 4)(ids) == [0, 0, 0, 0, -0.5, -0.75, -1, -1, -1]


@pytest.mark.parametrize(("item", "longest"), [("cosine_scaled:10", 10), ("cosine_scaled:10tokens", 10)])
@pytest.mark.parametrize("is_correct", [True, False])
def test_cosine_scaled_is_that_of_open_r1(item, longest, is_correct):
    verdicts = grade_all("gsm8k", ["#### 18" if is_correct else "no"] * len(LENGTHS), [{"answer": "18"}] * len(LENGTHS))
    values, _ = of_spec(item, LENGTHS, verdicts=verdicts)
    # open-r1's formula with its defaults, but for longer texts than `longest`.
    sign = 1 if is_correct else -1
    min_value = 0.5 * sign
    max_value = 1.0 * sign
    for length, value in zip(LENGTHS, values, strict=True):
        cosine = math.cos(min(length, longest) / longest * math.pi)
        assert value == pytest.approx(min_value + 0.5 * (max_value - min_value) * (1.0 + cosine))


@pytest.mark.parametrize("unit", ["<reasoning>", "</reasoning>", "</reasoning><answer>", "</think> ", "</answer>", " "])
def test_formats_read_long_hostile_texts(unit):
    text = "<reasoning>\n<think>" + unit * 20_000
    for name in ("strict_xml_format", "soft_xml_format", "xml_tag_count", "think_answer_format"):
        assert functions.REWARDS[name].function([text])[0] < 1


def test_a_coin_flip_depends_on_the_row_and_the_completion_and_is_fair():
    texts = [f"the answer is {number}" for number in range(1000)]
    flips = {row: functions.coin_flip(texts, id=[row] * 1000) for row in ("a", "b")}
    assert flips["a"] == functions.coin_flip([chat(text) for text in texts], id=["a"] * 1000) != flips["b"]
    for values in flips.values():
        assert set(values) == {0.0, 1.0} and 420 < sum(values) < 580  # 5 standard deviations
    assert 420 < sum(map(float.__ne__, *flips.values())) < 580


# Unit tests

TESTED = {"id": "t/0", "entry_point": "f", "test": "assert f(1) == 2\nassert f(2) == 4\nassert f(3) == 6"}


def program(body):
    return f"```python\ndef f(x):\n    {body}\n```"


@pytest.mark.parametrize(
    ("completion", "passes", "share"),
    [
        (program("return 2 * x"), 1, 1),
        (chat(program("return 2 * x")), 1, 1),
        (program("return 2"), 0, 1 / 3),
        (program("return min(2 * x, 4)"), 0, 2 / 3),
        (program("return (")[:-4], 0, 0),
        ("I cannot.", 0, 0),
        ("", 0, 0),
    ],
)
def test_rewards_of_unit_tests(completion, passes, share):
    assert rewards_of_tests(completion, **TESTED) == [passes, pytest.approx(share)]


@pytest.mark.parametrize(
    ("status", "passed_tests", "num_tests", "share"),
    [
        ("passed", 3, 3, 1),
        ("timeout", 3, 3, 2 / 3),
        ("passed", 0, 0, 1),
        ("passed", 2, 3, 2 / 3),
    ],
)
def test_the_max_reward_needs_a_pass(status, passed_tests, num_tests, share, monkeypatch):
    verdict = sandbox.Verdict(status, "", passed_tests, num_tests)
    monkeypatch.setattr(programs.sandbox, "run", lambda programs: [verdict])
    assert rewards_of_tests(program("return 2 * x"), **TESTED)[1] == pytest.approx(share)


@pytest.mark.parametrize(
    ("body", "share"),
    [
        ("return [2 * x for x in xs]", 1),
        ("return []", 1 / 3),  # the loop's assert never runs
        ("return [2 * x for x in xs] if len(xs) < 3 else 1 / 0", 2 / 3),
        ("__import__('os')._exit(0) if len(xs) == 3 else None\n    return [2 * x for x in xs]", 2 / 3),
        ("__import__('os')._exit(0)", 0),
        ("raise SystemExit", 0),
    ],
)
def test_an_assert_that_never_ran_earns_nothing(body, share):
    source = f"```python\ndef f(xs):\n    {body}\n```"
    test = "for a, b in zip(f([1, 2]), [2, 4]):\n    assert a == b, a\nassert f([]) == []\nassert f([1, 2, 3])[1] == 4"
    assert rewards_of_tests(source, id="a", entry_point="f", test=test)[1] == pytest.approx(share)


def test_a_pass_in_which_no_assert_ran_earns_nothing():
    row = {"id": "a", "entry_point": "f", "test": "for a, b in zip(f(1), [1]):\n    assert a == b"}
    assert rewards_of_tests(program("return []"), **row) == [1, 0]  # a pass, as in the official harness


@pytest.mark.parametrize(
    "test",
    [
        "try:\n    for a, b in zip(f(1), [1]):\n        assert a == b\nexcept TypeError:\n    assert False",
        "import unittest\nfor a, b in zip(f(1), [1]):\n    unittest.TestCase().assertEqual(a, b)",
    ],
)
@pytest.mark.parametrize(("body", "share"), [("return []", 1), ("return [2]", 0)])
def test_a_row_without_counted_asserts_pays_like_passes_tests(test, body, share):
    assert rewards_of_tests(program(body), id="a", entry_point="f", test=test) == [share, share]
