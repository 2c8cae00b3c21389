"""`evaluate.py MODEL.gguf`: the file's answers are those of the 16-bit model, and what its type costs is reported."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from helpers.fresh_imports import ROOT
from helpers.tiny_runs import run_tiny

from lora_grpo import starter
from lora_grpo.config import replace
from lora_grpo.config.schema import ModelConfig, RunConfig
from lora_grpo.data import load_data
from lora_grpo.evaluation import EvaluateOptions, evaluate_and_report
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.hub.push import prepare
from lora_grpo.merging import MergeOptions, merge
from lora_grpo.models.base_model import load_tokenizer
from lora_grpo.prompts.chat import render_row
from lora_grpo.report import write_report

ROWS = 200
NEAR_TIE = 0.05
"""Logprob difference of two tokens in nats, below which llama.cpp's 16-bit arithmetic may swap them."""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: make engines"
    ),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that is merged and exported in two types."""
    folder = tmp_path_factory.mktemp("gguf") / "run"
    run_tiny(folder, sampling={"max_completion_tokens": 96})
    merge(MergeOptions(str(folder)))
    export(ExportOptions(folder, type=("f16", "q4_0")))
    return folder


def evaluate(run, kind, **options):
    merged = EvaluateOptions(
        str(run / "gguf" / f"run.{kind.upper()}.gguf"), compare=str(run / "merged"), limit=ROWS, **options
    )
    return evaluate_and_report(merged)[0]


@pytest.fixture(scope="module")
def f16(run):
    return evaluate(run, "f16", output_dir=run / "evaluation" / "f16")


def read(path):
    return {line["task_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_f16_gives_the_answers_of_the_merged_model(run, f16):
    folder = run / "evaluation" / "f16"
    [compared] = folder.glob("compared-*.results.jsonl")
    gguf = read(folder / "results.jsonl")
    merged = read(compared)
    assert len(gguf) == ROWS and gguf.keys() == merged.keys()
    assert sum(gguf[task]["passed"] != merged[task]["passed"] for task in gguf) <= 2
    recorded = json.loads((folder / "evaluation.json").read_text())
    assert len({entry["environment"]["prompts_sha256"] for entry in recorded.values()}) == 1
    assert recorded["results.jsonl"]["environment"]["engine"].startswith("llama.cpp ")
    changed = [task for task in gguf if gguf[task]["completion"] != merged[task]["completion"]]
    assert sum(gguf[task]["num_tokens"] != merged[task]["num_tokens"] for task in gguf) <= len(changed)
    assert sum(gguf[task]["truncated"] != merged[task]["truncated"] for task in gguf) <= len(changed)
    gaps = gap_at_first_difference(run, gguf, merged, changed)
    assert [(task, gap) for task, gap in zip(changed, gaps, strict=True) if gap > NEAR_TIE] == []


def gap_at_first_difference(run, gguf, merged, tasks):
    """Return the merged model's logprob differences, in nats, at the first tokens that differ."""
    from transformers import AutoModelForCausalLM

    config = replace(RunConfig(), json.loads((run / "run.json").read_text())["config"])
    rows = {row["id"]: row for row in load_data(replace(config, {"data": {"eval_limit": ROWS}})).eval}
    tokenizer = load_tokenizer(ModelConfig(name=str(run / "merged")))
    model = AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32).eval()
    for task in tasks:
        prompt = tokenizer(render_row(tokenizer, rows[task]), add_special_tokens=False)["input_ids"]
        first, second = (
            [*tokenizer(lines[task]["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for lines in (gguf, merged)
        )
        position = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + first[:position]])).logits[0, -1].log_softmax(-1)
        yield abs(float(logprobs[first[position]] - logprobs[second[position]]))


def test_what_q4_0_costs_is_in_the_report_and_on_the_card(run, f16, capsys):
    report = evaluate(run, "q4_0")
    row = report.table[0]
    assert report.evaluated.label == "q4_0" and report.baseline.label == "merged"
    low, high = (-100 * bound for bound in reversed(row.difference_interval))
    cost = f"{-100 * row.difference:z.1f} points of pass@1 [{low:z.1f}, {high:z.1f}]"
    assert f"q4_0 costs {cost} against merged" in capsys.readouterr().out
    [folder] = (run / "evaluation").glob("starter-*")
    assert cost in (folder / "report.md").read_text()
    assert report.evaluated.source["quantization"] == "q4_0"
    files, *_ = prepare(run / "gguf", "gguf", "me/trained")
    card = next(file for file in files if file.name == "README.md").content.decode()
    assert f"q4_0 costs {cost}" in card
    size = (run / "gguf" / "run.Q4_0.gguf").stat().st_size / 1e6
    assert f"| run.Q4_0.gguf | {size:.1f} MB | {100 * row.after:.1f} " in card
    assert f"| run.F16.gguf | {(run / 'gguf' / 'run.F16.gguf').stat().st_size / 1e6:.1f} MB | " in card
    assert f"{100 * f16.table[0].after:.1f} " in card
    write_report(run)
    page = (run / "report" / "report.html").read_text()
    assert f">run.Q4_0.gguf</th><td>{size:.1f} MB</td><td>{100 * row.after:.1f} " in page
    assert f"q4_0 costs {cost}" in page


def test_llama_cpp_reads_texts_in_ten_scripts_as_transformers_does():
    command = [sys.executable, "tools/tokenizer_parity.py", str(starter.model_path()), "--texts", "400"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *_, number, tokens, different, not_normalized = done.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert (number, different) == ("400", "0") and int(tokens.replace(",", "")) > 10_000
    assert int(not_normalized) > 0  # the two sides are compared: marks are sorted on one of them only
