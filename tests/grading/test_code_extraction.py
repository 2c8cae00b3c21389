"""Programs in completions: fenced, bare, only a body, with other text and code around them."""

import textwrap
import time
import tracemalloc

import pytest

from lora_grpo.grading.code_extraction import extract_program

PREFIX = 'import math\n\n\ndef twice(x):\n    return 2 * x\n\n\ndef f(x):\n    """Round up, then double."""\n'
FUNCTION = "def f(x):\n    return twice(math.ceil(x))"
BODY = "    return twice(math.ceil(x))\n"


def fenced(code, language="python"):
    return f"```{language}\n{code}\n```"


def value(completion, argument=1.5, prefix=PREFIX):
    """Run the extracted program and call f."""
    names = {"__name__": "__main__"}
    exec(extract_program(completion, "f", prefix), names)
    return names["f"](argument)


@pytest.mark.parametrize(
    "completion",
    [
        # Fences
        fenced(FUNCTION),
        fenced(FUNCTION, ""),
        fenced(FUNCTION, " python title=solution.py"),
        f"Sure! Here it is:\n\n{fenced(FUNCTION)}\n\nIt doubles the ceiling.",
        f"```python\n{FUNCTION}",
        f"```python\n{FUNCTION}```",
        f"```python\n{FUNCTION}\n\nprint(f(1",
        "1. Do it:\n" + textwrap.indent(fenced(FUNCTION), "   "),
        # No fence
        FUNCTION,
        f"Here is the function:\n\n{FUNCTION}\n\nThis rounds up, then doubles it.\nIt's done.",
        f"Here is the function:\n\n{PREFIX}{BODY}\nHope this helps!",
        f"<reasoning>\nEasy.\n</reasoning>\n<answer>\n{FUNCTION}\n</answer>",
        # Only the body
        BODY,
        BODY.strip(),
        "\tif x:\n\t\treturn twice(math.ceil(x))\n",
        "if x:\n    return twice(math.ceil(x))\nreturn 0",
        fenced(BODY),
        f"{BODY}```\n\nThat is all.",
        # A base model that does not stop
        f"{BODY}\n\ndef g(x):\n    return f(",
        f"{BODY}\nif __name__ == '__main__':\n    f(input())",
        f"{BODY}\n```python\ndef f(x):\n    return 0\n```",
        f"{BODY}\nThis function doubles.",
        f"{BODY}\n\ndef twice(x):\n    return 0",
        # Several blocks
        fenced("def f(x):\n    return 0") + "\nNo, wait:\n" + fenced(FUNCTION),
        fenced(FUNCTION) + "\nUse it:\n" + fenced("print(f(input()))"),
        fenced(FUNCTION) + "\nUse it:\n" + fenced("from solution import f\nassert f(1) == 99"),
        fenced(FUNCTION) + "\nOr shorter:\n```python\ndef f(x):\n    return twice(",
        f"```python\n{FUNCTION}\n```python\nf(1)\n```",
        # Text around the function
        fenced(PREFIX + BODY),
        fenced("def up(x):\n    return math.ceil(x)\n\ndef f(x):\n    return twice(up(x))"),
        fenced(f"{FUNCTION}\n\nassert f(1) == 99\nprint(f(input()))\nx = int(input())"),
        fenced("def f(x):\n    return N * math.ceil(x)\n\nN = 2\n"),
        fenced(f"def keep(g):\n    return g\n\n@keep\n{FUNCTION}"),
        fenced("N = []\nN.append(2)\n\ndef f(x):\n    return N[0] * math.ceil(x)"),
        fenced("def f(x):\n    global N\n    N = N + 2\n    return N * math.ceil(x)\n\nN = 0"),
        # Unusual characters
        fenced(FUNCTION).replace("\n", "\r\n"),
        fenced("def f(x):\n    '\ud800'\n    return twice(math.ceil(x))"),
        f"{FUNCTION}<|im_end|>\n<|im_start|>user\nThanks",
        # Thinking
        f"<think>\n{fenced('def f(x): return 0')}\n</think>\n{fenced(FUNCTION)}",
        f"Hm, def f\n</think>\n\n{FUNCTION}",
    ],
)
def test_the_program_that_was_meant(completion):
    assert value(completion) == 4


def after(code):
    """Return an answer with a function that reads names of the module, followed by the code that sets them."""
    return fenced(f"def f(x):\n    return helper(x)\n\n{code}")


TWO_VERSIONS = "def f(x):\n    return twice(x)\n\n\ndef f(x):\n    return twice(math.ceil(x))"


@pytest.mark.parametrize(
    "completion",
    [
        # Code after the function that the function needs
        fenced("def f(x):\n    return f.cache.setdefault(x, twice(math.ceil(x)))\n\nf.cache = {}"),
        fenced("def f(x):\n    return f.factor * math.ceil(x)\n\nsetattr(f, 'other', 1)\nf.factor = 2\nprint(f(1))"),
        fenced("def f(x):\n    return memo[math.ceil(x)]\n\nmemo = {}\nfor i in range(9):\n    memo[i] = 2 * i"),
        fenced("def f(x):\n    return up(x) * 2\n\ntry:\n    from nowhere import up\nexcept ImportError:\n"
            "    up = math.ceil"),
        after("def fill():\n    global K\n    K = 2\n\nfill()\n\ndef helper(x):\n    return K * math.ceil(x)"),
        after("K = {'k': 1}\nK.update(k=2)\nhelper = lambda x: K['k'] * math.ceil(x)"),
        fenced("def f(x):\n    return math.ceil(x)\n\ng = f\nf = lambda x: twice(g(x))"),
        fenced("from functools import lru_cache\ndef f(x):\n    return twice(math.ceil(x))\n"
            "f = lru_cache(None)(f)\nprint(f(input()))"),
        fenced("import sys\nsys.setrecursionlimit(5000)\n\ndef f(x, n=2000):\n"
            "    return f(x, n - 1) if n else twice(math.ceil(x))"),
        # Demonstrations
        fenced(f"n = float(input())\n\n{FUNCTION}\n\nprint(f(n))"),
        fenced(f"{FUNCTION}\n\ndef main():\n    return f(LIMIT)\n\nLIMIT = int(input())\nresult = main()\n"
            f"result += 1\nresult = result / 0"),
        fenced(f"import sys\n\n{FUNCTION}\n\nfor line in sys.stdin:\n    print(f(float(line)))"),
        fenced(f"import unittest\n\n{FUNCTION}\n\nclass Test(unittest.TestCase):\n    def test(self):\n"
            f"        self.assertEqual(f(1), 9)\n\nunittest.main()"),
        fenced(f"{FUNCTION}\n\ncases = [(1, 99)]\nfor argument, expected in cases:\n"
            f"    assert f(argument) == expected, argument"),
        fenced(f"{FUNCTION}\n\ndef test_f():\n    assert f(1) == 99\n\ntest_f()"),
        fenced("K = 2\n\ndef f(x):\n    return K * math.ceil(x)\n\nif '__main__' == __name__:\n    K = 0"),
        fenced('def f(x):\n    """Broken.\n    return 0') + "\nSorry:\n" + fenced(FUNCTION),
        fenced("memo = {}\ndef f(x):\n    memo[x] = twice(math.ceil(x))\n    return memo[x]\n\n"
            "r = f(1)\nassert r == 9"),
        # Fences
        f"Install:\n{fenced('pip install x', 'bash')}\n{fenced(FUNCTION)}\nOutput:\n{fenced('4', '')}",
        "    def f(x):\n        return twice(math.ceil(x))\n\n    print(f(2))",
        "    import math\n\n    def f(x):\n        return twice(math.ceil(x))",
        # Versions and shapes
        fenced(TWO_VERSIONS),
        fenced("K = []\nK.append(2)\nprint(input())") + "\nThen:\n" + fenced("def f(x):\n"
            "    return K[0] * math.ceil(x)"),
        "    def inner(y):\n\n        return math.ceil(y)\n\n    return twice(inner(x))\n\n"
            "if __name__ == '__main__':\n    f(1)",
        # Characters
        "<|im_start|>assistant\n" + fenced(FUNCTION) + "<|im_end|>\n<|im_start|>user\n" + fenced("def f(x): return 0"),
        f"Thinking first.\n{fenced('def f(x): return 0')}\n</think>{fenced(FUNCTION)}",
        f"<answer>{FUNCTION}</answer>",
    ],
)  # fmt: skip
def test_the_program_that_a_careful_reader_would_run(completion):
    assert value(completion) == 4


def test_a_future_import_comes_first_in_a_program_without_a_prompt():
    code = "from __future__ import annotations\n\ndef f(x: Missing):\n    return K * x"
    assert value(fenced("K = 2") + "\nThen:\n" + fenced(code), 2, prefix="") == 4


def test_a_long_answer_is_rejected_but_not_a_long_thinking_section():
    assert extract_program(fenced(FUNCTION) + " " * 40_000 + ".", "f", PREFIX) is None
    assert value(f"<think>{'x ' * 40_000}</think>{fenced(FUNCTION)}") == 4


@pytest.mark.parametrize(
    "completion",
    [
        "",
        " \n",
        "I cannot do that.",
        " Sure",
        "<think>\n" + FUNCTION,
        f"<think>{FUNCTION}</think>",
        "```python\n```",
        "<|im_end|>",
    ],
)
def test_no_code_is_none(completion):
    assert extract_program(completion, "f", PREFIX) is None
    assert extract_program(completion, "f") is None


HOSTILE = [
    "```python\n", "```\n", "```python\nreturn (\n```\n", "~~~", "`", "(", "def f(x):\n", "    return 1\n",
    "def f(x):\n    return 1\n", "f(1)\n", "f = f\n", "@f\n", "'''\n", "\\\n", " ", "\t", "\n", "<think>", "</think>",
    "<|a|>", "x;", "import a\n", "a.", "```python\ndef f(x):\n    return a\n```\n", "```python\na = b\nb = a\n```\n",
    "    ", "    x\n", "else:\n", ")\n", "1+", "\ud800", "\0", "if x:\n", "#\n", ": return", "f(", "lambda:",
    "from __future__ import annotations\n", "    if x:\n",
]  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
@pytest.mark.parametrize("opening", ["", "```python\ndef f(x):\n    return 1\n", "    return 1\n"])
def test_hostile_texts_take_linear_time(unit, opening):
    text = opening + unit * (30_000 // len(unit))
    started = time.process_time()
    extract_program(text, "f", PREFIX)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "text",
    [
        "import " + "a." * 15_000 + "a",
        "from a." + "\\\na." * 7_000 + "a import f",
        'f"""' + "{a}" * 10_000 + '"""',
        "f = " + "-" * 30_000 + "1",
        "f = " + "1+" * 15_000 + "1",
        "f = " + "(" * 30_000,
        "f = " + "(" * 190 + ")" * 190,
        "f = " + "a if a else " * 2_500 + "a",
        "f = " + "lambda: " * 3_000 + "1",
        "".join(" " * depth + "if a:\n" for depth in range(200)),
        "f.a = 1;" * 3_000,
    ],
)
@pytest.mark.parametrize("opening", ["", "def f(x):\n    return 1\n\n"])
def test_texts_that_are_hard_to_parse_take_little_time_and_memory(text, opening):
    started = time.process_time()
    extract_program(fenced(opening + text), "f", PREFIX)
    assert time.process_time() - started < 3
    tracemalloc.start()
    extract_program(fenced(opening + text), "f", PREFIX)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


def test_a_base_model_may_change_its_argument_and_return_nothing():
    names = {}
    exec(extract_program("    a.append(1)\n", "f", 'def f(a):\n    """Append 1."""\n'), names)
    numbers = []
    assert names["f"](numbers) is None and numbers == [1]
