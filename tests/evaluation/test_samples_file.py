import json
from dataclasses import replace
from pathlib import Path

import pytest

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.evaluation import samples_file
from lora_grpo.evaluation.evaluate_model import evaluate_and_report
from lora_grpo.evaluation.options import EvaluateOptions
from lora_grpo.evaluation.report import read_report
from lora_grpo.grading import programs

HUMANEVAL = [
    {
        "task_id": f"HumanEval/{i}",
        "prompt": f'def f{i}(x):\n    """Times {i}."""\n',
        "entry_point": f"f{i}",
        "canonical_solution": f"    return {i} * x\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {i}\n",
    }
    for i in range(1, 4)
]
MBPP = [
    {"task_id": i, "text": "?", "code": f"def f{i}(x):\n    return x", "test_list": [f"assert f{i}(1) == 1"]}
    for i in (11, 123)
]
GSM8K = [{"question": "a?", "answer": "1 + 1\n#### 2"}, {"question": "b?", "answer": "3"}]
RIGHT = "    return {} * x\n"
FILES = {"results.jsonl", "report.json", "report.md", "evaluation.json"}


def found(folder):
    """Return the files of an evaluation, without the lock file."""
    return [path for path in folder.iterdir() if path.name != ".lock"]


def write(path, lines):
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture
def asked(tmp_path):
    """Options for two samples per problem and three small problems: 2 of 2, 1 of 2 and 0 of 2 pass."""
    data = write(tmp_path / "data.jsonl", HUMANEVAL)
    completions = [RIGHT.format(1)] * 2 + [RIGHT.format(2), RIGHT.format(9)] + ["    return (", "    return 4"]
    lines = [{"task_id": f"HumanEval/{1 + i // 2}", "completion": text} for i, text in enumerate(completions)]
    samples = write(tmp_path / "samples.jsonl", lines)
    return EvaluateOptions(str(samples), task="humaneval", output_dir=tmp_path / "out", data=str(data), k=(1, 2))


@pytest.fixture
def runs(monkeypatch):
    """The program sources of every sandbox call, without those for reference programs. The sandbox runs as usual."""
    calls, run = [], sandbox.run

    def counted(programs):
        if not programs[0].reference:
            calls.append([program.source for program in programs])
        return run(programs)

    monkeypatch.setattr(programs.sandbox, "run", counted)
    return calls


def test_results_and_report_are_the_harnesss(asked):
    lines = read(asked.source)
    write(asked.source, [{**lines[0], "model": "half a pair: \ud800", "passed": "?"}, *lines[1:]])
    [report] = evaluate_and_report(asked)
    results = read(asked.output_dir / "results.jsonl")
    assert [result["completion"] for result in results] == [line["completion"] for line in read(asked.source)]
    assert [result["passed"] for result in results] == [True, True, True, False, False, False]
    assert results[0] == {**read(asked.source)[0], "passed": True, "result": "passed", "status": "passed"}
    assert results[3]["result"].startswith("failed: ") and results[3]["status"] == "failed"
    assert results[4]["status"] == "invalid"
    assert report.evaluated.scores["pass@1"] == pytest.approx(0.5)
    assert report.evaluated.scores["pass@2"] == pytest.approx(2 / 3)
    assert (report.evaluated.tasks, report.evaluated.samples, report.protocol.rows) == (3, 6, 3)
    counts = {"failed": 2, "invalid": 1, "passed": 3, "unparsed": 0, "samples": 6}
    assert report.evaluated.sample_stats["sampled"] == counts
    assert report.protocol.sandbox.startswith("isolation ")
    assert report.evaluated.intervals["pass@1"][0] < 0.5 < report.evaluated.intervals["pass@1"][1]
    assert read_report(asked.output_dir) == report
    written = json.loads((asked.output_dir / "report.json").read_text())
    assert written["pass@1"] == report.evaluated.scores["pass@1"]
    assert {path.name for path in found(asked.output_dir)} == FILES


def test_nothing_is_extracted_or_cut(asked, runs):
    """The harness uses the text after the prompt exactly as it is."""
    texts = [f"    return 1 * x\n\n{tail}" for tail in ("def g(:", "print('def')", "```")] + [
        f"```python\n{RIGHT}\n```"
    ]
    write(asked.source, [{"task_id": "HumanEval/1", "completion": text} for text in texts])
    evaluate_and_report(asked)
    assert runs == [[HUMANEVAL[0]["prompt"] + text for text in texts]]
    assert [r["passed"] for r in read(asked.output_dir / "results.jsonl")] == [False, True, False, False]


def test_a_solution_is_a_whole_program_as_in_evalplus(asked, runs):
    program = HUMANEVAL[0]["prompt"] + RIGHT.format(1)
    write(asked.source, [{"task_id": "HumanEval/1", "solution": program}])
    [report] = evaluate_and_report(replace(asked, k=(1,)))
    assert runs == [[program]] and report.evaluated.scores["pass@1"] == 1.0


@pytest.mark.parametrize("name", [11, "11", "mbpp/11", "Mbpp/11"])
def test_an_mbpp_completion_is_the_whole_program(name, asked, runs):
    data = write(Path(asked.data), MBPP)
    right = "def f11(x):\n    return x"
    write(asked.source, [{"task_id": name, "completion": text} for text in (right, "    return x")])
    [report] = evaluate_and_report(replace(asked, task="mbpp", data=str(data)))
    assert runs == [[right, "    return x"]]
    assert [r["passed"] for r in read(asked.output_dir / "results.jsonl")] == [True, False]
    assert report.protocol.rows == 2


def test_a_completion_of_evalplus_is_graded_by_all_of_its_inputs(asked):
    keys = {
        "entry_point": "f",
        "canonical_solution": "def f(x):\n    return x",
        "base_input": [[1]],
        "plus_input": [[2]],
    }
    data = write(
        Path(asked.data), [{"task_id": "Mbpp/2", "prompt": '"""\n?\nassert f(1) == 1\n"""\n', "atol": 0, **keys}]
    )
    write(asked.source, [{"task_id": "Mbpp/2", "completion": f"def f(x):\n    return {text}"} for text in ("x", "1")])
    evaluate_and_report(replace(asked, task="mbpp-plus", data=str(data)))
    assert [r["passed"] for r in read(asked.output_dir / "results.jsonl")] == [True, False]


@pytest.mark.parametrize(("style", "strict"), [("hashes", [True] + 4 * [False]), ("xml", [False, True] + 3 * [False])])
def test_gsm8k_reports_its_rules_and_passes_by_the_robust_one(style, strict, asked):
    data = write(Path(asked.data), GSM8K)
    completions = [
        "1 + 1\n#### 2",
        "<reasoning>r</reasoning><answer>2</answer>",
        "The answer is 2.",
        "It is 2",
        "#### 3",
    ]
    line = {"task_id": "gsm8k/test/0", "read_from": "a key of another tool"}
    write(asked.source, [{**line, "completion": text} for text in completions])
    [report] = evaluate_and_report(replace(asked, task="gsm8k", data=str(data), style=style))
    results = read(asked.output_dir / "results.jsonl")
    assert [result["strict"] for result in results] == strict
    assert [result["flexible"] for result in results] == [True, True, True, True, False]
    passed = [True, True, True, False, False]
    assert [result["robust"] for result in results] == [result["passed"] for result in results] == passed
    failures = ["failed: no_answer", "failed: wrong_answer"]
    assert [result["result"] for result in results] == ["passed", "passed", "passed", *failures]
    places = ["marker", "marker", "statement", None, "marker"]
    assert [result.get("read_from") for result in results] == places
    counts = {"strict rule": 1, "flexible rule": 4, "robust rule": 3}
    counts |= {"passed, from a marker": 2, "passed, from a statement": 1}
    assert counts.items() <= report.evaluated.sample_stats["sampled"].items()
    assert report.protocol.sandbox is None
    assert "| passed, from a statement | 20.0 (1) |" in (asked.output_dir / "report.md").read_text()


# Killed and resumed


@pytest.mark.parametrize("torn", [b"", b'{"task_id": "Human'])
def test_a_killed_evaluation_goes_on_after_its_last_whole_chunk(torn, asked, runs, monkeypatch):
    [whole] = evaluate_and_report(replace(asked, output_dir=asked.output_dir.with_name("whole")))
    monkeypatch.setattr(samples_file, "_CHUNK", 2)
    grade, graded = samples_file._grade_chunk, []

    def dies_at_the_third(task, samples):
        graded.append(len(samples))
        if len(graded) == 3:
            raise KeyboardInterrupt
        return grade(task, samples)

    monkeypatch.setattr(samples_file, "_grade_chunk", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        evaluate_and_report(asked)
    with (asked.output_dir / "results.jsonl").open("ab") as file:
        file.write(torn)
    graded[:] = [0] * 9
    assert evaluate_and_report(asked) == [whole]
    assert graded == [0] * 9 + [2]
    assert (asked.output_dir / "results.jsonl").read_bytes() == (
        asked.output_dir.with_name("whole") / "results.jsonl"
    ).read_bytes()
    assert {path.name for path in found(asked.output_dir)} == FILES


@pytest.mark.parametrize("change", ["timeout_seconds", "samples_sha256", "data_sha256"])
def test_a_folder_with_another_evaluation_is_refused_naming_the_difference(change, asked, tmp_path):
    [report] = evaluate_and_report(asked)
    before = {path: path.read_bytes() for path in asked.output_dir.iterdir()}
    changes = {
        "timeout_seconds": {"sandbox": sandbox.Settings(timeout_seconds=2)},
        "samples_sha256": {"source": str(write(tmp_path / "s.jsonl", read(asked.source)[2:]))},
        "data_sha256": {"data": str(write(tmp_path / "d.jsonl", [*HUMANEVAL, {**HUMANEVAL[0], "task_id": "x"}]))},
    }
    other = replace(asked, **changes[change])
    with pytest.raises(UserError, match=f"contains another evaluation: {change} was .*; pass another --output-dir, or"):
        evaluate_and_report(other)
    assert {path: path.read_bytes() for path in asked.output_dir.iterdir()} == before
    assert evaluate_and_report(asked) == [report]


def first_without_verdict(lines):
    return [{key: lines[0][key] for key in ("task_id", "completion")}, *lines[1:]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[1:], "does not fit the samples; delete it"),
        (first_without_verdict, r"results\.jsonl:1: .*; delete the line"),
    ],
)
def test_damaged_results_are_noticed(damage, message, asked):
    evaluate_and_report(asked)
    write(asked.output_dir / "results.jsonl", damage(read(asked.output_dir / "results.jsonl")))
    (asked.output_dir / "report.json").unlink()
    with pytest.raises(UserError, match=message):
        evaluate_and_report(asked)


def test_keys_of_conversations_and_greedy_samples_of_other_tools_are_not_counted(tmp_path):
    data = write(tmp_path / "data.jsonl", [{"question": "a?", "answer": "#### 1"}])
    line = {"task_id": "data/0", "completion": "#### 1", "messages": [], "turns": "x"}
    numbered = [{**line, "sample_index": number} for number in (0, 1)]
    samples = write(tmp_path / "samples.jsonl", [*numbered, {**line, "sample_index": "greedy"}])
    options = EvaluateOptions(str(samples), task="gsm8k", output_dir=tmp_path / "out", data=str(data), k=(3,))
    with pytest.raises(UserError, match="--k 3 exceeds 2"):
        evaluate_and_report(options)
    assert not (tmp_path / "out").exists()
    evaluate_and_report(replace(options, k=(2,)))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["evaluated"]["scores"]["pass@2"] == 1


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows; expected one JSON object with 'task_id' and 'completion' a line"),
        ('{"task_id": "HumanEval/1", "completion": ""}\n{"task_id"', r"samples\.jsonl:2: not JSON"),
        ('{"task_id": "HumanEval/9", "completion": ""}', "unknown task_id 'HumanEval/9'; .*such as 'Human"),
    ],
)
def test_a_wrong_file_of_samples_is_told_in_one_line_and_nothing_is_written(text, message, asked):
    Path(asked.source).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        evaluate_and_report(asked)
    assert "\n" not in str(error.value)
    assert not asked.output_dir.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": None}, "--task is missing"),
        ({"source": "missing.jsonl"}, r"missing\.jsonl cannot be read: No such file"),
    ],
)
def test_what_cannot_be_done_is_told_and_nothing_is_written(change, message, asked):
    with pytest.raises(UserError, match=message):
        evaluate_and_report(replace(asked, **change))
    assert not asked.output_dir.exists()
