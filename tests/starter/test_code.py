import ast
import contextlib
import io
import itertools
import random

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


def test_splits_share_no_family_and_body_for_any_seed():
    train = {p.key for seed in range(3) for p in code_problems.pool("train", 4000, seed)}
    evaluated = {p.key for p in code_problems.pool("eval", 1000)}
    assert len(evaluated) >= 400
    assert not train & evaluated


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


def test_tests_are_asserts_of_the_function_one_per_line():
    for problem in code_problems.pool("eval", 160):
        lines = problem.tests.split("\n")
        assert 5 <= len(lines) <= 12
        assert len(set(lines)) == len(lines)
        for line in lines:
            assert line.startswith(f"assert {problem.function}(")
            assert isinstance(ast.parse(line).body[0], ast.Assert)


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
