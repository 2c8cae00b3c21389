"""tools/check_gain.py: its mixtures are what they say, and its truth is read without the kit's rules."""

import json
import random
import re

import check_gain
import pytest
from helpers.graded_samples import samples

from lora_grpo.tasks import get_task, grade_all


@pytest.mark.parametrize("name", check_gain.MIXTURES)
def test_a_mixture_has_its_shares_and_its_answers_are_read_as_the_kit_reads_them(name):
    """400 documents; the shares are within 4 standard deviations of at most 2.5 points."""
    careful, in_format = check_gain.MIXTURES[name]
    stream = check_gain.documents(random.Random(0), careful, in_format)
    texts = [next(stream).parts[1][0].removesuffix("<|im_end|>") for _ in range(400)]
    formatted = [text for text in texts if "<answer>" in text]
    assert len(formatted) / 400 == pytest.approx(in_format, abs=0.1)
    assert sum("=" in text for text in texts) / 400 == pytest.approx(careful, abs=0.1)
    rows = [row for row in get_task("starter").load("eval") if int(row["answer"].rpartition("####")[2]) > 9][:400]
    rights = [re.sub(r"-?\d+(?=$|\n</answer>)", row["answer"].rpartition("####")[2].strip(), text)
              for text, row in zip(texts, rows, strict=True)]  # fmt: skip
    golds = {row["id"]: row["answer"].rpartition("####")[2].strip() for row in rows}
    verdicts = grade_all("starter", rights, [{**row, "prompt_style": "xml"} for row in rows])
    lines = [{"task_id": row["id"], "draw": 0, "completion": text, "truncated": False, "passed": verdict.passed}
             for row, text, verdict in zip(rows, rights, verdicts, strict=True)]  # fmt: skip
    found = check_gain.read(lines, golds)
    for row, text, verdict in zip(rows, rights, verdicts, strict=True):
        formatted = "<answer>" in text
        assert found[row["id"]] == [(True, verdict.passed, formatted)] and verdict.passed == formatted, text
        assert verdict.rules["flexible"], text


def test_the_truth_leaves_out_the_samples_of_the_run(tmp_path):
    row = get_task("starter").load("eval")[0]
    gold = row["answer"].rpartition("####")[2].strip()
    right, hidden = f"<reasoning>\nx\n</reasoning>\n<answer>\n{gold}\n</answer>", f"Total 1+1={gold}"
    wrong = "<reasoning>\nx\n</reasoning>\n<answer>\n0\n</answer>"

    def write(name, texts):
        (made,) = [samples("-", ["-" * len(texts)])[1:]]
        lines = [{**line, "task_id": row["id"], "completion": text, "truncated": False, "passed": text == right}
                 for line, text in zip(made, texts, strict=True)]  # fmt: skip
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("compared-1.results.jsonl", [right] * 2 + [right, hidden, wrong, wrong])
    write("results.jsonl", [wrong] * 2 + [right, right, right, hidden])
    # After the 2 samples of the run: a = 1/2, b = 1/4; u = 1, t = 3/4. With k = 1, rest = (1 - a) u - a (1 - a), where
    # a (1 - a) is 1/2 x 2/3 without replacement. Of 3 base samples in the format, 1 is right.
    assert check_gain.truth(tmp_path, 2) == pytest.approx(
        {"gain in pass@1": 0.5, "format": 0.0, "sharpening": 1 / 3, "rest": 1 / 6, "worth": 1 / 3 - 1 / 4}
    )
