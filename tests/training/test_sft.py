"""Supervised fine-tuning on reference answers: what it trains on, and the run around it."""

import json
import shlex
from pathlib import Path
from statistics import fmean

import pytest
import torch
from helpers.fresh_imports import run_recipe
from helpers.tiny_runs import TINY, run_tiny, starter_data
from helpers.warm_process import finish, wait_for
from transformers import TrainerCallback

from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.data import fit_data, prompt_order
from lora_grpo.errors import UserError
from lora_grpo.models import base_model
from lora_grpo.prompts import chat
from lora_grpo.report import write_report
from lora_grpo.runs import read_metrics
from lora_grpo.sampling import Sampler
from lora_grpo.tasks import get_task, grade_all
from lora_grpo.training import sft_trainer, trl_compat
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


# What it trains on


def test_an_example_is_the_prompt_of_the_evaluation_and_a_completion_that_passes(tokenizer, config):
    rows = starter_data().train
    eos = tokenizer.eos_token_id
    sampler = Sampler(None, tokenizer, [eos])
    for row, example in zip(rows, sft_examples(rows, sampler), strict=True):
        (prompt,) = sampler.encode([chat.render_row(tokenizer, row)])
        assert example["input_ids"][: len(prompt)] == prompt
        assert example["labels"][: len(prompt)] == [IGNORED] * len(prompt)

        completion = example["input_ids"][len(prompt) :]
        assert example["labels"][len(prompt) :] == completion
        assert completion.index(eos) == len(completion) - 1
        text = tokenizer.decode(completion[:-1])
        assert text == get_task("starter").gold(row)
        assert grade_all("starter", [text], [row])[0].passed


def test_the_end_of_an_answer_is_that_of_the_chat_template(tokenizer):
    """As with Gemma, whose template ends a turn with another token than the tokenizer's end of a sequence."""
    special_tokens = [token for token in tokenizer.all_special_tokens if token != tokenizer.eos_token]
    turn_end = special_tokens[0]
    ends = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, turn_end])
    like_gemma = base_model.load_tokenizer(ModelConfig())
    like_gemma.chat_template = (
        "{% for message in messages %}"
        f"{turn_end}{{{{ message.role }}}}\n{{{{ message.content }}}}"
        f"{{% if message.role == 'assistant' %}}{turn_end}{{% endif %}}"
        "{% endfor %}"
    )
    assert chat.end_of_turn(like_gemma, ends) == turn_end
    assert chat.end_of_turn(tokenizer, ends) == tokenizer.eos_token


def test_rows_with_a_longer_solution_than_a_completion_are_dropped(tokenizer, config, capsys):
    data = starter_data()

    def prompt(row):
        return chat.render_row(tokenizer, row)

    def solution(row):
        return get_task("starter").gold(row)

    def num_tokens(text):
        return len(tokenizer(text)["input_ids"])

    completion_lengths = {row["id"]: num_tokens(solution(row)) + 1 for row in data.train}  # with the end of the turn
    limit = sorted(completion_lengths.values())[3]
    fitted = fit_data(data, tokenizer, replace(config, {"sampling": {"max_completion_tokens": limit}}))

    short_ids = [row_id for row_id, length in completion_lengths.items() if length <= limit]
    assert [row["id"] for row in fitted.train] == short_ids
    assert fitted.eval == data.eval
    dropped = f"dropped {8 - len(short_ids)} of 8 train rows"
    assert f"{dropped}: their reference answers have more than {limit} tokens" in capsys.readouterr().err

    # The lengths for the memory plan are those of the rows that are left.
    lengths = fitted.row_lengths
    assert lengths.rows == len(fitted.train) + len(fitted.eval)
    assert lengths.longest_prompt == max(num_tokens(prompt(row)) for row in (*fitted.train, *fitted.eval))
    assert lengths.longest_answered == max(num_tokens(prompt(row) + solution(row)) for row in fitted.train) + 1

    with pytest.raises(UserError, match=r"--sampling\.max-completion-tokens\).*raise the limit"):
        fit_data(data, tokenizer, replace(config, {"sampling": {"max_completion_tokens": 3}}))


# The run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("sft") / "run", **SFT)


def test_the_loss_is_the_mean_over_the_tokens_of_the_solutions(trained):
    run, policy = trained
    first, second, third = read_metrics(run.folder)
    for number, step in enumerate((first, second, third), start=1):
        assert step["step"] == number
        assert step["step_time"] > 0
        assert 0 <= step["mean_token_accuracy"] <= 1
    assert "num_tokens" not in first
    assert third["loss"] < first["loss"]

    # In the first step the adapter is zero.
    rows = starter_data().train
    examples = sft_examples(rows, Sampler(None, policy.tokenizer, policy.eos_token_ids))
    token_losses = []
    with torch.no_grad(), policy.model.disable_adapter():
        for index in prompt_order(len(rows), 2, run.config.seed):
            ids = torch.tensor(examples[index]["input_ids"])
            labels = torch.tensor(examples[index]["labels"])
            logprobs = policy.model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
            of_solution = labels[1:] != IGNORED
            token_losses += (-logprobs[of_solution, ids[1:][of_solution]]).tolist()
    assert first["loss"] == pytest.approx(fmean(token_losses), abs=2e-3)


def test_the_end_of_training_is_logged_without_the_seconds_of_a_step(tmp_path):
    """Trackers show it at the last step, whose seconds it would replace by 0."""
    logs_of_run = []

    class Recorder(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs_of_run.append(dict(logs))

    def record(training):
        training.trainer.add_callback(Recorder())

    run_tiny(tmp_path / "run", before=record, **{**SFT, "train": {**SFT["train"], "max_steps": 1}})
    step, end = logs_of_run
    assert step["step_time"] > 0
    assert "train_runtime" in end
    assert "step_time" not in end


def test_a_step_begins_with_its_longest_rows(tmp_path, monkeypatch):
    lengths = []

    class Recorded(sft_trainer.RecipeSFTTrainer):
        def __init__(self, run, **arguments):
            lengths.extend(len(row["input_ids"]) for row in arguments["train_dataset"])
            super().__init__(run, **arguments)

    monkeypatch.setattr(sft_trainer, "RecipeSFTTrainer", Recorded)
    train = {**SFT["train"], "prompts_per_step": 4, "max_steps": 2}
    run_tiny(tmp_path / "run", **{**SFT, "train": train})
    first, second = lengths[:4], lengths[4:]
    assert len(set(lengths)) > 2
    assert first == sorted(first, reverse=True)
    assert second == sorted(second, reverse=True)


def test_the_loss_is_not_computed_from_another_distribution_than_the_models(tmp_path, monkeypatch, capsys):
    """This model scales its logits, which the weights of its output head do not show."""
    model_class = type(base_model.load_base(ModelConfig()))
    forward = model_class.forward

    def doubling(model, *args, **kwargs):
        output = forward(model, *args, **kwargs)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(model_class, "forward", doubling)
    if trl_compat.has_fused_head():
        with pytest.raises(UserError, match=r"cannot train this model with SFT.* install trl==1\.14\.2"):
            run_tiny(tmp_path / "out", **SFT)
    else:
        run_tiny(tmp_path / "out", **SFT)
        assert "computing logits of the whole vocabulary" in capsys.readouterr().err


def test_the_report_is_of_sft(trained):
    run, _ = trained
    run.finish({})
    page = write_report(run.folder)
    text = page.read_text()
    assert "supervised fine-tuning on reference answers (TRL&#39;s SFTTrainer)" in text
    for title in ("Loss on reference answers", "Token accuracy", "Gradient norm"):
        assert title in text
    for title_of_grpo in ("Groups without variance", "GRPO loss", "Mean rewards"):
        assert title_of_grpo not in text
    assert '<tr><th scope="row">token accuracy</th>' in text


def test_a_flag_of_grpo_is_refused():
    commands = [
        ["--rewards", "correct_answer=2.0"],
        ["--grpo", "epsilon_high=0.28"],
        ["--sampling.num-generations", "4"],
        ["--preview"],
    ]
    result = run_recipe(RECIPE, *commands)
    assert result.stdout == "loaded [] code 2\n" * len(commands)
    for line, flags in zip(result.stderr.splitlines(), commands, strict=True):
        assert line.startswith(f"error: {flags[0]} is for GRPO, ")


# Whole runs

# Dropout uses random numbers, and 5 is not a multiple of the checkpoint interval.
SHORT = shlex.split(
    "--preset starter --model.engine peft --lora.rank 4 --lora.dropout 0.1 --train.max-steps 5 "
    "--train.prompts-per-step 4 --train.micro-batch-size 2 --train.checkpoint-steps 2 --data.train-limit 200 "
    "--data.eval-limit 8 --monitor.rows 16 --monitor.every-steps 2 --eval.num-samples 1 --eval.k 1"
)


@pytest.mark.slow
def test_a_killed_run_that_is_resumed_has_the_same_bits(warm, tmp_path):
    def start(name, *more):
        return warm.start(RECIPE, "--output-dir", tmp_path / name, *SHORT, *more)

    finish(start("unbroken"))
    process = start("killed")
    wait_for(process, lambda: len(read_metrics(tmp_path / "killed")) >= 3)
    process.kill()
    finish(warm.start(RECIPE, "--output-dir", tmp_path / "killed", "--resume"))
    for file in (
        "adapter/adapter_model.safetensors",
        "best/adapter_model.safetensors",
        "evaluation/trained.samples.jsonl",
        "evaluation/report.json",
        "validation/step-00004.jsonl",
    ):
        assert (tmp_path / "unbroken" / file).read_bytes() == (tmp_path / "killed" / file).read_bytes(), file
    steps = zip(read_metrics(tmp_path / "unbroken"), read_metrics(tmp_path / "killed"), strict=True)
    for step, step_of_killed in steps:
        for name in ("step", "loss", "grad_norm", "mean_token_accuracy", "entropy", "validation/accuracy"):
            assert step.get(name) == step_of_killed.get(name), (step["step"], name)


@pytest.mark.slow
def test_grpo_goes_on_exactly_where_sft_ended(warm, tmp_path):
    def start(recipe, name, *more):
        return finish(warm.start(ROOT / "recipes" / recipe, "--output-dir", name, *SHORT, *more, cwd=tmp_path))

    assert "--lora.from first" in start("sft_lora.py", "first").stdout
    start("gsm8k_lora.py", "second", "--lora.from", "first", "--sampling.num-generations", "4")
    sft_evaluation = tmp_path / "first" / "evaluation"
    grpo_evaluation = tmp_path / "second" / "evaluation"
    trained_by_sft = (sft_evaluation / "trained.samples.jsonl").read_bytes()
    assert (grpo_evaluation / "base.samples.jsonl").read_bytes() == trained_by_sft
    sft_report = json.loads((sft_evaluation / "report.json").read_text())
    grpo_report = json.loads((grpo_evaluation / "report.json").read_text())
    assert grpo_report["baseline"]["scores"] == sft_report["evaluated"]["scores"]
    assert "first" in (tmp_path / "second" / "report" / "report.html").read_text()
