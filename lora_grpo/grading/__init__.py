"""Grading: extract the answer of a completion, and decide whether it is correct.

    numbers.check("So it is #### 18", row)               # -> Verdict(passed=True, ...)
    programs.check_many(completions, rows)               # runs the programs in the sandbox

verdict.py          `Row` and `Verdict`; what a user's grader may return
numbers.py          answers that are one number: the strict, flexible, and robust rules
mathematics.py      answers that are numbers, expressions, sets or intervals: compared by math-verify
programs.py         programs: runs them against the unit tests of their rows
code_extraction.py  extracts the program from a completion
"""

from lora_grpo.grading import mathematics, numbers, programs
from lora_grpo.grading.code_extraction import bound_names
from lora_grpo.grading.numbers import find_answers
from lora_grpo.grading.programs import solvable
from lora_grpo.grading.verdict import RESULT_ENTRIES, CheckError, Row, Verdict, as_verdict
