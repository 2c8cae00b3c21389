"""Generators of reasoning-gym as tasks."""

import json
import sys

import pytest

from lora_grpo.config import RunConfig, replace
from lora_grpo.data import load_data, load_split
from lora_grpo.errors import UserError
from lora_grpo.tasks import get_task, reasoning_gym
from lora_grpo.workers import TooSlow, Worker

pytestmark = pytest.mark.engines
library = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: make engines")
NAMES = sorted(set(library.factory.DATASETS) - {*reasoning_gym.REFUSED})
WITHOUT_REFERENCES = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def config(name, *options, **data):
    return replace(RunConfig(), {"data": {"task": f"reasoning-gym:{name}", "options": options, **data}})


def answer(text):
    return f"<answer>\n{text}\n</answer>"


def first(name):
    """Return one row; some generators take seconds for a hundred."""
    return load_split(config(name, "size=3").data, "eval")[0]


@pytest.mark.parametrize("name", NAMES)
def test_references_pass_and_empty_and_echoed_texts_do_not(name):
    task = get_task(f"reasoning-gym:{name}")
    row = first(name)
    json.dumps(row, allow_nan=False)
    assert (name in WITHOUT_REFERENCES) == (not row["answer"]) == (not task.has_gold)
    if row["answer"]:
        verdict = task.check(task.gold(row), row)
        assert (verdict.passed, verdict.value) == (True, 1.0)
    for text in ("", answer(""), row["question"], row["answer"]):
        assert task.check(text, row).value == 0
    assert not task.check(answer(row["question"]), row).passed
    assert not task.check(answer("0"), row).passed or row["answer"] in ("0", "0.0"), row["answer"]


RIGHT = answer("{right}")
WRONG = answer(1)


@pytest.mark.parametrize(
    ("text", "passed", "reason"),
    [
        (f"<think>{WRONG}</think>{RIGHT}", True, "correct"),
        (f"<think>{RIGHT}</think>{WRONG}", False, "wrong_answer"),
        (f"<think>{RIGHT}</think>", False, "no_answer"),
        (f"<think>{RIGHT}", False, "unfinished_thought"),
        (f"{RIGHT}[THINK]", False, "unfinished_thought"),
    ],
)
def test_an_answer_inside_a_thought_is_none(text, passed, reason):
    row = first("leg_counting")
    verdict = get_task("reasoning-gym:leg_counting").check(text.format(right=row["answer"]), row)
    assert (verdict.passed, verdict.reason) == (passed, reason)
    assert verdict.score is not None


def test_there_are_102_generators():
    assert len(NAMES) == 102


@pytest.mark.parametrize("name", ["isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"])
def test_generators_that_draw_from_sets_make_the_same_rows_in_every_process(name):
    again = Worker("lora_grpo.tasks.reasoning_gym:generate", 60.0)
    assert [*map(tuple, again(name, "eval", '{"size": 3}'))] == [
        (row["question"], row["answer"]) for row in load_split(config(name, "size=3").data, "eval")
    ]


def test_splits_have_no_row_in_common_and_a_row_is_the_same_when_it_is_graded():
    data = load_data(config("leg_counting", train_limit=100))
    assert (len(data.train), len(data.eval)) == (100, 200)
    assert not {row["question"] for row in data.train} & {row["question"] for row in data.eval}
    row = data.train[7]
    assert get_task(row["task"]).check(answer(row["answer"]), row).passed
    assert not get_task(row["task"]).check(answer(int(row["answer"]) + 1), row).passed


def test_options_set_fields_sizes_and_levels():
    rows = load_split(config("chain_sum", "min_terms=2", "max_terms=2", "max_digits=1", "size=30").data, "train")
    assert len(rows) == 30 and all(len(row["question"].split("=")[0].split()) <= 12 for row in rows)
    easy, hard = (load_split(config("chain_sum", f"level={level}").data, "eval")[0]["question"] for level in (0, 3))
    assert len(hard) > len(easy)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sum", ["min_term=2"], "min_terms"),
        ("chain_sum", ["min_terms"], "NAME=VALUE"),
        ("chain_sum", ["seed=3"], "seed"),
        ("chain_sum", ["min_terms=0"], "chain_sum"),
        ("chain_sum", ["min_terms=two"], "chain_sum"),
        ("chain_sum", ["level=high"], "chain_sum"),
        *(("chain_sum", [f"size={size}"], "number of rows") for size in ("0", "-1", "many", "true", "2.0")),
        ("chain_sums", [], "chain_sum"),
        ("composite", [], "mixes"),
        ("codeio", [], "sandbox"),
        ("", [], "generator"),
    ],
)
def test_wrong_names_and_options_are_one_line(name, options, message):
    with pytest.raises(UserError) as error:
        load_data(config(name, *options))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("error", [RuntimeError("ValueError: no such sum"), TooSlow("took more than 60 s")])
def test_a_generator_that_fails_at_a_later_row_is_one_line(error, monkeypatch):
    def generate(name, split, config):
        if json.loads(config).get("size") == 1:
            return [("1 + 1?", "2")]
        raise error

    monkeypatch.setattr(reasoning_gym, "_generate", generate)
    with pytest.raises(UserError, match=f"chain_sum .*--data.options max_terms=9: {error}") as caught:
        load_data(config("chain_sum", "max_terms=9"))
    assert "\n" not in str(caught.value)


def test_other_tasks_have_no_options():
    with pytest.raises(UserError, match="options"):
        load_data(replace(RunConfig(), {"data": {"options": ["level=1"]}}))


def test_a_generator_takes_no_source():
    with pytest.raises(UserError, match="source"):
        load_data(config("chain_sum", train="rows.jsonl"))


def test_the_package_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym._library.cache_clear()
    with pytest.raises(UserError, match=r"pip install .*'lora-grpo\[tasks\]'"):
        get_task("reasoning-gym:countdown")
    reasoning_gym._library.cache_clear()


@pytest.mark.parametrize(
    ("style", "text", "passed"),
    [
        ("xml", WRONG + RIGHT, True),
        ("xml", RIGHT + WRONG, False),
        ("xml", "<answer>1</answer> or <answer>{right}</answer>", False),
        ("xml", "<answer>{right}", False),
        ("boxed", "It is $\\boxed{{{right}}}$.", True),
        ("hashes", "9 legs\n#### {right}", True),
        ("hashes", "#### {right}\n#### 1", False),
    ],
)
def test_the_last_answer_counts_in_the_format_of_the_style(style, text, passed):
    row = first("leg_counting")
    completion = text.format(right=row["answer"])
    assert get_task("reasoning-gym:leg_counting").check(completion, row | {"prompt_style": style}).passed == passed


HARMLESS = [
    ("countdown", "3 + 4*(5 - 2)"),
    ("puzzle24", "(8/(3 - 8/3))"),
    ("simple_integration", "x**3/3 + 2*sin(x) - exp(-x) + C"),
    ("polynomial_multiplication", "3*x**2*y - 4*(x + 1)**2"),
    ("string_insertion", "ABCDEAB"),
    ("string_insertion", "['A', 'B']"),
    ("binary_matrix", "0 1\n1 0"),
    ("binary_matrix", "[[0, 1], [-1, 0]]"),
    ("leg_counting", "__import__('os').abort()"),
]
HARMFUL = [
    *((name, "__import__('os').abort()") for name in reasoning_gym._NODES_IF_RUN),
    *((name, "(lambda: 0)()") for name in reasoning_gym._NODES_IF_RUN),
    *((name, "[each for each in 'ab']") for name in reasoning_gym._NODES_IF_RUN),
    *((name, "x.__class__") for name in reasoning_gym._NODES_IF_RUN),
    *((name, "9**9**9") for name in reasoning_gym._NODES_IF_RUN),
    *((name, "1**" * 60 + "1") for name in reasoning_gym._NODES_IF_RUN),
    ("countdown", "((9**99)**99)**99"),
    ("countdown", "9**(99*99*99)"),
    ("countdown", "1<<1000"),
    ("countdown", "x"),
    ("countdown", "3!!!"),
    ("simple_integration", "open('x', 'w')"),
    ("simple_integration", "sympify('1')"),
    ("simple_integration", "sin(x)(x)"),
    ("intermediate_integration", "Integral(x, x)"),
    ("simple_integration", "(" * 5000 + "x" + ")" * 5000),
    ("simple_integration", "+".join("x" * 4000)),
]


@pytest.mark.parametrize(("name", "text"), HARMLESS)
def test_answers_that_do_nothing_are_graded(name, text):
    assert reasoning_gym._is_safe(name, text)


@pytest.mark.parametrize(("name", "text"), HARMFUL)
def test_answers_that_do_something_are_never_run(name, text, monkeypatch):
    row = first(name)
    monkeypatch.setattr(reasoning_gym, "_score", None)  # a call is an error
    verdict = get_task(f"reasoning-gym:{name}").check(answer(text), row)
    assert (verdict.value, verdict.detail) == (0, None)


def test_what_a_scorer_raises_is_a_wrong_answer_with_the_reason():
    row = first("prime_factorization")
    verdict = get_task("reasoning-gym:prime_factorization").check(answer("seven"), row)
    assert not verdict.passed and verdict.value == 0 and "ValueError" in verdict.detail
