"""End-to-end test with the real commands: train, merge, compare merged model and adapter, export GGUF, push."""

import json
import shutil
from pathlib import Path

import pytest

from lora_grpo.config.schema import ModelConfig, RunConfig
from lora_grpo.data import load_data
from lora_grpo.models.base_model import load_tokenizer
from lora_grpo.prompts.chat import render_row

ROOT = Path(__file__).resolve().parents[2]
ROWS = 200
NEAR_TIE = 0.01
"""Logprob difference of two tokens in nats, below which rounding to 16 bits may swap them."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def command(warm, folder):
    def run(script, *arguments):
        ended = warm.start(ROOT / script, *arguments, cwd=folder).end()
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    return run


@pytest.fixture(scope="module")
def run(command, folder):
    flags = ("--train.max-steps", 6, "--data.eval-limit", 20, "--eval.num-samples", 0)
    command("recipes/gsm8k_lora.py", "--output-dir", folder / "run", *flags)
    return folder / "run"


def answers(path):
    return {row["task_id"]: row["completion"] for row in map(json.loads, path.read_text().splitlines())}


def questions():
    """Return the rendered prompt of every row of the evaluation set, by id."""
    rows = load_data(RunConfig()).eval
    tokenizer = load_tokenizer(ModelConfig())
    return {row["id"]: render_row(tokenizer, row) for row in rows}


def first_difference(run, prompt, first, second):
    """Return the merged model's logprob difference in nats at the first token where two completions differ."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    model = AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32).eval()
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    pair = [tokenizer(text + tokenizer.eos_token, add_special_tokens=False)["input_ids"] for text in (first, second)]
    index = next(n for n, (one, other) in enumerate(zip(*pair, strict=False)) if one != other)
    with torch.no_grad():
        scores = model(torch.tensor([start + pair[0][:index]])).logits[0, -1].log_softmax(-1)
    return abs(float(scores[pair[0][index]] - scores[pair[1][index]]))


def test_an_adapter_and_its_merge_give_the_same_greedy_answers(run, command, folder):
    said = command("scripts/merge.py", run, "--onto", "dequantized")
    assert "KL(adapter || merged)" in said
    report = json.loads((run / "merged" / "merge_report.json").read_text())
    assert report["retained"]["overall"] > 0.99 and report["base"]["checked"]
    assert report["kl"]["adapter_merged"] < report["kl"]["adapter_base"] / 100

    flags = ("--task", "starter", "--limit", ROWS, "--output-dir", folder / "compared")
    command("scripts/evaluate.py", run, "--compare", run / "merged", *flags)
    adapter = answers(folder / "compared" / "results.jsonl")
    merged = answers(next((folder / "compared").glob("compared-*.results.jsonl")))
    assert len(adapter) == ROWS and adapter.keys() == merged.keys()
    # If two tokens are about equally likely, rounding to 16 bits decides which is greedy.
    differing = [task_id for task_id in adapter if adapter[task_id] != merged[task_id]]
    assert len(differing) <= ROWS // 100
    gaps = [first_difference(run, questions()[task_id], adapter[task_id], merged[task_id]) for task_id in differing]
    assert all(gap < NEAR_TIE for gap in gaps), dict(zip(differing, gaps, strict=True))


def test_the_gguf_of_a_run_answers_as_its_merge_does(run, command):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = command("scripts/export_gguf.py", run, "--type", "f16", "--modelfile")
    (file,) = (run / "gguf").glob("*.gguf")
    assert file.name == "run.F16.gguf" and str(file) in said
    modelfile = (run / "gguf" / "run.F16.Modelfile").read_text()
    assert "TEMPLATE" in modelfile and "<reasoning>" in modelfile and 'PARAMETER stop "<|im_end|>"' in modelfile
    tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    merged = AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32).eval()
    loaded = AutoModelForCausalLM.from_pretrained(run / "gguf", gguf_file=file.name, dtype=torch.float32).eval()
    for question in ("Mia has 3 apples and buys 4 more. How many?", "There are 2 boxes of 9 pens. How many pens?"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        first, second = (model.generate(**ids, max_new_tokens=40, do_sample=False) for model in (merged, loaded))
        assert first.tolist() == second.tolist()


@pytest.mark.parametrize("kind", ["adapter", "merged", "gguf"])
def test_everything_of_a_run_is_ready_to_push_and_the_code_on_the_card_answers(kind, run, command, fresh):
    said = command("scripts/push.py", run, "someone/starter-gsm8k", "--what", kind, "--dry-run")
    assert "nothing was sent" in said and "license" in said and str(run) not in said.split("---", 1)[1]
    expected = {"adapter": "adapter_model.safetensors", "merged": "model.safetensors", "gguf": ".gguf"}
    assert expected[kind] in said
    assert "manifest.json" not in said.split("---", 1)[1]
    if kind != "gguf":
        code = said.split("```python\n")[1].split("```")[0]
        ended = fresh.start("-c", code.replace("someone/starter-gsm8k", str(run / kind)), cwd=ROOT).end()
        assert ended.returncode == 0 and ended.stdout.strip(), ended.stderr


def test_a_merge_of_an_older_adapter_is_stale(run, command, warm, folder):
    """GGUF export and push both reject it."""
    stale = shutil.copytree(run, folder / "stale")
    config = stale / "adapter" / "adapter_config.json"
    config.write_text(config.read_text() + "\n")
    for script, flags in (("export_gguf.py", ()), ("push.py", ("a/b", "--what", "merged", "--dry-run"))):
        ended = warm.start(ROOT / "scripts" / script, stale, *flags, cwd=folder).end()
        assert ended.returncode == 2 and "merged from an older" in ended.stderr, ended.stderr
