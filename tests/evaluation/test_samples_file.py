"""Samples of other programs: graded as the official harness grades them, resumed, and refused in one line."""

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


def file_names(folder):
    """Return the names of the files of an evaluation, without the lock file."""
    return {path.name for path in folder.iterdir()} - {".lock"}


def write(path, lines):
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture
def options(tmp_path):
    """Options for two samples per problem and three small problems: 2 of 2, 1 of 2 and 0 of 2 pass."""
    completions = {
        "HumanEval/1": [RIGHT.format(1), RIGHT.format(1)],
        "HumanEval/2": [RIGHT.format(2), RIGHT.format(9)],
        "HumanEval/3": ["    return (", "    return 4"],
    }
    lines = [{"task_id": task_id, "completion": text} for task_id, texts in completions.items() for text in texts]
    samples = write(tmp_path / "samples.jsonl", lines)
    data = write(tmp_path / "data.jsonl", HUMANEVAL)
    return EvaluateOptions(str(samples), task="humaneval", output_dir=tmp_path / "out", data=str(data), k=(1, 2))


def read_results(options):
    return read(options.output_dir / "results.jsonl")


def passed(options):
    return [result["passed"] for result in read_results(options)]


@pytest.fixture
def programs_of_calls(monkeypatch):
    """The program sources of every sandbox call, without those for reference programs. The sandbox runs as usual."""
    programs_of_calls = []
    run = sandbox.run

    def recorded(programs):
        if not programs[0].reference:
            programs_of_calls.append([program.source for program in programs])
        return run(programs)

    monkeypatch.setattr(programs.sandbox, "run", recorded)
    return programs_of_calls


def test_results_and_report_are_the_harnesss(options):
    samples = read(options.source)
    samples[0] |= {"model": "half a pair: \ud800", "passed": "?"}  # keys of another tool
    write(options.source, samples)
    [report] = evaluate_and_report(options)

    results = read_results(options)
    assert [result["completion"] for result in results] == [sample["completion"] for sample in samples]
    assert passed(options) == [True, True, True, False, False, False]
    assert results[0] == {**samples[0], "passed": True, "result": "passed", "status": "passed"}
    assert results[3]["result"].startswith("failed: ")
    assert results[3]["status"] == "failed"
    assert results[4]["status"] == "invalid"

    evaluated = report.evaluated
    assert evaluated.scores["pass@1"] == pytest.approx(0.5)
    assert evaluated.scores["pass@2"] == pytest.approx(2 / 3)
    lower, upper = evaluated.intervals["pass@1"]
    assert lower < 0.5 < upper
    assert (evaluated.tasks, evaluated.samples, report.protocol.rows) == (3, 6, 3)
    counts = {"failed": 2, "invalid": 1, "passed": 3, "unparsed": 0, "samples": 6}
    assert evaluated.sample_stats["sampled"] == counts
    assert report.protocol.sandbox.startswith("isolation ")

    assert file_names(options.output_dir) == FILES
    assert read_report(options.output_dir) == report
    written = json.loads((options.output_dir / "report.json").read_text())
    assert written["pass@1"] == evaluated.scores["pass@1"]


def test_nothing_is_extracted_or_cut(options, programs_of_calls):
    """The harness uses the text after the prompt exactly as it is."""
    completions = [
        "    return 1 * x\n\ndef g(:",
        "    return 1 * x\n\nprint('def')",
        "    return 1 * x\n\n```",
        f"```python\n{RIGHT.format(1)}\n```",
    ]
    write(options.source, [{"task_id": "HumanEval/1", "completion": text} for text in completions])
    evaluate_and_report(options)
    assert programs_of_calls == [[HUMANEVAL[0]["prompt"] + text for text in completions]]
    assert passed(options) == [False, True, False, False]


def test_a_solution_is_a_whole_program_as_in_evalplus(options, programs_of_calls):
    program = HUMANEVAL[0]["prompt"] + RIGHT.format(1)
    write(options.source, [{"task_id": "HumanEval/1", "solution": program}])
    [report] = evaluate_and_report(replace(options, k=(1,)))
    assert programs_of_calls == [[program]]
    assert report.evaluated.scores["pass@1"] == 1.0


def test_programs_have_no_style(options):
    with pytest.raises(UserError, match="--style does not apply to programs"):
        evaluate_and_report(replace(options, style="code"))
    assert not options.output_dir.exists()


@pytest.mark.parametrize("task_id", [11, "11", "mbpp/11", "Mbpp/11"])
def test_an_mbpp_completion_is_the_whole_program(task_id, options, programs_of_calls):
    write(Path(options.data), MBPP)
    completions = ["def f11(x):\n    return x", "    return x"]
    write(options.source, [{"task_id": task_id, "completion": text} for text in completions])
    [report] = evaluate_and_report(replace(options, task="mbpp"))
    assert programs_of_calls == [completions]
    assert passed(options) == [True, False]
    assert report.protocol.rows == 2


def test_a_completion_of_evalplus_is_graded_by_all_of_its_inputs(options):
    problem = {
        "task_id": "Mbpp/2",
        "prompt": '"""\n?\nassert f(1) == 1\n"""\n',
        "entry_point": "f",
        "canonical_solution": "def f(x):\n    return x",
        "base_input": [[1]],
        "plus_input": [[2]],
        "atol": 0,
    }
    write(Path(options.data), [problem])
    completions = ["def f(x):\n    return x", "def f(x):\n    return 1"]
    write(options.source, [{"task_id": "Mbpp/2", "completion": text} for text in completions])
    evaluate_and_report(replace(options, task="mbpp-plus"))
    assert passed(options) == [True, False]


GSM8K_COMPLETIONS = {
    # The flexible rule, the robust rule, which decides, where the answer was read, and the result.
    "1 + 1\n#### 2": (True, True, "marker", "passed"),
    "<reasoning>r</reasoning><answer>2</answer>": (True, True, "marker", "passed"),
    "The answer is 2.": (True, True, "statement", "passed"),
    "It is 2": (True, False, None, "failed: no_answer"),
    "#### 3": (False, False, "marker", "failed: wrong_answer"),
}


@pytest.mark.parametrize(("style", "index_of_strict"), [("hashes", 0), ("xml", 1)])
def test_gsm8k_reports_its_rules_and_passes_by_the_robust_one(style, index_of_strict, options):
    write(Path(options.data), GSM8K)
    keys = {"task_id": "gsm8k/test/0", "read_from": "a key of another tool"}
    write(options.source, [{**keys, "completion": text} for text in GSM8K_COMPLETIONS])
    [report] = evaluate_and_report(replace(options, task="gsm8k", style=style))

    results = read_results(options)
    assert [index for index, result in enumerate(results) if result["strict"]] == [index_of_strict]
    for result, (flexible, robust, read_from, text) in zip(results, GSM8K_COMPLETIONS.values(), strict=True):
        assert result["flexible"] == flexible
        assert result["robust"] == result["passed"] == robust
        assert result.get("read_from") == read_from
        assert result["result"] == text

    counts = {"strict rule": 1, "flexible rule": 4, "robust rule": 3}
    counts |= {"passed, from a marker": 2, "passed, from a statement": 1}
    assert counts.items() <= report.evaluated.sample_stats["sampled"].items()
    assert report.protocol.sandbox is None
    assert "| passed, from a statement | 20.0 (1) |" in (options.output_dir / "report.md").read_text()


# Killed and resumed


@pytest.mark.parametrize("torn_line", [b"", b'{"task_id": "Human'])
def test_a_killed_evaluation_goes_on_after_its_last_whole_chunk(torn_line, options, monkeypatch):
    unbroken = replace(options, output_dir=options.output_dir.with_name("unbroken"))
    [report] = evaluate_and_report(unbroken)

    monkeypatch.setattr(samples_file, "_CHUNK", 2)
    grade_chunk = samples_file._grade_chunk
    chunk_sizes = []

    def kill_in_third_chunk(task, samples):
        chunk_sizes.append(len(samples))
        if len(chunk_sizes) == 3:
            raise KeyboardInterrupt
        return grade_chunk(task, samples)

    monkeypatch.setattr(samples_file, "_grade_chunk", kill_in_third_chunk)
    with pytest.raises(KeyboardInterrupt):
        evaluate_and_report(options)
    with (options.output_dir / "results.jsonl").open("ab") as file:
        file.write(torn_line)

    assert evaluate_and_report(options) == [report]
    assert chunk_sizes == [2, 2, 2, 2], "the killed chunk is graded again, and no other"
    assert read_results(options) == read_results(unbroken)
    assert file_names(options.output_dir) == FILES


@pytest.mark.parametrize("change", ["timeout_seconds", "samples_sha256", "data_sha256"])
def test_a_folder_with_another_evaluation_is_refused_naming_the_difference(change, options, tmp_path):
    [report] = evaluate_and_report(options)
    files_before = {path: path.read_bytes() for path in options.output_dir.iterdir()}
    if change == "timeout_seconds":
        changed = replace(options, sandbox=sandbox.Settings(timeout_seconds=2))
    elif change == "samples_sha256":
        fewer_samples = write(tmp_path / "fewer.jsonl", read(options.source)[2:])
        changed = replace(options, source=str(fewer_samples))
    else:
        more_problems = write(tmp_path / "more.jsonl", [*HUMANEVAL, {**HUMANEVAL[0], "task_id": "x"}])
        changed = replace(options, data=str(more_problems))
    with pytest.raises(UserError, match=f"contains another evaluation: {change} was .*; pass another --output-dir, or"):
        evaluate_and_report(changed)
    assert {path: path.read_bytes() for path in options.output_dir.iterdir()} == files_before
    assert evaluate_and_report(options) == [report]


def without_first_result(results):
    return results[1:]


def without_first_verdict(results):
    first = {"task_id": results[0]["task_id"], "completion": results[0]["completion"]}
    return [first, *results[1:]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_first_result, "does not fit the samples; delete it"),
        (without_first_verdict, r"results\.jsonl:1: .*; delete the line"),
    ],
)
def test_damaged_results_are_noticed(damage, message, options):
    evaluate_and_report(options)
    write(options.output_dir / "results.jsonl", damage(read_results(options)))
    (options.output_dir / "report.json").unlink()
    with pytest.raises(UserError, match=message):
        evaluate_and_report(options)


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
def test_a_wrong_file_of_samples_is_told_in_one_line_and_nothing_is_written(text, message, options):
    Path(options.source).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        evaluate_and_report(options)
    assert "\n" not in str(error.value)
    assert not options.output_dir.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": None}, "--task is missing"),
        ({"source": "missing.jsonl"}, r"missing\.jsonl cannot be read: No such file"),
    ],
)
def test_what_cannot_be_done_is_told_and_nothing_is_written(change, message, options):
    with pytest.raises(UserError, match=message):
        evaluate_and_report(replace(options, **change))
    assert not options.output_dir.exists()
