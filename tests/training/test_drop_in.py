"""FastGRPOTrainer stops no script that runs with TRL's trainer, and ignores nothing that TRL's trainer reads."""

import inspect

import pytest
import torch
from datasets import Dataset
from helpers.loss_passes import random_model
from helpers.tiny_runs import run_tiny
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from lora_grpo import starter
from lora_grpo.errors import RunError, UserError
from lora_grpo.loss import exact_pass
from lora_grpo.runs import read_metrics
from lora_grpo.sampling import Sampler
from lora_grpo.sampling.merged_copy import MergedCopySampler, can_merge
from lora_grpo.training import FastGRPOTrainer, trl_compat
from lora_grpo.training.logprob_check import tolerance

MODEL = str(starter.model_path())
TEXTS = ["Tom has 3 plums and buys 4.", "Ann has 9 apples.", "How many?", "A box holds 6 pens. Sam has two boxes."]


def lora(**settings):
    return LoraConfig(task_type="CAUSAL_LM", r=4, **settings)


def starter_model(**settings):
    return AutoModelForCausalLM.from_pretrained(MODEL, **settings)


def code_points(completions, **columns):
    """Return the mean code point of each completion, times 0.01: a reward that nearly always differs."""
    return [0.01 * sum(map(ord, text)) / max(len(text), 1) for text in completions]


def build(
    folder, model=MODEL, peft_config=None, tokenizer=None, reward=code_points, trainer=FastGRPOTrainer, **settings
):
    torch.manual_seed(0)
    default = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "max_steps": 2}
    default |= {"learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    default |= {"use_cpu": True, "bf16": False, "report_to": []}
    return trainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), **{**default, **settings}),
        train_dataset=Dataset.from_list([{"prompt": text} for text in TEXTS]),
        processing_class=tokenizer or AutoTokenizer.from_pretrained(MODEL),
        peft_config=peft_config,
    )


def reported(printed):
    return [line for line in printed.splitlines() if ", which takes " in line]


# Models with random weights, which every CI uses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_an_adapter_on_random_weights_is_checked_and_sampled(dtype, autocast, tmp_path):
    model = random_model(vocabulary=4096).to(dtype)
    torch.nn.init.normal_(model.lm_head.weight, std=0.02)  # noise in the adapter moves logprobs by much less than 0.5
    trainer = build(tmp_path, model, lora(), bf16=autocast)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.sampler is not None


def test_trl_samples_if_noise_in_the_adapter_moves_nothing(tmp_path, capsys):
    model = random_model(vocabulary=4096, dtype=torch.bfloat16)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    capsys.readouterr()
    trainer = build(tmp_path, model, lora(target_modules=["q_proj"]))
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.sampler is None
    assert len(reported(capsys.readouterr().err)) == 1


# Settings of `generate`

HONORED = {
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [5],
    "bad_words_ids": [[7]],
    "sequence_bias": [[[5], 2.0]],
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "min_p": 0.1,
    "top_h": 0.5,
    "no_repeat_ngram_size": 1,
    "repetition_penalty": 1.2,
    "min_length": 60,
    "min_new_tokens": 3,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 1,
    "exponential_decay_length_penalty": (3, 1.1),
    "num_beams": 2,
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"},
    "stop_strings": ["a"],
    "max_time": 1.0,
}
SAME = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_length": 33, "use_cache": False, "do_sample": False}
SAME |= {"typical_p": 1.0, "epsilon_cutoff": 0.0, "no_repeat_ngram_size": 0, "output_scores": True}


@pytest.fixture(scope="module")
def trainer_of_settings(tmp_path_factory):
    """Return a trainer whose model's settings of `generate` the tests change."""
    return build(tmp_path_factory.mktemp("trainer"), starter_model())


@pytest.mark.parametrize("name", HONORED)
def test_trl_samples_with_what_the_models_generation_config_sets(name, trainer_of_settings, monkeypatch, capsys):
    value = HONORED[name]
    if name == "repetition_penalty":  # TRL always passes its own
        name = "encoder_repetition_penalty"
    monkeypatch.setattr(trainer_of_settings.model.generation_config, name, value, raising=False)
    reason = trainer_of_settings.find_fallback_reason()
    [line] = reported(capsys.readouterr().err)
    assert f"`{name}`" in reason and f"`{name}`" in line


def test_the_settings_are_read_when_the_trainer_is_built(tmp_path):
    model = starter_model()
    model.generation_config.min_p = HONORED["min_p"]
    assert "`min_p`" in build(tmp_path, model).fallback_reason


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_samples_stays_fast(name, trainer_of_settings, monkeypatch):
    monkeypatch.setattr(trainer_of_settings.model.generation_config, name, SAME[name], raising=False)
    assert not trainer_of_settings.find_fallback_reason()


def test_suppressed_tokens_are_not_sampled(tmp_path):
    [wanted] = AutoTokenizer.from_pretrained(MODEL)("e", add_special_tokens=False)["input_ids"]
    model = starter_model()
    sampled = []

    def reward(completion_ids, **columns):
        sampled.extend(token for ids in completion_ids for token in ids)
        return [float(len(ids)) for ids in completion_ids]

    model.generation_config.suppress_tokens = [token for token in range(len(model.lm_head.weight)) if token != wanted]
    build(tmp_path, model, reward=reward).train()
    assert set(sampled) == {wanted}


def test_a_change_of_the_trainers_generation_config_takes_effect(tmp_path, capsys):
    trainer = build(tmp_path)
    ids = trainer.processing_class(TEXTS)["input_ids"]
    trainer._generate_single_turn(ids, None, {}, 1)
    assert trainer.sampler is not None
    trainer.generation_config.max_new_tokens = 2
    capsys.readouterr()
    completions, logprobs = trainer._generate_single_turn(ids, None, {}, 1)
    [line] = reported(capsys.readouterr().err)
    assert max(map(len, completions)) <= 2 and logprobs is None and "`max_new_tokens`" in line


def test_a_generate_of_the_script_is_called(tmp_path):
    model = starter_model()
    calls = []
    generate = model.generate
    model.generate = lambda *args, **kwargs: calls.append(1) or generate(*args, **kwargs)
    trainer = build(tmp_path, model)
    trainer.train()
    assert len(calls) == 2 and trainer.fallback_reason


# Small vocabularies, and models that this package does not know


def word_tokenizer():
    """Return a tokenizer of five tokens that knows no English."""
    words = {"<unk>": 0, "<eos>": 1, "ein": 2, "zwei": 3, "drei": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


class Silent(PreTrainedTokenizerFast):
    """A tokenizer that has no tokens for the text of the checks."""

    def __call__(self, text, **options):
        if isinstance(text, str) and "children" in text:
            return {"input_ids": []}
        return super().__call__(text, **options)


@pytest.mark.parametrize("tokenizer", ["words", "silent"])
@pytest.mark.parametrize("peft_config", [None, lora()], ids=["full", "LoRA"])
def test_a_small_vocabulary_trains(tokenizer, peft_config, tmp_path):
    tokenizer = word_tokenizer() if tokenizer == "words" else Silent(tokenizer_object=word_tokenizer()._tokenizer)
    tokenizer.eos_token = tokenizer.pad_token = "<eos>"
    trainer = build(tmp_path, random_model(vocabulary=5), peft_config, tokenizer)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.sampler is not None


def test_a_script_without_a_length_limit_trains(tmp_path):
    trainer = build(tmp_path, max_completion_length=None)
    trainer.train()
    assert trainer.state.global_step == 2 and "max_completion_length" in trainer.fallback_reason


def tiny(family, **sizes):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, **sizes}
    return random_model(family, vocabulary=4096, **sizes)


COUNT_PADDING = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "biogpt": {},
    "xglm": {"d_model": 32, "attention_heads": 2, "num_layers": 2, "ffn_dim": 64},
}


@pytest.mark.parametrize("family", COUNT_PADDING)
def test_a_model_that_counts_padding_trains_as_with_trl(family, tmp_path):
    trainers = []
    for trainer_class in (GRPOTrainer, FastGRPOTrainer):
        trainers.append(build(tmp_path, tiny(family, **COUNT_PADDING[family]), trainer=trainer_class))
        trainers[-1].train()
    theirs, ours = ([log for log in trainer.state.log_history if "loss" in log] for trainer in trainers)
    assert "counts the padding" in trainers[1].fallback_reason
    for name in ("loss", "reward"):
        assert [log[name] for log in ours] == pytest.approx([log[name] for log in theirs], abs=1e-5)


def test_a_model_that_counts_positions_from_the_mask_stays_fast(tmp_path):
    trainer = build(tmp_path, tiny("opt", ffn_dim=64, word_embed_proj_dim=32))
    trainer.train()
    assert trainer.sampler is not None and not trainer.packing_disabled_reason


LLAMA4 = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "attention_chunk_size": 32}
UNKNOWN = {  # with the part that TRL's code does
    "llama4_text": (LLAMA4, "loss"),  # the decoder is a whole language model, and has chunked attention
    "mpt": ({"d_model": 32, "n_heads": 2, "n_layers": 2}, "loss"),  # no positions
    "minimax": (
        {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["linear_attention", "full_attention"]},
        "sampling",  # a cache of its own
    ),
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_model_that_this_package_does_not_support_trains(family, tmp_path):
    sizes, part = UNKNOWN[family]
    trainer = build(tmp_path, tiny(family, **sizes), router_aux_loss_coef=0.0)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.packing_disabled_reason
    assert bool(trainer.sampler_failure) == (part == "sampling")


# Errors of this package


@pytest.mark.parametrize(
    ("owner", "method"), [(Sampler, "sample"), (MergedCopySampler, "__init__"), (MergedCopySampler, "wake_up")]
)
def test_trl_samples_after_an_error_in_the_first_step(owner, method, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise NotImplementedError("as of today")

    trainer = build(tmp_path, peft_config=lora())
    monkeypatch.setattr(owner, method, fail)
    capsys.readouterr()
    trainer.train()
    [line] = reported(capsys.readouterr().err)
    assert "NotImplementedError: as of today" in line and trainer.state.global_step == 2
    assert trainer.sampler is None and not trainer.packing_disabled_reason


@pytest.mark.parametrize("moment", ["built", "trained"])
def test_padded_rows_are_read_after_an_error_in_the_first_loss(moment, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise KeyError("packing")

    if moment == "built":
        monkeypatch.setattr(exact_pass, "packing_obstacle", fail)
    trainer = build(tmp_path)
    if moment == "trained":
        monkeypatch.setattr(exact_pass, "packed_rows", fail)
    trainer.train()
    [line] = reported(capsys.readouterr().err)
    assert "KeyError" in line and trainer.sampler is not None and trainer.state.global_step == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_interruptions_and_errors_of_rewards_are_raised(error, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    if error is KeyboardInterrupt:
        trainer = build(tmp_path)
        monkeypatch.setattr(Sampler, "sample", fail)
    else:
        trainer = build(tmp_path, reward=fail)
    with pytest.raises(error):
        trainer.train()


def test_a_recipe_stops_with_the_error(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RunError("as of today")

    monkeypatch.setattr(MergedCopySampler, "wake_up", fail)
    with pytest.raises(RunError):
        run_tiny(tmp_path / "run", train={"max_steps": 1})


# Subclasses


class ByName(FastGRPOTrainer):
    """A subclass as written for TRL's trainer, which passes arguments by name."""

    def _generate(self, prompts):
        return super()._generate(prompts=prompts)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        named = {"multimodal_fields": multimodal_fields, "num_generations": num_generations}
        return super()._generate_single_turn(prompt_ids=prompt_ids, images=images, has_tool_images=False, **named)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rows = {"inputs": inputs, "prompts": prompts}
        return super()._calculate_rewards(completions=completions, completion_ids_list=completion_ids_list, **rows)

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        keep = inputs["completion_ids"].shape[1]
        self.by_name = self._get_per_token_logps_and_entropies(
            model=model, input_ids=ids, attention_mask=mask, logits_to_keep=keep, compute_entropy=True
        )
        self.all_columns = self._get_per_token_logps_and_entropies(model, ids, mask, logits_to_keep=ids.shape[1] - 1)
        self.by_position = self._get_per_token_logps_and_entropies(model, ids, mask, keep, compute_entropy=True)
        self.shared_prompts = not self.packing_disabled_reason
        return super()._compute_loss(model=model, inputs=inputs)


def test_a_subclass_calls_hooks_by_name(tmp_path):
    trainer = build(tmp_path, trainer=ByName)
    trainer.train()
    assert trainer.sampler is not None and trainer.shared_prompts
    for named, placed in zip(trainer.by_name[:2], trainer.by_position[:2], strict=True):
        assert torch.equal(named, placed)
    keep = trainer.by_name[0].shape[1]
    mask = trainer.by_name[0] != 0
    assert torch.allclose(trainer.all_columns[0][:, -keep:][mask], trainer.by_name[0][mask], atol=1e-4)


def test_the_class_has_the_signature_of_trls():
    assert inspect.signature(FastGRPOTrainer) == inspect.signature(GRPOTrainer)
    assert inspect.signature(ByName) == inspect.signature(GRPOTrainer)


# The reference of the KL term is the model at the start


def loaded(folder, trainable, **settings):
    """Return a model with an adapter that was saved after training."""
    torch.manual_seed(3)
    model = get_peft_model(starter_model(), lora(init_lora_weights=False, **settings))
    for name, parameter in model.named_parameters():
        if "modules_to_save.default" in name or "trainable_tokens_delta" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    model.save_pretrained(folder)
    return PeftModel.from_pretrained(starter_model(), folder, is_trainable=trainable)


ADAPTERS = {
    "LoRA": {"target_modules": ["q_proj"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "DoRA": {"target_modules": ["q_proj"], "use_dora": True},
    "a whole layer": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "token vectors": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]},
}


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_first_step_of_a_loaded_adapter_has_no_divergence(name, trainable, tmp_path):
    model = loaded(tmp_path / "adapter", trainable, **ADAPTERS[name])
    trainer = build(tmp_path, model, beta=0.1, max_steps=1)
    assert "ref" in model.peft_config
    trainer.train()
    [divergence] = [log["kl"] for log in trainer.state.log_history if "kl" in log]
    assert divergence < 1e-6


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]])
def test_the_reference_of_a_new_adapter_is_the_base(targets, tmp_path):
    trainer = build(tmp_path, get_peft_model(starter_model(), lora(target_modules=targets)), beta=0.1, max_steps=1)
    assert "ref" not in trainer.model.peft_config
    trainer.train()
    assert [log["kl"] for log in trainer.state.log_history if "kl" in log] == [0.0]


@pytest.mark.parametrize("targets", [("q_proj", "lm_head"), ("lm_head",), ("q_proj", "embed_tokens")])
def test_a_recipe_adapts_tied_embeddings(targets, tmp_path):
    settings = {"lora": {"targets": targets}, "train": {"max_steps": 2, "learning_rate": 1e-2}}
    if trl_compat.has_fused_head() and "lm_head" in targets:
        with pytest.raises(UserError, match="adapter to `lm_head` is not supported"):
            run_tiny(tmp_path / "run", **settings)
        return
    run, _ = run_tiny(tmp_path / "run", **settings)
    assert run.record["logprob_check"]["difference"] < 1e-5
    assert all(step["sampling/sampling_logp_difference/mean"] < 1e-5 for step in read_metrics(run.folder))


# Quantized layers


def test_the_sampler_of_an_8_bit_model_has_its_logprobs(tmp_path, capsys):
    settings = BitsAndBytesConfig(load_in_8bit=True)
    model = starter_model(quantization_config=settings, dtype=torch.float32)
    trainer = build(tmp_path, model, lora(init_lora_weights=False))
    trainer.train()
    assert type(trainer.sampler) is Sampler
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/mean"] < 10 * tolerance(trainer)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_without_their_scale_are_not_copied(dtype):
    model = get_peft_model(starter_model(), lora(target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(torch.ones_like(layer.weight, dtype=torch.float32).to(dtype), requires_grad=False)
    assert not can_merge(model)
