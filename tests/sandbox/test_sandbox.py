"""Programs and their verdicts, and the operations that tests may perform on a candidate's objects."""

import textwrap

import pytest

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.sandbox import BrokenTest, Program, Settings


@pytest.fixture(scope="module", autouse=True)
def pool():
    sandbox.start(Settings(timeout_seconds=2.0, workers=2))
    yield
    sandbox.stop()


@pytest.fixture
def long_timeout(pool):
    sandbox.start(Settings(timeout_seconds=30.0, workers=2))
    yield
    sandbox.start(Settings(timeout_seconds=2.0, workers=2))


def verdict(source, test, **more):
    more.setdefault("functions", ("f",))
    program = Program(textwrap.dedent(source), textwrap.dedent(test), **more)
    return sandbox.run([program])[0]


@pytest.mark.parametrize(
    "source, status, message",
    [
        ("def f(x): return x + 1", "passed", ""),
        ("def f(x): return x", "failed", "assert f(2) == 3"),
        ("def f(x): return x / 0", "failed", "ZeroDivisionError: division by zero"),
        ("def g(x): return x + 1", "failed", "NameError: name 'f' is not defined"),
        ("raise ValueError('top')\ndef f(x): return 3", "failed", "ValueError: top"),
        ("import sys\nsys.exit(0)", "failed", "SystemExit: 0"),
        ("def f(x): raise KeyboardInterrupt", "failed", "KeyboardInterrupt: "),
        ("def f(x) return x + 1", "invalid", "SyntaxError: expected ':' (<candidate>, line 1)"),
        ("\ud800", "invalid", "UnicodeEncodeError"),
        ("def f(x):\n while True: pass", "timeout", "still running after 2 s"),
        ("import time\ntime.sleep(60)", "timeout", "still running after 2 s"),
        ("def f(x): return [0] * 10**9", "memory", "MemoryError: "),
        ("import os\ndef f(x): os._exit(0)", "crashed", "its process exited with code 0"),
        ("import ctypes\ndef f(x): ctypes.string_at(0)", "crashed", "its process was killed: Segmentation fault"),
        ("import os\ndef f(x): os.close(3)", "crashed", "it"),  # closed its link, which counts as exiting
        ("import os\ndef f(x): os.fork()", "blocked", "PermissionError"),
        ("def f(x): return open('/etc/hostname').read()", "blocked", "PermissionError"),
    ],
)
def test_each_end_has_its_status_and_its_reason(source, status, message):
    result = verdict(source, "assert f(2) == 3")
    assert (result.status, result.passed) == (status, status == "passed")
    assert result.message.startswith(message) and result.message.isprintable() and bool(result.message) == bool(message)


@pytest.mark.parametrize(
    "before, change, after",
    [
        ("[1, 2]", "x[0] = float(x[0])", "[1.0, 2]"),
        ("[1, 0]", "x[:] = map(bool, x)", "[True, False]"),
        ("{'a': 1}", "x['a'] = 1.0", "{'a': 1.0}"),
        ("[0.0]", "x[0] = -x[0]", "[-0.0]"),
    ],
)
def test_an_argument_changed_to_an_equal_value_is_changed_for_the_tests(before, change, after):
    assert verdict(f"def f(x): {change}", f"x = {before}\nf(x)\nassert repr(x) == {after!r}").passed


def test_arguments_are_changed_by_a_call_that_raises_too():
    source = "def f(d):\n d.pop('a')\n raise KeyError('b')"
    test = "d = {'a': 1}\ntry:\n f(d)\nexcept KeyError as error:\n assert error.args == ('b',)\nassert d == {}"
    assert verdict(source, test).passed


def test_only_one_that_raises_what_is_expected_satisfies_the_tests():
    test = "try:\n f()\n assert False\nexcept ValueError as error:\n assert str(error) == 'no'"
    assert verdict("def f(): raise ValueError('no')", test).passed
    assert verdict("class E(ValueError): pass\ndef f(): raise E('no')", test).passed
    assert not verdict("def f(): raise TypeError('no')", test).passed
    assert not verdict("def f(): raise ExceptionGroup('no', [ValueError('no')])", test).passed


def test_a_test_that_catches_everything_does_not_save_a_candidate_that_left():
    test = "try:\n f()\nexcept:\n pass\nassert True"
    assert verdict("import os\ndef f(): os._exit(0)", test).status == "crashed"
    assert verdict("def f(): raise SystemExit", test).status == "failed"
    assert verdict("def f(): raise ValueError", test).passed


def test_an_answer_that_is_too_large_fails_and_says_so(long_timeout):
    result = verdict("def f(): return 'x' * (80 << 20)", "assert f() == 'x' * (80 << 20)")
    assert result.status == "failed" and "OverflowError" in result.message


def test_an_argument_that_is_too_large_fails_and_says_so(long_timeout):
    result = verdict("def f(x): return 3", "assert f('x' * (80 << 20)) == 3")
    assert result.status == "failed" and "too large" in result.message


def test_keyword_arguments_may_have_any_name():
    names = ("operation", "remote", "self", "function", "args", "kwargs", "link", "key", "value")
    arguments = ", ".join(f"{name}={i}" for i, name in enumerate(names))
    source = f"def f({', '.join(names)}): return {' + '.join(names)}"
    assert verdict(source, f"assert f({arguments}) == {sum(range(len(names)))}").passed


@pytest.mark.parametrize("use", ["f()[:3] == [1]", "f().sort(key=lambda x: x) is None", "f()(print) == 1"])
def test_a_candidates_object_in_the_place_of_data_is_no_fault_of_the_tests(use):
    source = "class A:\n def __getitem__(self, key): return 0\ndef f(): return A()"
    assert verdict(source, f"assert {use}").status == "failed"


@pytest.mark.parametrize(
    "test",
    [
        "try:\n assert f(1) == 2\nexcept ValueError:\n pass",
        "import contextlib\nwith contextlib.suppress(ValueError):\n assert f(1) == 2",
        "def body():\n assert f(1) == 2\ntry:\n body()\nexcept ValueError:\n pass",
        "def body():\n assert f(1) == 2\ndef raises(run):\n try:\n  run()\n except ValueError:\n  return True\n"
        "assert raises(body)",
    ],
)
def test_a_statement_that_expects_an_exception_gets_it_from_its_assert(test):
    assert verdict("def f(x): raise ValueError", test).passed
    assert not verdict("def f(x): raise TypeError", test).passed


@pytest.mark.parametrize("answer", ["9", "x", "1 / 0", "object()"])
def test_the_calls_do_not_tell_a_candidate_whether_its_answers_are_right(answer):
    """The program exits at its fourth call, which comes whatever it returned before."""
    source = f"""
        import os
        calls = []
        def f(x):
            calls.append(x)
            return {answer} if len(calls) < 4 else os._exit(0)
    """
    test = "def check(f):\n assert f(9) == 9\n for x in (9, 7):\n  assert f(x) == x\ncheck(f)\nassert f(5) == 5"
    result = verdict(source, test)
    assert result.status == "crashed" and "exited with code 0" in result.message


def test_the_message_is_of_the_first_failed_assert():
    result = verdict("def f(x): return x", "assert f(1) == 1\nassert f(2) == 4, 'two'\nassert f(3) == 9\nf(4)[0]")
    assert (result.status, result.message) == ("failed", "assert f(2) == 4, 'two'  # two")


def test_functions_wins_over_builtins_and_the_prelude():
    assert verdict("def sum(a, b): return a + b", "assert sum(10, 15) == 25", functions=("sum",)).passed
    prelude = "def helper(x): return x * 2\ndef f(x): pass"
    assert verdict("def f(x): return 2 * x", "assert f(3) == helper(3)", functions=("f",), prelude=prelude).passed
    assert not verdict("def f(x): return x", "assert f(3) == helper(3)", functions=("f",), prelude=prelude).passed


def test_a_candidate_does_not_see_the_tests_or_the_prelude():
    source = """
        import gc, sys
        WORD = "emases"[::-1]
        def f():
            texts = [t for t in gc.get_objects() if isinstance(t, str)] + [repr(sys.modules), repr(sys.argv)]
            return any(WORD in text for text in texts) or any(WORD in repr(f.f_locals) for f in frames())
        def frames():
            frame = sys._getframe()
            while frame:
                yield frame
                frame = frame.f_back
    """
    assert verdict(source, "word = 'open ' + 'sesame'\nassert f() is False", prelude="OTHER = 'sesame'").passed


@pytest.mark.parametrize(
    "test, prelude",
    [
        ("assert f( == 3", ""),
        ("f(2) == 3", ""),
        ("assert f(2) == 3", "def"),
    ],
)
def test_tests_that_cannot_run_are_an_error_that_names_the_row(test, prelude):
    with pytest.raises(BrokenTest, match="row 7"):
        verdict("def f(x): return x + 1", test, prelude=prelude, name="row 7")
    assert verdict("def f(x): return x + 1", "assert f(2) == 3").passed


@pytest.mark.parametrize(
    "test, prelude",
    [
        ("def check(c):\n import no_such_module\n assert c(2) == 3\ncheck(f)", ""),
        ("assert 1 == 2", ""),
        ("assert f(lambda x: x) == 3", ""),
        ("def check(c):\n assert c(2) == 3", ""),
        ("f.__wrapped__\nassert f(2) == 3", ""),
        ("import no_such_module\nassert f(2) == 3", ""),
        ("assert f(2) == 3", "1 / 0"),
        ("assert math.isclose(f(2), 3)", ""),
    ],
)
def test_only_the_reference_program_shows_that_tests_cannot_run(test, prelude):
    source = "def f(x): return x + 1"
    assert verdict(source, test, prelude=prelude).status == "failed"
    with pytest.raises(BrokenTest, match="row 7"):
        verdict(source, test, prelude=prelude, name="row 7", reference=True)


COUNTED = "assert f(1) == 1\nassert f(2) == 4\nfor x in (3, 4):\n    assert f(x) == x * x\nassert True"


@pytest.mark.parametrize(
    "source, share",
    [
        ("def f(x): return x * x", (3, 3)),
        ("def f(x): return x", (1, 3)),
        ("def f(x): return x * x if x < 4 else 0", (2, 3)),
        ("def f(x): return {1: 1}[x]", (1, 3)),
        ("def f(x): return 0", (0, 3)),
        ("import os\ndef f(x): return x * x if x < 2 else os._exit(0)", (1, 3)),
        ("import os\ndef f(x): return x * x if x < 4 else os._exit(0)", (2, 3)),
        ("def f(x):\n while x == 2: pass\n return x * x", (0, 0)),
        ("def f(x)", (0, 3)),
    ],
)
def test_asserts_are_counted_and_a_pass_needs_them_all(source, share):
    result = verdict(source, COUNTED)
    assert (result.passed_tests, result.num_tests) == share
    assert result.passed == (share == (3, 3))


def test_draws_are_the_same_each_time():
    source = "import random\ndef f(): return random.random()"
    verdicts = sandbox.run([Program(source, "assert f() < 0, f()", ("f",))] * 4)
    assert len({draw.message for draw in verdicts}) == 1


def test_sets_are_in_the_same_order_each_time():
    program = Program("def f(): return ''.join(set('abcdefgh'))", "assert not f(), f()", ("f",))
    first = sandbox.run([program])[0].message
    sandbox.start(Settings(timeout_seconds=2.0, workers=1))
    assert sandbox.run([program])[0].message == first


def test_without_a_safe_tier_nothing_runs_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("lora_grpo.sandbox.isolation.unavailable_reason", lambda tier: "not today")
    with pytest.raises(UserError, match=r"landlock: not today; bubblewrap: not today.*--sandbox\.allow-unsafe"):
        sandbox.start(Settings())
    line = sandbox.start(Settings(allow_unsafe=True, workers=1))
    assert "NONE" in line
    assert verdict("def f(x): return x + 1", "assert f(2) == 3").passed
    assert not verdict("def f(x): return x", "assert f(2) == 3").passed
    sandbox.stop()


def test_a_tier_that_lets_something_out_is_not_used(monkeypatch):
    passed = sandbox.Verdict("passed", "")
    reasons = {"landlock": None, "bubblewrap": "not today"}
    monkeypatch.setattr("lora_grpo.sandbox.isolation.unavailable_reason", reasons.get)
    monkeypatch.setattr("lora_grpo.sandbox.pool.Pool.run", lambda self, programs: [passed] * len(programs))
    with pytest.raises(UserError, match="landlock: reading a file is possible"):
        sandbox.start(Settings())
