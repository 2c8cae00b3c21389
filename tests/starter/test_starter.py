import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import build_starter_data
import pytest
from starter_model import code_problems, code_styles, corpus, problems

from lora_grpo import starter
from lora_grpo.prompts.chat import add_prompts, render
from lora_grpo.prompts.styles import SYSTEM_PROMPTS
from lora_grpo.starter import model_path

ROOT = Path(__file__).parents[2]


def test_splits_share_no_family_and_numbers_for_any_seed():
    def key(problem):
        return problem.family, tuple((step.left, step.operation, step.right) for step in problem.steps)

    train = {key(problem) for seed in range(3) for problem in problems.pool("train", 1500, seed)}
    evaluated = {key(problem) for seed in range(3) for problem in problems.pool("eval", 800, seed)}
    assert len(evaluated) > 500
    assert not train & evaluated


def test_pretraining_documents_are_about_train_problems_only():
    eval_questions = {problem.question for problem in problems.pool("eval", 1000)}
    documents = list(itertools.islice(corpus.examples(0, drills=0.1, practice=0.2, code=0.2), 4000))
    assert any(len(document.parts) > 2 for document in documents)
    for document in documents:
        question = document.parts[0][0].rpartition("user\n")[2].partition("<|im_end|>")[0]
        assert question not in eval_questions


def test_worked_solutions_are_correct():
    for problem in problems.pool("train", 1000) + problems.pool("eval", 500):
        *lines, last = problem.answer.split("\n")
        for line in lines:
            expression, result = line.split(" ", 1)[1].split("=")
            assert eval(expression) == int(result)
        assert last == f"#### {lines[-1].split('=')[1]}"
        assert len(lines) == problem.difficulty


def test_a_solution_starts_from_the_questions_numbers():
    for problem in problems.pool("train", 1000):
        known = {int(run) for run in "".join(c if c.isdigit() else " " for c in problem.question).split()}
        known |= {2, 3, 4, 5, 10} if problem.family == "part" else set()
        for step in problem.steps:
            assert {step.left, step.right} <= known
            known.add(step.result)


@pytest.mark.parametrize("task", ["starter", "starter-code"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_bundled_problems_are_those_that_the_tool_generates(task, split):
    assert starter.problems(task, split) == build_starter_data.rows(task, split)


def test_model_fits():
    sizes = {path.name: path.stat().st_size for path in model_path().iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(sizes)
    assert sum(sizes.values()) <= 6_000_000
    generation = json.loads((model_path() / "generation_config.json").read_text())
    assert isinstance(generation["eos_token_id"], int)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path())


def test_digits_are_single_tokens(tokenizer):
    for text in ("f(x) + 1234567890", "$1234567890", "[1:-23]"):
        pieces = [tokenizer.decode([token]) for token in tokenizer(text).input_ids]
        assert all(piece.isdigit() <= (len(piece) == 1) for piece in pieces)
        assert not any(piece != piece.strip("0123456789") and len(piece) > 1 for piece in pieces)


@pytest.mark.parametrize(
    "text", ["", "Ünïcode 日本語 🎉 \x00\x7f\r\n\t  x", "1,234.5 <<3*4=12>>12 ½ ￥", "\\boxed{18}"]
)
def test_tokenizer_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("style", ["xml", "code"])
def test_chat_template_renders_what_the_model_was_trained_on(tokenizer, style):
    row = {"question": "Ann has $9. How much?"}
    (row,) = add_prompts([row], style)
    text = render(tokenizer, row["prompt"])
    assert text == corpus.chat_prompt(row["question"], style)
    assert SYSTEM_PROMPTS[style] in text
    assert len(tokenizer(text).input_ids) < 60


def test_prompts_and_completions_are_short(tokenizer):
    for problem in problems.pool("train", 240):
        assert len(tokenizer(corpus.chat_prompt(problem.question)).input_ids) <= 80
        assert len(tokenizer(corpus.careful(problem) + "<|im_end|>").input_ids) <= 56
    for problem in code_problems.pool("train", 480):
        assert len(tokenizer(corpus.chat_prompt(problem.question, "code")).input_ids) <= 64
        assert len(tokenizer(code_styles.careful(problem) + "<|im_end|>").input_ids) <= 48


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)


def test_model_writes_the_requested_function(tokenizer, model):
    assert model.num_parameters() <= 3_000_000
    shift = [problem for problem in code_problems.pool("eval", 160) if problem.family == "shift"]
    right = 0
    for problem in shift:
        prompt = corpus.chat_prompt(problem.question, "code") + "```python\n"
        inputs = tokenizer([prompt], return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=48)
        right += tokenizer.decode(output[0, inputs.input_ids.shape[1] :]).startswith(problem.solution + "\n```")
    assert right >= 0.8 * len(shift)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_build_starter_writes_a_folder_that_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    small = ["--steps", "20", "--settling-steps", "4", "--eval-problems", "8"]
    command = [sys.executable, ROOT / "tools/build_starter.py", "--output", folder, *small]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=True)
    assert "NF4 on 8 eval problems of starter:" in result.stdout
    assert "NF4 on 8 eval problems of starter-code:" in result.stdout
    assert not (folder / "old").exists()
    assert "--steps 20" in (folder / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() <= 3_000_000
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
