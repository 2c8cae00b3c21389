"""`lora-grpo chat`: questions as arguments and lines, answers as the sampler gives them, before and after training."""

import importlib.util
import io

import pytest
import torch
from helpers.tiny_runs import run_tiny

from lora_grpo.cli import verbs
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.merging import MergeOptions, merge
from lora_grpo.models import ModelFlags, resolve
from lora_grpo.prompts import chat, styles
from lora_grpo.sampling import SamplingParams, build

QUESTION = "Omar buys 3 apples at $10 each. How much does Omar pay?"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose adapter changes the answers."""
    folder = tmp_path_factory.mktemp("chat") / "run"

    def disturb(training):
        generator = torch.Generator().manual_seed(1)
        for name, parameter in training.policy.model.named_parameters():
            if "lora_B" in name:
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)

    run_tiny(folder, before=disturb, sampling={"max_completion_tokens": 24})
    return folder


def expected(run, params, adapter):
    """The completion that an evaluation samples."""
    model = resolve(str(run), ModelFlags())
    tokenizer = build.load_tokenizer(model)
    sampler = build.load_sampler(model, "transformers", tokenizer, 0, 0)
    prompt = chat.render(
        tokenizer,
        [{"role": "system", "content": styles.SYSTEM_PROMPTS["xml"]}, {"role": "user", "content": QUESTION}],
    )
    assert prompt == chat.render_row(tokenizer, chat.add_prompts([{"question": QUESTION}], "xml")[0])
    [[sample]] = sampler.sample([prompt], params, [0], adapter=adapter)
    return sample.text


def test_both_models_answer_as_in_an_evaluation(run, capsys):
    assert verbs.run_front_door(["chat", str(run), QUESTION]) == 0
    greedy = SamplingParams(1, 0.0, 1.0, 24)
    base, trained = expected(run, greedy, False), expected(run, greedy, True)
    assert base != trained
    assert capsys.readouterr().out == f"base: {base}\ntrained: {trained}\n"


def test_every_line_is_a_question(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n\n{QUESTION}\n"))
    assert verbs.run_front_door(["chat", "starter", "--max-completion-tokens", "8"]) == 0
    [blank, first, second] = capsys.readouterr().out.split("starter: ")
    assert not blank and first == second and first.strip()


def test_samples_follow_their_seed(capsys):
    def answer(seed):
        flags = ["--temperature", "1", "--seed", seed, "--max-completion-tokens", "24", "--system", ""]
        assert verbs.run_front_door(["chat", "starter", *flags, QUESTION]) == 0
        return capsys.readouterr().out

    assert answer("1") == answer("1") != answer("2")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["missing"],
        ["starter", "--temperature", "-1", QUESTION],
        ["missing.gguf"],
        ["a.gguf", "--base", "b", QUESTION],
        ["starter", "one", "two"],
    ],
)
def test_mistakes_end_with_one_line(arguments, capsys):
    assert verbs.run_front_door(["chat", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.engines
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: make engines")
def test_a_gguf_file_begins_as_its_merged_model(run, capsys):
    merge(MergeOptions(str(run)))
    export(ExportOptions(run, type=("f16",)))
    capsys.readouterr()
    assert verbs.run_front_door(["chat", str(run / "gguf" / "run.F16.gguf"), QUESTION]) == 0
    of_file = capsys.readouterr().out.removeprefix("f16: ")
    assert verbs.run_front_door(["chat", str(run / "merged"), "--system", styles.SYSTEM_PROMPTS["xml"], QUESTION]) == 0
    of_model = capsys.readouterr().out.removeprefix("merged: ")
    # The noise leaves near ties, which rounding to 16 bits decides later in the answer.
    assert of_file[:20] == of_model[:20] and len(of_file) > 20
