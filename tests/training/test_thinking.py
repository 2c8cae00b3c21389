"""A model whose chat template has a switch for thinking gets the same prompts, on or off, wherever it is used."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.gguf_models import published_template
from helpers.tiny_runs import TINY

from lora_grpo import models, starter
from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.data import load_data
from lora_grpo.evaluation import evaluate
from lora_grpo.evaluation.evaluate_model import evaluate_and_report
from lora_grpo.evaluation.options import EvaluateOptions
from lora_grpo.gguf.modelfile import read_turns
from lora_grpo.gguf.tokenizer import read_vocabulary
from lora_grpo.models import load_policy
from lora_grpo.models.base_model import load_tokenizer
from lora_grpo.preview import dry_run
from lora_grpo.preview.sample_groups import sample_groups
from lora_grpo.prompts import template_variables
from lora_grpo.prompts.template_variables import THINKING_TOKENS
from lora_grpo.runs import claim_run, open_run, read_record
from lora_grpo.sampling import Sampler, SamplingParams, VllmSampler, build_sampler
from lora_grpo.training import prepare_training, train

TEMPLATE = published_template("qwen3")
ENDINGS = {True: "<|im_start|>assistant\n", False: "<|im_start|>assistant\n<think>\n\n</think>\n\n"}
SMALL = {
    "data": {"train_limit": 2, "eval_limit": 1},
    "sampling": {"num_generations": 2, "max_completion_tokens": 8},
    "train": {"max_steps": 1, "prompts_per_step": 1, "checkpoint_steps": 1, "micro_batch_size": 2},
    "eval": {"num_samples": 1, "k": [1]},
}


class EncodedPrompts:
    """The token ids of all prompts that samplers have encoded."""

    def __init__(self):
        self.token_ids = []

    def take(self):
        """Return those since the last call."""
        token_ids = self.token_ids
        self.token_ids = []
        return token_ids


@pytest.fixture
def encoded(monkeypatch):
    encoded = EncodedPrompts()
    encode = Sampler.encode

    def recorded(self, prompts):
        token_ids = encode(self, prompts)
        encoded.token_ids += token_ids
        return token_ids

    monkeypatch.setattr(Sampler, "encode", recorded)
    return encoded


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The bundled model with the chat template of Qwen3."""
    folder = Path(shutil.copytree(starter.model_path(), tmp_path_factory.mktemp("model") / "hybrid"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class EngineThatKeepsPrompts:
    """In place of vLLM's engine: keeps the token ids of prompts, and yields nothing."""

    def __init__(self):
        self.token_ids = []

    def stream(self, token_ids, options, adapter):
        self.token_ids += token_ids
        return ()


def settings(model, folder, *chat_template_kwargs, **changes):
    config = replace(replace(RunConfig(output_dir=str(folder)), TINY), SMALL)
    return replace(config, {"model": {"name": str(model), "chat_template_kwargs": chat_template_kwargs}, **changes})


@pytest.mark.parametrize("thinks", [True, False])
def test_every_path_renders_the_same_prompt(model, thinks, tmp_path, encoded, monkeypatch, capsys):
    config = settings(model, tmp_path / "run", f"enable_thinking={json.dumps(thinks)}")
    data = load_data(config)
    policy = load_policy(config)
    tokenizer = policy.tokenizer
    assert f"thinking: {'on' if thinks else 'off'}, because --model.chat" in capsys.readouterr().err

    def expected(rows):
        """Return the token ids of prompts by the published template, without anything of the kit."""
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinks}
        texts = [tokenizer.apply_chat_template(row["prompt"], chat_template=TEMPLATE, **options) for row in rows]
        assert all(text.endswith(ENDINGS[thinks]) for text in texts)
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    def assert_encoded_only(rows):
        """Check that samplers have encoded the prompts of these rows since the last call, and no others."""
        prompts = encoded.take()
        assert prompts
        assert all(token_ids in expected(rows) for token_ids in prompts)

    # The trainer: its own rollouts, and those of TRL, which Unsloth's trainer renders.
    sampler = build_sampler(policy, config)
    claim_run(config, Invocation())
    run = open_run(config, Invocation(), "test", data.record)
    training = prepare_training(run, policy, data.train, sampler)
    trainer = training.trainer
    trained_prompts = []
    compute_loss = type(trainer)._compute_loss

    def recorded(self, model, inputs):
        for token_ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True):
            trained_prompts.append(token_ids[mask.bool()].tolist())
        return compute_loss(self, model, inputs)

    monkeypatch.setattr(type(trainer), "_compute_loss", recorded)
    assert trainer.chat_template_kwargs == template_variables.variables(tokenizer.chat_template)
    [prompt_by_trl] = trainer._tokenize_prompts(trainer.train_dataset[:1]["prompt"])[0]
    assert prompt_by_trl in expected(data.train)
    run.begin(policy.record)
    encoded.take()
    train(training)
    assert_encoded_only(data.train)
    assert trained_prompts == [prompt_by_trl, prompt_by_trl]
    assert read_record(run.folder)["policy"]["chat_template_kwargs"] == {"enable_thinking": thinks}

    # Preview and evaluation, and vLLM, which gets token ids.
    sample_groups(config, sampler, data.train)
    assert_encoded_only(data.train)
    evaluate(run, sampler, data.eval, "base")
    assert_encoded_only(data.eval)
    engine = EngineThatKeepsPrompts()
    vllm_sampler = VllmSampler(engine, tokenizer, policy.eos_token_ids)
    [prompt] = tokenizer.batch_decode(expected(data.eval))
    assert list(vllm_sampler.stream([prompt], SamplingParams(1, 1, 1, 8), [0])) == []
    assert engine.token_ids == expected(data.eval)
    encoded.take()

    # Commands that start from the saved run, or from the model alone.
    of_run = EvaluateOptions(str(run.folder), task="starter", output_dir=tmp_path / "of run", max_completion_tokens=4)
    evaluate_and_report(of_run)
    assert_encoded_only(data.eval)
    of_model = EvaluateOptions(
        str(model),
        task="starter",
        limit=1,
        max_completion_tokens=4,
        output_dir=tmp_path / "of model",
        chat_template_kwargs=config.model.chat_template_kwargs,
    )
    evaluate_and_report(of_model)
    (token_ids,) = {tuple(token_ids) for token_ids in encoded.take()}
    assert tokenizer.decode(token_ids).endswith(ENDINGS[thinks])
    capsys.readouterr()
    dry_run(config, data, models.load_tokenizer(config, dry_run=True))
    _, _, after_title = capsys.readouterr().out.partition(f"--- prompt of {data.train[0]['id']}\n")
    shown_prompt, _, _ = after_title.partition("\n--- ref")
    assert tokenizer(shown_prompt, add_special_tokens=False)["input_ids"] in expected(data.train)

    # What is exported.
    messages = data.eval[0]["prompt"]
    [expected_ids] = expected(data.eval)
    saved = load_tokenizer(replace(config.model, {"name": str(run.adapter)}))
    vocabulary = read_vocabulary(saved, len(saved), policy.eos_token_ids, None)
    assert tokenizer(read_turns(saved, vocabulary).render(messages))["input_ids"] == expected_ids
    saved.chat_template = vocabulary.fields["chat_template"]
    # The exported template no longer reads the switch: llama.cpp passes true by default.
    rendered = saved.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=not thinks)
    assert rendered["input_ids"] == expected_ids


def test_a_run_thinks_if_its_completions_are_long_enough(model, tmp_path, capsys):
    config = settings(model, tmp_path, sampling={"num_generations": 2, "max_completion_tokens": THINKING_TOKENS})
    config = replace(config, {"model": {"max_sequence_tokens": 2 * THINKING_TOKENS}})
    dry_run(config, load_data(config), models.load_tokenizer(config, dry_run=True))
    printed = capsys.readouterr()
    assert f"{ENDINGS[True]}\n--- reference answer" in printed.out
    assert "thinking: on, because compl" in printed.err
