"""End-to-end test with the real commands: train, merge, compare merged model and adapter, export GGUF, push."""

import json
import re
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

    def token_ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    first_ids = token_ids(first + tokenizer.eos_token)
    second_ids = token_ids(second + tokenizer.eos_token)
    index = 0
    while first_ids[index] == second_ids[index]:
        index += 1
    with torch.no_grad():
        ids = torch.tensor([token_ids(prompt) + first_ids[:index]])
        logprobs = model(ids).logits[0, -1].log_softmax(-1)
    return abs(float(logprobs[first_ids[index]] - logprobs[second_ids[index]]))


def test_an_adapter_and_its_merge_give_the_same_greedy_answers(run, command, folder):
    printed = command("scripts/merge.py", run, "--onto", "dequantized")
    assert "KL(adapter || merged)" in printed
    report = json.loads((run / "merged" / "merge_report.json").read_text())
    assert report["retained"]["overall"] > 0.99
    assert report["base"]["checked"]
    assert report["kl"]["adapter_merged"] < report["kl"]["adapter_base"] / 100

    flags = ("--task", "starter", "--limit", ROWS, "--output-dir", folder / "compared")
    command("scripts/evaluate.py", run, "--compare", run / "merged", *flags)
    adapter = answers(folder / "compared" / "results.jsonl")
    merged = answers(next((folder / "compared").glob("compared-*.results.jsonl")))
    assert len(adapter) == ROWS
    assert adapter.keys() == merged.keys()
    # If two tokens are about equally likely, rounding to 16 bits decides which is greedy.
    differing = [problem_id for problem_id in adapter if adapter[problem_id] != merged[problem_id]]
    assert len(differing) <= ROWS // 100
    for problem_id in differing:
        prompt = questions()[problem_id]
        assert first_difference(run, prompt, adapter[problem_id], merged[problem_id]) < NEAR_TIE, problem_id


def test_the_gguf_of_a_run_answers_as_its_merge_does(run, command):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    printed = command("scripts/export_gguf.py", run, "--type", "f16", "--modelfile")
    (file,) = (run / "gguf").glob("*.gguf")
    assert file.name == "run.F16.gguf"
    assert str(file) in printed
    modelfile = (run / "gguf" / "run.F16.Modelfile").read_text()
    for part in ("TEMPLATE", "<reasoning>", 'PARAMETER stop "<|im_end|>"'):
        assert part in modelfile
    tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    merged = AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32).eval()
    loaded = AutoModelForCausalLM.from_pretrained(run / "gguf", gguf_file=file.name, dtype=torch.float32).eval()
    for question in ("Mia has 3 apples and buys 4 more. How many?", "There are 2 boxes of 9 pens. How many pens?"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = loaded.generate(**ids, max_new_tokens=40, do_sample=False)
        expected = merged.generate(**ids, max_new_tokens=40, do_sample=False)
        assert answer.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("kind", "file"), [("adapter", "adapter_model.safetensors"), ("merged", "model.safetensors"), ("gguf", ".gguf")]
)
def test_everything_of_a_run_is_ready_to_push_and_the_code_on_the_card_answers(kind, file, run, command, fresh):
    printed = command("scripts/push.py", run, "someone/starter-gsm8k", "--what", kind, "--dry-run")
    assert "nothing was sent" in printed
    assert "license" in printed
    assert file in printed
    _, card = printed.split("---", maxsplit=1)
    assert str(run) not in card
    assert "manifest.json" not in card

    if kind != "gguf":
        (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[:1]
        code = code.replace("someone/starter-gsm8k", str(run / kind))
        ended = fresh.start("-c", code, cwd=ROOT).end()
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip()


def test_a_merge_of_an_older_adapter_is_stale(run, command, warm, folder):
    """GGUF export and push both reject it."""
    stale = shutil.copytree(run, folder / "stale")
    config = stale / "adapter" / "adapter_config.json"
    config.write_text(config.read_text() + "\n")
    for script, flags in (("export_gguf.py", ()), ("push.py", ("a/b", "--what", "merged", "--dry-run"))):
        ended = warm.start(ROOT / "scripts" / script, stale, *flags, cwd=folder).end()
        assert ended.returncode == 2, ended.stderr
        assert f"not merged from {stale / 'adapter'}" in ended.stderr
