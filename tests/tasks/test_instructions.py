"""IFEval and IFBench as tasks, graded by if-verifiable."""

import json

import pytest

from lora_grpo.config import DataConfig, RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.errors import UserError
from lora_grpo.evaluation.protocol import make_protocol
from lora_grpo.grading import CheckError, Verdict
from lora_grpo.preview.diagnosis import Answer, Group, judge
from lora_grpo.sampling import SamplingParams
from lora_grpo.settings import check
from lora_grpo.tasks import get_task, instructions
from lora_grpo.workers import TooSlow

pytestmark = pytest.mark.engines
pytest.importorskip("if_verifiable", reason="if-verifiable is not installed: make engines")
TWO = {
    "key": 7,
    "prompt": "Write about rain, in lowercase, without commas.",
    "instruction_id_list": ["change_case:english_lowercase", "punctuation:no_comma"],
    "kwargs": [{}, {"num_words": None}],
}
KEYWORDS = {
    "prompt": "Use the word cat twice.",
    "instruction_id_list": ["keywords:frequency"],
    "kwargs": [{"keyword": "cat", "frequency": 2, "relation": "at least"}],
}


def rows_of(tmp_path, *records, name="ifeval"):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return get_task(name).load("eval", str(path))


@pytest.mark.parametrize(
    ("text", "passed", "loose", "score"),
    [
        ("the rain falls on the roof and it is quiet.", True, True, 1.0),
        ("the rain falls, and it is quiet.", False, False, 0.5),
        ("The rain falls, and it is quiet.", False, False, 0.0),
        ("HERE IT IS:\nthe rain falls on the roof and it is quiet.", False, True, 0.5),
        ("<think>Lowercase, no commas.</think>the rain falls on the roof and it is quiet.", True, True, 1.0),
        ("", False, False, 0.0),
        ("<think>Lowercase, no commas.</think>", False, False, 0.0),
        ("<think>Lowercase, no commas.", False, False, 0.0),
        ("Lowercase, no commas.</think>the rain falls on the roof and it is quiet.", True, True, 1.0),
        ("[THINK]Lowercase, no commas.[/THINK]the rain falls on the roof and it is quiet.", True, True, 1.0),
        ("the rain falls on the roof and it is quiet.[THINK]", False, False, 0.0),
    ],
)
def test_all_instructions_must_be_followed(tmp_path, text, passed, loose, score):
    (row,) = rows_of(tmp_path, TWO)
    verdict = get_task("ifeval").check(text, row)
    assert (verdict.passed, dict(verdict.rules), verdict.value) == (passed, {"strict": passed, "loose": loose}, score)


def test_arguments_reach_the_checker(tmp_path):
    (row,) = rows_of(tmp_path, KEYWORDS)
    assert [get_task("ifeval").check(text, row).passed for text in ("A cat sees a cat.", "A cat.")] == [True, False]


def test_rows_have_the_prompt_alone_and_repeated_prompts_are_dropped(tmp_path):
    path = tmp_path / "train.jsonl"
    records = [TWO | {"key": n, "prompt": f"{TWO['prompt']} ({n % 20})"} for n in range(24)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    other = tmp_path / "eval.jsonl"
    other.write_text(json.dumps(KEYWORDS))
    data = load_data(replace(RunConfig(), {"data": {"task": "ifeval", "train": str(path), "eval": str(other)}}))
    assert (len(data.train), len(data.eval)) == (20, 1)
    assert [message["role"] for message in data.train[0]["prompt"]] == ["user"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kwargs": [{}]}, "same length"),
        ({"instruction_id_list": []}, "same length"),
        ({"prompt": ""}, "prompt"),
        ({"kwargs": [None, '{"num_words": 5}']}, "rows.jsonl:1: kwargs has .* expected an object"),
        ({"kwargs": [{}, ""]}, "kwargs has"),
    ],
)
def test_wrong_rows_are_one_line(tmp_path, change, word):
    with pytest.raises(UserError, match=word):
        rows_of(tmp_path, TWO | change)


@pytest.mark.parametrize("names", [["punctuation:no_commas"], ["punctuation:no_commas", "punctuation:no_comma"]])
def test_an_unknown_instruction_stops_the_run(tmp_path, names):
    (row,) = rows_of(tmp_path, TWO | {"instruction_id_list": names, "kwargs": [{}] * len(names)})
    with pytest.raises(CheckError, match="no instruction punctuation:no_commas"):
        get_task("ifeval").check("Text", row)


@pytest.mark.parametrize(
    ("name", "instruction", "text"),
    [("ifbench", "format:quote_unquote", "42"), ("ifeval", "detectable_format:json_format", "[" * 200_000)],
    ids=["no words", "nested too deep"],
)
def test_a_text_that_a_checker_cannot_read_is_wrong(tmp_path, name, instruction, text):
    (row,) = rows_of(tmp_path, {"prompt": "Write.", "instruction_id_list": [instruction], "kwargs": [{}]}, name=name)
    verdict = get_task(name).check(text, row)
    assert (verdict.passed, verdict.reason, verdict.value) == (False, "wrong_answer", 0.0)


def test_arguments_that_no_text_can_follow_stop_the_run(tmp_path):
    (row,) = rows_of(tmp_path, KEYWORDS | {"kwargs": [{"keyword": "cat", "relation": "exactly"}]})
    with pytest.raises(CheckError, match="exactly"):
        get_task("ifeval").check("A cat sees a cat.", row)


def test_a_text_that_takes_too_long_has_all_rules(tmp_path, monkeypatch):
    """As verdicts on all other texts have, so that rules have the same samples."""

    def take_too_long(*arguments):
        raise TooSlow

    monkeypatch.setattr(instructions, "_follow", take_too_long)
    (row,) = rows_of(tmp_path, TWO)
    verdict = get_task("ifeval").check("Text", row)
    assert (verdict.reason, dict(verdict.rules), verdict.value) == ("timeout", {"strict": False, "loose": False}, 0.0)


def test_a_report_names_the_grader_and_no_answer_format():
    protocol = make_protocol(DataConfig(task="ifeval"), SamplingParams(1, 0.0, 1.0, 64), 1, 0, data_sha256="")
    assert "if-verifiable" in protocol.grading and protocol.sampling.prompt_style is None


def test_a_benchmark_has_neither_training_rows_nor_references(tmp_path):
    with pytest.raises(UserError, match=r"--data\.train"):
        get_task("ifbench").load("train")
    with pytest.raises(UserError, match="reference"):
        check(replace(RunConfig(method="sft"), {"data": {"task": "ifeval"}}))


def test_no_format_of_answers_is_reported_or_advised():
    """The prompts of the rows ask for none, whatever `--data.prompt-style` says."""
    data = DataConfig(task="ifeval", train="a.jsonl", eval="b.jsonl", prompt_style="hashes")
    protocol = make_protocol(data, SamplingParams(1, 0.0, 1.0, 64), rows=1, seed=0, data_sha256="")
    assert protocol.sampling.prompt_style is None

    wrong = Answer("Rain.", 2, False, {"correct_answer": 0.0}, Verdict(False, "wrong_answer", score=0.0))
    diagnosis = judge([Group({"id": "row", "question": "Write."}, (wrong,) * 4)] * 8, RunConfig(data=data))
    advice = " ".join(finding.advice for finding in diagnosis.findings)
    assert "easier problems" in advice
    assert "e.g." not in advice


def test_the_package_is_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .*'lora-grpo\[tasks\]'"):
        instructions.make_task("ifeval")
