"""A model whose chat template has a switch for thinking gets the same prompts, on or off, wherever it is used."""

import itertools
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
from lora_grpo.runs import open_run, read_record
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


class Encoded(list):
    """The token ids of all prompts that samplers have encoded."""

    def take(self):
        prompts = list(self)
        self.clear()
        return prompts


@pytest.fixture
def encoded(monkeypatch):
    all_ids = Encoded()
    encode = Sampler.encode

    def recorded(self, prompts):
        ids = encode(self, prompts)
        all_ids.extend(ids)
        return ids

    monkeypatch.setattr(Sampler, "encode", recorded)
    return all_ids


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The bundled model with the chat template of Qwen3."""
    folder = Path(shutil.copytree(starter.model_path(), tmp_path_factory.mktemp("model") / "hybrid"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def settings(model, folder, *template_variables, **changes):
    config = replace(replace(RunConfig(output_dir=str(folder)), TINY), SMALL)
    return replace(config, {"model": {"name": str(model), "chat_template_kwargs": template_variables}, **changes})


@pytest.mark.parametrize("thinks", [True, False])
def test_every_path_renders_the_same_prompt(model, thinks, tmp_path, encoded, monkeypatch, capsys):
    config = settings(model, tmp_path / "run", f"enable_thinking={json.dumps(thinks)}")
    data = load_data(config)
    policy = load_policy(config)
    tokenizer = policy.tokenizer
    assert f"thinking: {'on' if thinks else 'off'}, because --model.chat" in capsys.readouterr().err

    def expected(rows):
        """Render with the published template, without anything of the kit."""
        options = {"tokenize": False, "add_generation_prompt": True, "chat_template": TEMPLATE}
        texts = [tokenizer.apply_chat_template(row["prompt"], **options, enable_thinking=thinks) for row in rows]
        assert all(text.endswith(ENDINGS[thinks]) for text in texts)
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    def only(rows):
        """Check that samplers have encoded the prompts of these rows since the last call, and no others."""
        prompts = encoded.take()
        assert prompts and all(ids in expected(rows) for ids in prompts)

    # The trainer: its own rollouts, and those of TRL, which Unsloth's trainer renders.
    sampler = build_sampler(policy, config)
    run = open_run(config, Invocation(), "test", data.record)
    training = prepare_training(run, policy, data.train, sampler)
    trainer = training.trainer
    trained_on = []
    compute = type(trainer)._compute_loss

    def recorded(self, model, inputs):
        trained_on.extend(zip(inputs["prompt_ids"].tolist(), inputs["prompt_mask"].tolist(), strict=True))
        return compute(self, model, inputs)

    monkeypatch.setattr(type(trainer), "_compute_loss", recorded)
    assert trainer.chat_template_kwargs == template_variables.variables(tokenizer.chat_template)
    by_trl = trainer._tokenize_prompts(trainer.train_dataset[:1]["prompt"])[0]
    run.begin(policy.record)
    encoded.take()
    train(training)
    only(data.train)
    inputs = [[*itertools.compress(ids, mask)] for ids, mask in trained_on]
    assert len(inputs) == 2 and inputs == by_trl * 2 and by_trl[0] in expected(data.train)
    assert read_record(run.folder)["policy"]["chat_template_kwargs"] == {"enable_thinking": thinks}

    # Preview and evaluation, and vLLM, which gets token ids.
    sample_groups(config, sampler, data.train)
    only(data.train)
    evaluate(run, sampler, data.eval, "base")
    only(data.eval)
    sent = []
    engine = type("Engine", (), {"stream": lambda self, ids, options, adapter: sent.extend(ids) or ()})()
    by_vllm = VllmSampler(engine, tokenizer, policy.eos_token_ids)
    [prompt] = tokenizer.batch_decode(expected(data.eval))
    assert list(by_vllm.stream([prompt], SamplingParams(1, 1, 1, 8), [0])) == []
    encoded.take()
    assert sent == expected(data.eval)

    # Commands that start from the saved run, or from the model alone.
    options = EvaluateOptions(str(run.folder), task="starter", output_dir=tmp_path / "of run", max_completion_tokens=4)
    evaluate_and_report(options)
    only(data.eval)
    options = EvaluateOptions(
        str(model),
        task="starter",
        limit=1,
        max_completion_tokens=4,
        output_dir=tmp_path / "alone",
        chat_template_kwargs=config.model.chat_template_kwargs,
    )
    evaluate_and_report(options)
    (ids,) = {tuple(ids) for ids in encoded.take()}
    assert tokenizer.decode(ids).endswith(ENDINGS[thinks])
    capsys.readouterr()
    dry_run(config, data, models.load_tokenizer(config, dry_run=True))
    shown = capsys.readouterr().out.partition(f"--- prompt of {data.train[0]['id']}\n")[2].partition("\n--- ref")[0]
    assert tokenizer(shown, add_special_tokens=False)["input_ids"] in expected(data.train)

    # What is exported.
    saved = load_tokenizer(replace(config.model, {"name": str(run.adapter)}))
    vocabulary = read_vocabulary(saved, len(saved), policy.eos_token_ids, None)
    turns = read_turns(saved, vocabulary)
    assert tokenizer(turns.render(data.eval[0]["prompt"]))["input_ids"] == expected(data.eval)[0]
    saved.chat_template = vocabulary.fields["chat_template"]
    # llama.cpp passes `enable_thinking`, which is true by default.
    llama_cpp_options = {"add_generation_prompt": True, "enable_thinking": not thinks}
    assert saved.apply_chat_template(data.eval[0]["prompt"], **llama_cpp_options)["input_ids"] == expected(data.eval)[0]


def test_a_run_thinks_if_its_completions_are_long_enough(model, tmp_path, capsys):
    config = settings(model, tmp_path, sampling={"num_generations": 2, "max_completion_tokens": THINKING_TOKENS})
    config = replace(config, {"model": {"max_sequence_tokens": 2 * THINKING_TOKENS}})
    dry_run(config, load_data(config), models.load_tokenizer(config, dry_run=True))
    printed = capsys.readouterr()
    assert f"{ENDINGS[True]}\n--- reference answer" in printed.out and "thinking: on, because compl" in printed.err
