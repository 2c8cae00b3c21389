"""Compare the verdicts of `--task math` with the test cases that math-verify publishes.

    git clone https://github.com/huggingface/Math-Verify
    python tools/math_parity.py Math-Verify

A case is a reference, a text and whether they are equal, given as parameters of a test. A text that marks no answer is
graded as the answer in `<answer>`. Prints the number of equal verdicts, and every case with another one.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from lora_grpo.errors import UserError
from lora_grpo.grading import find_answers
from lora_grpo.tasks import mathematics


def cases(tests: Path) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the name of the test, the reference, the text and whether they are equal."""
    for file in sorted(tests.glob("test_*.py")):
        for name, function in vars(importlib.import_module(f"tests.{file.stem}")).items():
            for mark in getattr(function, "pytestmark", ()):
                names, values = mark.args if mark.name == "parametrize" else ("", ())
                if names.replace(" ", "").startswith("gold,pred,expected"):
                    for gold, text, equal, *_ in (getattr(value, "values", value) for value in values):
                        yield f"{file.stem}::{name}", gold, text, bool(equal)


def main(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    published, different = [*cases(folder / "tests")], 0
    for test, gold, text, equal in published:
        try:
            passed = mathematics.check(text if find_answers(text) else f"<answer>{text}</answer>", {"answer": gold})
            found, reason = passed.passed, passed.reason
        except UserError as error:
            found, reason = None, str(error)
        if found != equal:
            different += 1
            print(f"{test}: {gold!r:.60} {text!r:.100}: {reason}, expected {'' if equal else 'not '}equal")
    print(f"{len(published) - different} of {len(published)} verdicts are equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
