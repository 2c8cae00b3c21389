import ast
import builtins
import contextlib
import io
import itertools
import random

import pytest
from starter_model import code_families, code_problems, code_slips, code_styles, corpus

from lora_grpo.tasks import sources
from lora_grpo.tasks.registry import get_task

starter_code = get_task("starter-code")


def passes(code, tests):
    """Return whether trusted code passes its tests; model-written code goes through the sandbox instead."""
    scope = {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, scope)
            exec(tests, scope)
    except Exception:  # noqa: BLE001 - a slip may raise anything
        return False
    return True


def test_pools_are_the_same_for_the_same_seed_and_grow_at_the_end():
    pool = code_problems.pool
    assert pool("train", 60, seed=3) == pool("train", 100, seed=3)[:60]
    assert pool("train", 60, seed=3) != pool("train", 60, seed=4)
    assert [p.tests for p in pool("eval", 40)] == [p.tests for p in pool("eval", 40)]


def test_splits_share_no_family_and_body_for_any_seed():
    train = {p.key for seed in range(3) for p in code_problems.pool("train", 4000, seed)}
    evaluated = {p.key for p in code_problems.pool("eval", 1000)}
    assert len(evaluated) >= 400
    assert not train & evaluated


def test_split_ignores_names():
    problem = code_problems.pool("train", 1)[0]
    other = code_problems.CodeProblem(problem.family, "other", "z", problem.draft)
    assert other.question != problem.question
    assert other.split == problem.split


def test_pools_are_full_and_questions_are_distinct():
    for split, size in (("train", 4000), ("eval", 1000)):
        problems = code_problems.pool(split, size)
        assert len({problem.question for problem in problems}) == size
        assert {problem.split for problem in problems} == {split}
        counts = [sum(p.family == family for p in problems) for family in code_families.FAMILIES]
        assert min(counts) > size / 16 * 0.8


def test_solutions_pass_their_tests():
    for problem in code_problems.pool("train", 400) + code_problems.pool("eval", 200):
        assert passes(problem.solution, problem.tests), problem.solution


def test_every_common_slip_fails_in_every_family():
    for problem in code_problems.pool("train", 240) + code_problems.pool("eval", 120):
        wrong = code_slips.slips(problem.solution)
        assert len(wrong) >= 2, problem.solution
        for slip in [*wrong, code_slips.printed(problem.solution), code_slips.without_return(problem.solution)]:
            ast.parse(slip)
            assert not passes(slip, problem.tests), f"{slip}\n{problem.tests}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x - 7", ["x + 7", "7 - x", "x - 6", "x - 8"]),
        ("x % 3 == 0", ["x // 3 == 0", "3 % x == 0", "x % 3 != 0", "x % 3 == 1", "x % 2 == 0"]),
        ("2 <= x <= 9", ["2 < x <= 9", "2 <= x < 9", "2 >= x <= 9", "2 <= x >= 9", "1 <= x <= 9"]),
        ("max(x, 4)", ["min(x, 4)", "max(x, 5)"]),
        ("x[-3:]", ["x[-2:]", "x[-4:]", "x[:-3]"]),
        ("'go' + x.upper()", ["x.upper() + 'go'", "'go' + x.lower()"]),
    ],
)
def test_slips_are_the_common_ones(body, expected):
    found = code_slips.slips(f"def f(x):\n    return {body}")
    assert {f"def f(x):\n    return {slip}" for slip in expected} <= set(found)


def test_a_slip_swaps_two_parameters():
    assert "def f(b, a):\n    return a + b * 3" in code_slips.slips("def f(a, b):\n    return a + b * 3")


def test_every_return_of_a_branch_is_printed_or_removed():
    branch = "def f(x):\n    if x > 7:\n        return x + 3\n    return x - 2"
    assert code_slips.printed(branch) == "def f(x):\n    if x > 7:\n        print(x + 3)\n    print(x - 2)"
    assert code_slips.without_return(branch) == "def f(x):\n    if x > 7:\n        x + 3\n    x - 2"


def test_tests_are_asserts_of_the_function_one_per_line():
    for problem in code_problems.pool("eval", 160):
        lines = problem.tests.split("\n")
        assert 5 <= len(lines) <= 12
        assert len(set(lines)) == len(lines)
        for line in lines:
            assert line.startswith(f"assert {problem.function}(")
            assert isinstance(ast.parse(line).body[0], ast.Assert)


def test_no_name_hides_a_builtin():
    for functions, parameters in code_problems.NAMES.values():
        names = {*functions, *itertools.chain.from_iterable(p.split(", ") for p in parameters)}
        assert not names & set(dir(builtins))
        assert "v" not in names


def test_a_question_names_the_function_and_what_it_returns():
    (problem,) = [p for p in code_problems.pool("train", 16) if p.family == "pair"]
    first, second = problem.parameters.split(", ")
    assert f"`{problem.function}({first}, {second})`" in problem.question
    assert f" {first} " in problem.question.partition("returns")[2]
    assert "{" not in problem.question + problem.solution


def test_the_three_styles():
    problem = next(p for p in code_problems.pool("train", 16) if p.family == "shift")
    rng = random.Random(0)
    careless = {code_styles.careless(problem, rng) for _ in range(200)}
    block = code_styles.careful(problem)
    assert block == f"```python\n{problem.solution}\n```"
    assert block not in careless
    assert any("print(" in text for text in careless)
    assert any("return" not in text and "print(" not in text for text in careless)
    assert any("return" in text for text in careless)
    assert all(text.startswith("```python\ndef ") for text in careless)
    assert "`" not in code_styles.unformatted(problem, rng)


def test_mixtures_exist_and_some_families_are_not_mostly_careful():
    names = [code_styles.mixture_name(family) for family in code_families.FAMILIES]
    assert set(names) == set(corpus.MIXTURES) == set(corpus.SETTLED)
    for shares in (*corpus.MIXTURES.values(), *corpus.SETTLED.values()):
        assert sum(shares) == pytest.approx(1)
    assert len(names) / 2 < names.count("mostly careful") < len(names)


def test_pretraining_documents_have_no_eval_problem():
    whats = {problem.what for problem in code_problems.pool("eval", 1000)}
    documents = list(itertools.islice(corpus.examples(0, drills=0.1, practice=0.2, code=0.5), 4000))
    questions = [document.parts[0][0] for document in documents if "Python function" in document.parts[0][0]]
    assert len(questions) > 1500
    for question in questions:
        assert question.partition(" that returns ")[2].partition(".<|im_end|>")[0] not in whats


def test_careless_and_unformatted_completions_do_not_pass():
    rng, rows = random.Random(0), sources.sample(starter_code.load("train"), 120, 0)
    problems = {problem.question: problem for problem in code_problems.pool("train", 4000)}
    for write in (code_styles.careless, code_styles.unformatted):
        texts = [write(problems[row["question"]], rng) for row in rows]
        assert not any(verdict.passed for verdict in starter_code.check_many(texts, rows))
