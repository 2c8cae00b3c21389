import pytest

from lora_grpo.errors import UserError
from lora_grpo.evaluation.foreign_samples import agreement, translate
from lora_grpo.tasks import gsm8k

ROWS = {
    "gsm8k/test/0": {"id": "t/0", "question": "Nine eggs at $2 each?", "answer": "9*2=<<9*2=18>>18\n#### 18"},
    "gsm8k/test/1": {"id": "t/1", "question": "How many  in\n30 crates of 100?", "answer": "30*100=3000\n#### 3,000"},
    "gsm8k/test/2": {"id": "t/2", "question": "Three less five?", "answer": "#### -2"},
}
QUESTIONS = [row["question"] for row in ROWS.values()]


def at(values):
    """Values with where they stand, from the second line on."""
    return [(f"f.jsonl:{number}", value) for number, value in enumerate(values, start=2)]


def lm_eval_line(number, responses, filter_name, label, **changed):
    """A line as lm-eval 0.4.13 writes it."""
    question, answer = QUESTIONS[number], ROWS[f"gsm8k/test/{number}"]["answer"]
    settings = {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "temperature": 0.0}
    return {
        "doc_id": 7 + number,
        "doc": {"question": question, "answer": answer},
        "target": answer,
        "arguments": {"gen_args_0": {"arg_0": f"Question: {question}\nAnswer:", "arg_1": settings}},
        "resps": [responses],
        "filtered_resps": ["[invalid]"],
        "filter": filter_name,
        "metrics": ["exact_match"],
        "doc_hash": "2c49",
        "prompt_hash": "48ed",
        "target_hash": "cee2",
        "exact_match": label,
    } | changed


def authors_line(number, **solved):
    truth = ROWS[f"gsm8k/test/{number}"]["answer"].replace("#### ", "A: ")
    models = {model: {"is_correct": label, "solution": text} for model, (label, text) in solved.items()}
    return {"question": QUESTIONS[number], "ground_truth": truth, **models}


def graded(samples):
    """The samples with the kit's verdicts."""
    results = []
    for _, sample in samples:
        verdict = gsm8k.grade(sample["completion"], {**ROWS[sample["task_id"]], "prompt_style": "hashes"})
        results.append({**sample, "passed": verdict.passed, **verdict.rules})
    return results


# lm-eval


def test_the_lines_of_a_documents_filters_become_one_sample():
    """All documents come under one filter, then all under the next; the row is the question's, not the number's."""
    values = [
        lm_eval_line(1, ["3000 crates"], "strict-match", 0.0),
        lm_eval_line(0, ["#### 18"], "strict-match", 1.0),
        lm_eval_line(1, ["3000 crates"], "flexible-extract", 1.0),
        lm_eval_line(0, ["#### 18"], "flexible-extract", 1.0),
    ]
    assert translate(at(values), ROWS) == [
        (
            "f.jsonl:2",
            {
                "task_id": "gsm8k/test/1",
                "completion": "3000 crates",
                "labels": {"strict-match": False, "flexible-extract": True},
            },
        ),
        (
            "f.jsonl:3",
            {
                "task_id": "gsm8k/test/0",
                "completion": "#### 18",
                "labels": {"strict-match": True, "flexible-extract": True},
            },
        ),
    ]


def test_of_several_responses_the_labels_are_the_firsts():
    """Its filters take the first; a vote of all is a verdict on none of them."""
    values = [
        lm_eval_line(0, ["18", "17", "#### 18"], name, label)
        for name, label in (("strict-match", 0), ("flexible-extract", True), ("maj@3", 1.0))
    ]
    samples = [sample for _, sample in translate(at(values), ROWS)]
    assert [sample["completion"] for sample in samples] == ["18", "17", "#### 18"]
    assert {sample["task_id"] for sample in samples} == {"gsm8k/test/0"}
    assert [sample["labels"] for sample in samples] == [{"strict-match": False, "flexible-extract": True}, {}, {}]


def test_any_filter_is_a_label_of_a_response_that_is_alone():
    ((_, sample),) = translate(at([lm_eval_line(0, ["18"], "maj@1", 1.0)]), ROWS)
    assert sample["labels"] == {"maj@1": True}


def test_a_question_is_found_whatever_its_white_space():
    line = lm_eval_line(1, ["3"], "strict-match", 0.0, doc={"question": " How many in 30 crates  of 100?\n"})
    ((_, sample),) = translate(at([line]), ROWS)
    assert sample["task_id"] == "gsm8k/test/1"


GOOD = lm_eval_line(0, ["18"], "strict-match", 1.0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"resps": None}, "'resps' is None; expected a line of lm-eval's --log_samples with "),
        ({"doc": "18"}, "'doc' is '18'; expected a line of lm-eval's"),
        ({"doc_id": "7"}, "'doc_id' is '7'; expected"),
        ({"filter": 3}, "'filter' is 3; expected"),
        ({"exact_match": "1.0"}, "'exact_match' is '1.0'; expected"),
        ({"exact_match": 0.5}, "'exact_match' is 0.5; expected 0.0 or 1.0"),
        ({"resps": []}, "'resps' is []; expected one list of one text or more"),
        ({"resps": [[]]}, "'resps' is [[]]; expected one list"),
        ({"resps": ["18"]}, "'resps' is ['18']; expected one list"),
        ({"resps": [["18"], ["18"]]}, "'resps' is [['18'], ['18']]; expected one list"),
        ({"resps": [["18", 18]]}, "'resps' is [['18', 18]]; expected one list"),
        ({"doc": {}}, "'question' is missing; expected it in 'doc'"),
        ({"doc": {"question": 3}}, "'question' is 3; expected it in 'doc'"),
        ({"doc": {"question": "Why?"}}, "no row of the data asks 'Why?'; pass the data that it comes from by --data"),
        ({"resps": [["19"]]}, "document 7 has other responses or another question than at f.jsonl:2; the file holds"),
        ({"doc": {"question": QUESTIONS[1]}}, "document 7 has other responses or another question than at f.jsonl:2"),
        ({"filter": "strict-match"}, "document 7 has the filter 'strict-match' twice; the file holds two runs"),
    ],
)
def test_a_malformed_line_of_lm_eval_is_told(changed, said):
    with pytest.raises(UserError) as caught:
        translate(at([GOOD, {**GOOD, "filter": "flexible-extract", **changed}]), ROWS)
    assert str(caught.value).startswith(f"f.jsonl:3: {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["doc_id", "doc", "resps", "filter", "exact_match"])
def test_a_key_that_lm_eval_writes_is_missed_on_the_first_line_too(key):
    line = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(UserError, match=f"^f.jsonl:2: '{key}' is missing; expected a line of lm-eval's"):
        translate(at([line]), ROWS)


def test_two_of_lm_evals_keys_are_enough_to_know_it():
    with pytest.raises(UserError, match=r"^f.jsonl:2: 'doc_id' is missing; expected a line of lm-eval's"):
        translate(at([{"doc": GOOD["doc"], "resps": GOOD["resps"]}]), ROWS)


def test_two_rows_that_ask_the_same_are_not_told_apart():
    rows = {**ROWS, "gsm8k/test/3": {"question": QUESTIONS[0], "answer": "9"}}
    with pytest.raises(UserError, match=r"^f.jsonl:2: rows gsm8k/test/0 and gsm8k/test/3 both ask 'Nine eggs"):
        translate(at([GOOD]), rows)
    assert translate(at([lm_eval_line(2, ["3"], "strict-match", 0.0)]), rows)


# GSM8K's authors


def test_each_models_solution_becomes_a_sample():
    values = [
        authors_line(0, small=(False, "9+2=<<9+2=11>>11\nA: 11"), large=(True, "9*2=<<9*2=18>>18\nA: 18")),
        authors_line(1, small=(True, "A: 3,000"), large=(False, "30*100 = <<30*100=")),
    ]
    assert translate(at(values), ROWS) == [
        (where, {"task_id": task_id, "completion": text, "model": model, "label": label})
        for where, task_id, text, model, label in [
            ("f.jsonl:2", "gsm8k/test/0", "9+2=<<9+2=11>>11\n#### 11", "small", False),
            ("f.jsonl:2", "gsm8k/test/0", "9*2=<<9*2=18>>18\n#### 18", "large", True),
            ("f.jsonl:3", "gsm8k/test/1", "#### 3,000", "small", True),
            ("f.jsonl:3", "gsm8k/test/1", "30*100 = <<30*100=", "large", False),
        ]
    ]


@pytest.mark.parametrize(
    ("solution", "completion"),
    [
        ("so\nA: 18\n \n", "so\n#### 18\n \n"),
        ("A: 18\nNo, wait.", "A: 18\nNo, wait."),
        ("A: 17\nA: 18", "A: 17\n#### 18"),
        ("Plan A: 18", "Plan A: 18"),
        ("so\nA:", "so\nA:"),
        ("", ""),
    ],
)
def test_only_the_last_line_is_rewritten(solution, completion):
    ((_, sample),) = translate(at([authors_line(0, small=(True, solution))]), ROWS)
    assert sample["completion"] == completion


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "got list; expected a line with 'question' and, for each model, an object with 'solution' and"),
        ({"ground_truth": "A: 1", "small": {}}, "'question' is missing; expected a line with 'question'"),
        ({"question": "Why?", "ground_truth": "A: 1"}, "no row of the data asks 'Why?'; pass the data"),
        ({"question": QUESTIONS[0], "ground_truth": "A: 18"}, "no model's solution; expected a line with"),
        ({"question": QUESTIONS[0], "small": "A: 18"}, "'small' is 'A: 18'; expected a line with 'question'"),
        ({"question": QUESTIONS[0], "small": {"is_correct": True}}, "'small' is {'is_correct': True}; expected"),
        ({"question": QUESTIONS[0], "small": {"solution": "A: 18", "is_correct": 1}}, "'small' is {'solution': "),
        (GOOD, "'question' is missing; expected a line with 'question'"),
    ],
)
def test_a_malformed_line_of_the_authors_is_told(line, said):
    with pytest.raises(UserError) as caught:
        translate(at([authors_line(0, small=(True, "A: 18")), line]), ROWS)
    assert str(caught.value).startswith(f"f.jsonl:3: {said}")
    assert "\n" not in str(caught.value)


def test_a_line_of_the_authors_is_none_of_lm_evals():
    with pytest.raises(UserError, match=r"^f.jsonl:3: 'doc_id' is missing; expected a line of lm-eval's"):
        translate(at([GOOD, authors_line(0, small=(True, "A: 18"))]), ROWS)


# Neither


@pytest.mark.parametrize(
    "first",
    [
        None,
        [],
        {},
        {"task_id": "gsm8k/test/0", "completion": "18"},
        {"task_id": "gsm8k/test/0", "completion": "18", "filter": "strict-match", "doc_id": 3},
        {"question": "Nine eggs?", "answer": "#### 18"},
        {"question": "Nine eggs?", "ground_truth": "18", "response": "18"},
        {"doc": {"is_correct": True}},
    ],
)
def test_another_file_is_left_alone(first):
    assert translate(at([first, GOOD]), ROWS) is None


def test_no_line_has_no_shape():
    assert translate([], ROWS) is None


# Agreement


def test_the_authors_labels_are_held_against_robust():
    values = [
        authors_line(0, small=(True, "A: 18"), large=(False, "A: 17")),
        authors_line(1, small=(True, "A: 3,000"), large=(True, "A: 3000.0")),
        authors_line(2, small=(True, "A: 2"), large=(False, "cut off before -2")),
    ]
    counts = agreement(graded(translate(at(values), ROWS)))
    common = {"rule": "robust", "samples": 3}
    assert counts == {
        "small": {
            "label": {
                **common,
                "passed": 2,
                "labelled_correct": 3,
                "agree": 2,
                "disagreements": ["gsm8k/test/2"],
            }
        },
        "large": {"label": {**common, "passed": 1, "labelled_correct": 1, "agree": 3, "disagreements": []}},
    }


def test_lm_evals_labels_are_held_against_flexible_and_its_strict_match_is_not():
    """`#### 17 #### 18` shows all three apart: its first number, no number, the last number."""
    responses = {0: "#### 18 #### 17", 1: "3000", 2: "-2"}
    labels = {0: (1.0, 0.0), 1: (0.0, 1.0), 2: (0.0, 0.0)}
    values = [
        lm_eval_line(number, [text], name, labels[number][place])
        for number, text in responses.items()
        for place, name in enumerate(("strict-match", "flexible-extract"))
    ]
    assert agreement(graded(translate(at(values), ROWS))) == {
        "all": {
            "strict-match": {
                "rule": "strict",
                "samples": 3,
                "passed": 0,
                "labelled_correct": 1,
                "agree": None,
                "disagreements": [],
            },
            "flexible-extract": {
                "rule": "flexible",
                "samples": 3,
                "passed": 2,
                "labelled_correct": 1,
                "agree": 2,
                "disagreements": ["gsm8k/test/2"],
            },
        }
    }


def test_a_filter_without_a_rule_is_counted_and_a_sample_without_a_label_is_not():
    values = [lm_eval_line(0, ["18", "18"], name, 1.0) for name in ("score-first", "maj@2")]
    assert agreement(graded(translate(at(values), ROWS))) == {
        "all": {
            "score-first": {
                "rule": None,
                "samples": 1,
                "passed": None,
                "labelled_correct": 1,
                "agree": None,
                "disagreements": [],
            }
        }
    }
    assert agreement([{"task_id": "gsm8k/test/0", "completion": "18", "robust": True}]) == {}


def test_no_more_than_twenty_disagreements_are_named():
    results = [{"task_id": f"gsm8k/test/{i}", "model": "m", "label": True, "robust": False} for i in range(25)]
    counts = agreement(results)["m"]["label"]
    assert (counts["agree"], counts["samples"]) == (0, 25)
    assert counts["disagreements"] == [f"gsm8k/test/{i}" for i in range(20)]
