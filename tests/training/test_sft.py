"""Supervised fine-tuning on reference answers: what it trains on, and the run around it."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from helpers.fresh_imports import run_recipe
from helpers.tiny_runs import TINY, run_tiny, starter_data
from helpers.warm_process import finish, wait_for
from torch.nn.functional import cross_entropy

from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.data import fit_data, prompt_order
from lora_grpo.models import base_model
from lora_grpo.prompts import chat
from lora_grpo.report import write_report
from lora_grpo.runs import read_metrics
from lora_grpo.sampling import Sampler
from lora_grpo.tasks import get_task, grade_all
from lora_grpo.training.sft import IGNORED, sft_examples

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "sft_lora.py"
SFT = {
    "method": "sft",
    "sampling": {**TINY["sampling"], "max_completion_tokens": 64},
    "train": {**TINY["train"], "micro_batch_size": 2},
}


@pytest.fixture(scope="module")
def tokenizer():
    return base_model.load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def config():
    return replace(replace(RunConfig(output_dir="unused"), TINY), SFT)


class Opened:
    def __init__(self, config):
        self.config = config


# What it trains on


def test_an_example_is_the_prompt_of_the_evaluation_and_a_completion_that_passes(tokenizer, config):
    rows = starter_data().train
    eos = tokenizer.eos_token_id
    sampler = Sampler(None, tokenizer, [eos])
    for row, example in zip(rows, sft_examples(rows, sampler), strict=True):
        (prompt,) = sampler.encode([chat.render_row(tokenizer, row)])
        ids = example["input_ids"]
        labels = example["labels"]
        assert ids[: len(prompt)] == prompt and labels[: len(prompt)] == [IGNORED] * len(prompt)
        assert ids[len(prompt) :] == labels[len(prompt) :]
        assert ids[-1] == eos and ids.count(eos) == prompt.count(eos) + 1
        text = tokenizer.decode(ids[len(prompt) : -1])
        assert text == get_task("starter").gold(row)
        assert grade_all("starter", [text], [row])[0].passed


def test_the_end_of_an_answer_is_that_of_the_chat_template(tokenizer):
    """As with Gemma, whose template ends a turn with another token than the tokenizer's end of a sequence."""
    other = base_model.load_tokenizer(ModelConfig())
    ids = other.convert_tokens_to_ids
    names = [name for name in other.all_special_tokens if ids(name) != other.eos_token_id]
    turn = names[0]
    other.chat_template = (
        "{% for m in messages %}" + turn.replace("'", "") + "{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'assistant' %}" + turn + "{% endif %}{% endfor %}"
    )
    assert chat.end_of_turn(other, [other.eos_token_id, ids(turn)]) == turn
    assert chat.end_of_turn(tokenizer, [tokenizer.eos_token_id, ids(turn)]) == tokenizer.eos_token


def test_rows_with_a_longer_solution_than_a_completion_are_dropped(tokenizer, config, capsys):
    data = starter_data()
    rows = data.train
    lengths = [len(tokenizer(get_task("starter").gold(row))["input_ids"]) + 1 for row in rows]
    limit = sorted(lengths)[3]
    shorter = replace(config, {"sampling": {"max_completion_tokens": limit}})
    fitted = fit_data(data, tokenizer, shorter)
    kept_rows = fitted.train
    expected_ids = [row["id"] for row, length in zip(rows, lengths, strict=True) if length <= limit]
    assert [row["id"] for row in kept_rows] == expected_ids
    printed = capsys.readouterr().err
    reason = f"their reference answers have more than {limit} tokens"
    assert f"dropped {8 - len(kept_rows)} of 8 train rows: {reason}" in printed
    assert fitted.eval == data.eval and fitted.row_lengths.rows == len(kept_rows) + len(fitted.eval)
    answered = [chat.render_row(tokenizer, row) + get_task("starter").gold(row) for row in kept_rows]
    assert fitted.row_lengths.longest_answered == max(len(tokenizer(text)["input_ids"]) for text in answered) + 1
    prompts = [len(tokenizer(chat.render_row(tokenizer, row))["input_ids"]) for row in (*kept_rows, *fitted.eval)]
    assert fitted.row_lengths.longest_prompt == max(prompts)
    with pytest.raises(Exception, match=r"--sampling\.max-completion-tokens\).*raise the limit"):
        fit_data(data, tokenizer, replace(config, {"sampling": {"max_completion_tokens": 3}}))


# The run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("sft") / "run", **SFT)


def test_the_loss_is_the_mean_over_the_tokens_of_the_solutions(trained):
    run, policy = trained
    lines = read_metrics(run.folder)
    assert [line["step"] for line in lines] == [1, 2, 3] and "num_tokens" not in lines[0]
    assert all(0 <= line["mean_token_accuracy"] <= 1 and line["step_time"] > 0 for line in lines)
    rows = starter_data().train
    examples = sft_examples(rows, Sampler(None, policy.tokenizer, policy.eos_token_ids))
    losses = []
    with torch.no_grad(), policy.model.disable_adapter():
        for index in prompt_order(len(rows), 2, run.config.seed):  # the adapter is zero in the first step
            ids, labels = (torch.tensor([examples[index][name]]) for name in ("input_ids", "labels"))
            logits = policy.model(input_ids=ids).logits[0, :-1].float()
            next_tokens = labels[0, 1:]
            token_losses = cross_entropy(logits, next_tokens, reduction="none", ignore_index=IGNORED)
            losses += token_losses[next_tokens != IGNORED].tolist()
    assert lines[0]["loss"] == pytest.approx(sum(losses) / len(losses), abs=2e-3)
    assert lines[2]["loss"] < lines[0]["loss"]


def test_the_report_is_of_sft(trained):
    run, _ = trained
    run.finish({})
    page = write_report(run.folder)
    text = page.read_text()
    assert "supervised fine-tuning on reference answers (TRL&#39;s SFTTrainer)" in text
    for title in ("Loss on reference answers", "Token accuracy", "Gradient norm"):
        assert title in text
    assert "Groups without variance" not in text and "GRPO loss" not in text and "Mean rewards" not in text
    assert '<tr><th scope="row">token accuracy</th>' in text


def test_a_flag_of_grpo_is_refused():
    flags = ("--rewards correct_answer=2.0", "--grpo epsilon_high=0.28", "--sampling.num-generations 4", "--preview")
    calls = [text.split() for text in flags]
    result = run_recipe(RECIPE, *calls)
    assert result.stdout == "loaded [] code 2\n" * len(calls)
    for line, arguments in zip(result.stderr.splitlines(), calls, strict=True):
        assert line.startswith(f"error: {arguments[0]} is for GRPO, ")


# Whole runs

# Dropout uses random numbers, and 5 is not a multiple of the checkpoint interval.
SHORT = shlex.split(
    "--preset starter --model.engine peft --lora.rank 4 --lora.dropout 0.1 --train.max-steps 5 "
    "--train.prompts-per-step 4 --train.micro-batch-size 2 --train.checkpoint-steps 2 --data.train-limit 200 "
    "--data.eval-limit 8 --monitor.rows 16 --monitor.every-steps 2 --eval.num-samples 1 --eval.k 1"
)
SAMPLES = ("trained.samples.jsonl", "base.samples.jsonl")


def comparable_metrics(folder):
    """Return the metrics of a run that do not depend on time."""
    names = ("step", "loss", "grad_norm", "mean_token_accuracy", "entropy", "validation/accuracy")
    return [{name: line.get(name) for name in names} for line in read_metrics(folder)]


@pytest.mark.slow
def test_a_killed_run_that_is_resumed_has_the_same_bits(warm, tmp_path):
    def start(name, *more):
        return warm.start(RECIPE, "--output-dir", tmp_path / name, *SHORT, *more)

    finish(start("unbroken"))
    process = start("killed")
    wait_for(process, lambda: len(read_metrics(tmp_path / "killed")) >= 3)
    process.kill()
    finish(warm.start(RECIPE, "--output-dir", tmp_path / "killed", "--resume"))
    unbroken = tmp_path / "unbroken"
    killed = tmp_path / "killed"
    names = ("adapter/adapter_model.safetensors", "evaluation/trained.samples.jsonl", "evaluation/report.json")
    names += ("best/adapter_model.safetensors", "validation/step-00004.jsonl")
    for name in names:
        assert (unbroken / name).read_bytes() == (killed / name).read_bytes(), name
    assert comparable_metrics(unbroken) == comparable_metrics(killed)


@pytest.mark.slow
def test_grpo_goes_on_exactly_where_sft_ended(warm, tmp_path):
    def start(recipe, name, *more):
        return finish(warm.start(ROOT / "recipes" / recipe, "--output-dir", name, *SHORT, *more, cwd=tmp_path))

    printed = start("sft_lora.py", "first").stdout
    assert "--lora.from first" in printed
    start("gsm8k_lora.py", "second", "--lora.from", "first", "--sampling.num-generations", "4")
    first = tmp_path / "first"
    second = tmp_path / "second"
    samples = [(run / "evaluation" / name).read_bytes() for run, name in zip((first, second), SAMPLES, strict=True)]
    assert samples[0] == samples[1]
    before, after = (json.loads((run / "evaluation" / "report.json").read_text()) for run in (first, second))
    assert after["baseline"]["scores"] == before["evaluated"]["scores"]
    assert "first" in (second / "report" / "report.html").read_text()
