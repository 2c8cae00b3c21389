"""Grading: extract the answer of a completion, and decide whether it is correct.

    numbers.check("So it is #### 18", row)               # -> Verdict(passed=True, ...)
    programs.check_many(completions, rows)               # runs the programs in the sandbox

verdict.py           `Row` and `Verdict`; what a user's grader may return
Answers that are one number:
numbers.py           the strict, flexible, and robust rules
answer_markers.py    finds the answer by its marker: `#### `, `\\boxed{}`, `<answer>`
final_statements.py  finds the answer in prose: "The answer is 18."
number_parsing.py    reads the number of an answer: `$1,000`, `18\\ \\text{cm}`
Answers that are mathematics:
mathematics.py       numbers, expressions, sets or intervals, compared by math-verify
Programs:
programs.py          runs programs against the unit tests of their rows
code_extraction.py   extracts the program from a completion
code_parsing.py      parses code up to where it is no longer Python
code_names.py        the names that statements bind and read
demonstrations.py    drops statements that only show how the program is used
"""

from lora_grpo.grading import mathematics, numbers, programs
from lora_grpo.grading.answer_markers import find_answers
from lora_grpo.grading.code_names import bound_names
from lora_grpo.grading.programs import solvable
from lora_grpo.grading.verdict import RESULT_ENTRIES, CheckError, Row, Verdict, as_verdict
