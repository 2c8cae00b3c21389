"""Each architecture trains, is merged, and is exported or refused in one line; the rest is refused before it is loaded.

docs/models.md has the results.
"""

import contextlib
import functools
import json
import math
import re
import shutil

import pytest
import torch
from helpers.fresh_imports import RECIPES, ROOT, run_recipe
from helpers.made_runs import make_run
from helpers.tiny_models import CONFIGS, OTHERS, make_model
from helpers.tiny_runs import run_tiny
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from lora_grpo import starter
from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.gguf.writer import write_gguf
from lora_grpo.hub.push import prepare
from lora_grpo.memory.shape import Shape, UnknownFamily
from lora_grpo.merging import MergeOptions, merge
from lora_grpo.merging.base_weights import empty_model
from lora_grpo.models import ModelFlags, architectures, base_model, resolve, stop_tokens, with_start
from lora_grpo.models.architectures import TRAINABLE, check_architecture, with_supported
from lora_grpo.models.policy import load_policy
from lora_grpo.sampling.build import load_sampler, load_tokenizer

[GSM8K] = [path for path in RECIPES if path.stem == "gsm8k_lora"]
EXPORTED = {"qwen2", "qwen3", "llama", "mistral", "mistral with a sliding window"}
FAST = {("qwen3_5", 4), ("gemma4", 4), ("gemma2", 16), ("phi3", 4), ("qwen3 moe", 4)}
"""Those that differ most from Qwen2, which other tests train: the default suite has no more than these."""

ALIKE = {"arcee", "cohere2", "ernie4_5", "exaone4", "gemma", "glm4", "helium", "ministral", "olmo", "olmo2", "olmo3"}
ALIKE |= {"seed_oss"}
"""Those without a row in docs/models.md whose linear layers are those of Llama, Apertus (arcee) or GLM (glm4)."""


def marks_of(position, name, bits):
    """Return the marks of a case: of the two widths of a family, one in turn is slow and the other exhaustive."""
    if (name, bits) in FAST:
        return []
    is_in_turn = name not in ALIKE if name in OTHERS else bits == (4, 16)[position % 2]
    return [pytest.mark.slow] if is_in_turn else [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param(name, bits, marks=marks_of(position, name, bits))
        for position, name in enumerate((*CONFIGS, *OTHERS))
        for bits in ((4, 16) if name in CONFIGS else (4,))
    ],
)
def test_a_model_is_trained_merged_and_exported(name, bits, tmp_path):
    base = make_model(tmp_path / "base", (CONFIGS | OTHERS)[name])
    run, policy = run_tiny(
        tmp_path / "run",
        model={"engine": "peft", "name": str(base), "bits": bits, "max_sequence_tokens": 256},
        sampling={"num_generations": 4, "max_completion_tokens": 16, "backend": "transformers"},
        train={"max_steps": 2, "prompts_per_step": 2, "micro_batch_size": 4, "learning_rate": 1e-2},
    )
    # The sampler's logprobs are those of the trainer, with a perturbed adapter and in both steps.
    assert run.record["logprob_check"]["difference"] < 1e-5
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])
        assert step["sampling/sampling_logp_difference/mean"] < 1e-5
        assert "aux_loss" not in step  # the loss of a mixture's router
    adapter = load_file(run.adapter / "adapter_model.safetensors")
    moved = [name for name, tensor in adapter.items() if "lora_B" in name and tensor.abs().max() > 0]
    assert len(moved) == len(adapter) // 2

    merged = merge(MergeOptions(str(run.folder), dtype="fp32"))
    whole = base_model.auto_class(AutoConfig.from_pretrained(base))
    live = PeftModel.from_pretrained(whole.from_pretrained(base), run.adapter).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]])
    with torch.no_grad():
        after = whole.from_pretrained(merged).eval()(ids).logits
        expected = live(ids).logits
        with live.disable_adapter():
            before = live(ids).logits
    assert (after - expected).abs().max() < 2e-5 < 2e-3 * (before - expected).abs().max()

    not_measured = json.loads((merged / "merge_report.json").read_text())["kl"]["not_measured"]
    # Gemma 4's layers have embeddings of their own, and Phi's head has a bias.
    assert ("several embeddings" in (not_measured or "")) == (name in ("gemma4", "gemma4 text", "phi"))
    # Tensors that the adapter does not change, such as those that read images, are equal.
    stored, written = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    changed = {name for name, tensor in stored.items() if not torch.equal(tensor, written.pop(name))}
    assert not written and len(changed) == len(moved)
    assert not any("vision" in name or "visual" in name for name in changed)
    if name in CONFIGS:
        only_attention = all(".self_attn." in module for module in moved)
        reason = run.record["padded_rows"]
        if "attends to the last" in reason:
            prompts_are_read = "once per group in its window"
        else:
            prompts_are_read = "once per completion" if reason else "once per group"
        assert documented(name) == [
            "attention" if only_attention else "every linear layer",
            prompts_are_read,
            "no" if name in UNPLANNED else "yes",
            "yes" if name in EXPORTED else "no",
        ]
    if name in EXPORTED:
        write_gguf(merged, {"f16": tmp_path / "model.gguf"})
        return
    with pytest.raises(UserError, match=rf"is a {type(policy.model.get_base_model()).__name__}; supported are \w+"):
        write_gguf(merged, {"f16": tmp_path / "model.gguf"})


def test_training_goes_on_from_the_adapter_of_a_model_that_reads_images(tmp_path):
    base = make_model(tmp_path / "base", CONFIGS["mistral3"])
    model = {"engine": "peft", "name": str(base), "bits": 16}
    first, _ = run_tiny(tmp_path / "first", model=model, train={"max_steps": 1})
    second, _ = run_tiny(tmp_path / "second", model=model, train={"max_steps": 1}, lora={"from": str(first.folder)})
    assert with_start(second.config, (), resumed=False).lora.rank == second.config.lora.rank
    start, end = (load_file(run.adapter / "adapter_model.safetensors") for run in (first, second))
    assert start.keys() == end.keys() and all("language_model" in name for name in start)
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.json"):
        (base / name).write_text("{}")
    merged = merge(MergeOptions(str(second.folder)))
    assert {"preprocessor_config.json", "processor_config.json", "chat_template.json"} <= {
        file.name for file in prepare(merged, "merged", "me/trained")[0]
    }
    for kind, folder in (("adapter", second.adapter), ("merged", merged)):
        files, *_ = prepare(folder, kind, "me/trained")
        assert "AutoModelForImageTextToText.from_pretrained(" in files[-1].read().decode()
    settings = json.loads((second.adapter / "adapter_config.json").read_text())
    parts = ["model.vision_tower.transformer.layers.0.attention.q_proj", "model.multi_modal_projector.linear_1"]
    assert all(re.fullmatch(settings["exclude_modules"], part) for part in parts)
    assert not any(re.fullmatch(settings["exclude_modules"], name.partition(".lora")[0]) for name in start)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_some_types_are_not_trained_with_unsloth(family):
    config = {"model_type": family}
    check_architecture(config, ModelConfig(), "peft")
    with pytest.raises(UserError, match=r"pass --model\.engine peft$"):
        check_architecture(config, ModelConfig(), "unsloth")


def test_a_model_that_llama_cpp_does_not_know_is_refused_before_the_merge(tmp_path):
    base = make_model(tmp_path / "base", CONFIGS["gemma2"])
    run = make_run(tmp_path / "run", name=str(base))
    with pytest.raises(UserError, match=r"^[^:]* is a Gemma2ForCausalLM; supported are"):
        export(ExportOptions(run))
    assert not (run / "merged").exists()


def documented(name):
    """Return the cells of a row of docs/models.md: adapted layers, prompts in the loss pass, planned, exported."""
    label = f"`{CONFIGS[name]['model_type']}`" + (", sliding window" if "sliding window" in name else "")
    lines = (ROOT / "docs" / "models.md").read_text().partition("<!-- results")[0].splitlines()
    [cells] = [line.strip("| ").split(" | ") for line in lines if re.match(rf"\| {label}( \(.*?\))? \|", line)]
    return cells[1:5]


def saved(config):
    """Return a configuration as transformers writes it, with some names different from those on the Hub."""
    return json.loads(AutoConfig.for_model(**config).to_json_string())


def test_every_family_that_is_accepted_is_tested():
    assert {config["model_type"] for config in (CONFIGS | OTHERS).values()} == set(TRAINABLE)
    assert OTHERS.keys() > ALIKE


UNPLANNED = ("gpt_oss", "granite hybrid", "lfm2", "mixtral", "qwen3 moe")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_counts_every_parameter(name):
    config = CONFIGS[name]
    if name in UNPLANNED:
        with pytest.raises(UserError, match=r"the memory of a model of type .* cannot be planned"):
            Shape.of(config)
        return
    with torch.device("meta"):
        text = {"model_type": f"{config['model_type']}_text", **config.get("text_config", config)}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    shape = Shape.of(config)
    assert Shape.of(saved(config)) == shape
    assert shape.parameters == model.num_parameters()
    linear = {n: m.weight for n, m in model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"}
    assert shape.linear_parameters == sum(weight.numel() for weight in linear.values())
    assert {name: weight.shape[::-1] for name, weight in linear.items()} == shape.linears


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_5 text", {"layer_types": ["full_attention"]}),
        ("qwen3_5 text", {"layer_types": {"a": 1}}),
        ("gemma4 text", {"num_kv_shared_layers": "20"}),
        ("gemma4 text", {"enable_moe_block": True}),
        ("gemma4 text", {"hidden_size_per_layer_input": -1}),
        ("llama", {"hidden_size": None}),
        ("llama", {"num_hidden_layers": "2"}),
        ("gemma3 with images", {"text_config": ["a"]}),
        ("qwen3_5", {"text_config": None}),
    ],
)
def test_a_model_with_other_sizes_is_not_planned(name, changes):
    with pytest.raises(UnknownFamily):
        Shape.of({**CONFIGS[name], **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": None, "num_hidden_layers": 8},
        {"hidden_size_per_layer_input": 0},
        {"num_kv_shared_layers": None},
        {"global_head_dim": 16},
    ],
)
def test_gemma_4_is_planned_as_transformers_makes_it(changes):
    config = AutoConfig.for_model(**{**CONFIGS["gemma4 text"], **changes, "num_kv_shared_layers": 0})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    asked = Shape.of({**CONFIGS["gemma4 text"], "num_kv_shared_layers": 0, **changes})
    assert asked.parameters == Shape.of(json.loads(config.to_json_string())).parameters == model.num_parameters()


def test_sizes_that_published_gemma_3_leaves_out_are_those_of_transformers():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    assert Shape.of({"model_type": "gemma3", "text_config": text}).parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("vllm", "ministral3", "mistral3"),
    [
        (None, "transformers", "transformers"),
        ((0, 27), "transformers", "transformers"),
        ((0, 30), "auto", "transformers"),
        ((0, 31), "auto", "auto"),
    ],
)
def test_auto_chooses_what_a_type_supports(monkeypatch, vllm, ministral3, mistral3):
    monkeypatch.setattr(architectures, "vllm_version", lambda: vllm)
    families = ("qwen3_5", "ministral3", "mistral3", "llama")
    configs = {family: with_supported(RunConfig(), family) for family in families}
    assert {family: (config.model.engine, config.sampling.backend) for family, config in configs.items()} == {
        "qwen3_5": ("peft", "auto"),
        "ministral3": ("auto", ministral3),
        "mistral3": ("peft", mistral3),
        "llama": ("auto", "auto"),
    }


REFUSED = {
    "mamba": ({"model_type": "mamba"}, "it has not been tested"),
    "t5": ({"model_type": "t5", "is_encoder_decoder": True}, "it is an encoder-decoder"),
    "another that reads images": (
        {"model_type": "llava", "text_config": {}, "vision_config": {}},
        "it has not been tested",
    ),
    "custom": ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "pass --model.trust-remote-code"),
    "unheard": ({"model_type": "unheard"}, "it has not been tested; pass another model"),
    "none": ({}, "none cannot be trained: its config.json has no model_type"),
}
STORED = {
    "gptq": ({"quant_method": "gptq"}, "its weights are stored in gptq"),
    "8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "not in bitsandbytes' 4 bits"),
    "list": ([4], "an unknown format"),
}
REFUSED |= {name: ({**CONFIGS["llama"], "quantization_config": it}, why) for name, (it, why) in STORED.items()}


@pytest.fixture
def folders(tmp_path):
    """Folders with the configuration of a model and nothing else."""
    configs = {name: saved(config) for name, config in CONFIGS.items()}
    configs |= {name: config for name, (config, _) in REFUSED.items()}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_plan_needs_the_configuration_alone_and_refuses_what_cannot_be_trained(folders):
    out = folders / "out"
    lines = [["--model.name", str(folders / name), "--output-dir", str(out), "--plan"] for name in (*CONFIGS, *REFUSED)]
    result = run_recipe(GSM8K, *lines)
    ended = [line for line in result.stdout.splitlines() if line.startswith("loaded")]
    assert ended == ["loaded [] code 0"] * len(CONFIGS) + ["loaded [] code 2"] * len(REFUSED)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(REFUSED)
    for error, (name, (_, reason)) in zip(errors, REFUSED.items(), strict=True):
        assert str(folders / name) in error and reason in error
    assert not out.exists()


def test_experts_are_not_adapted(tmp_path):
    folder = make_model(tmp_path / "model", CONFIGS["qwen3 moe"])
    model, lora = {"name": str(folder), "engine": "peft"}, {"targets": ["q_proj", "gate_proj", "up_proj"]}
    with pytest.raises(UserError, match=r"--lora\.targets q_proj gate_proj up_proj: experts cannot be adapted"):
        load_policy(replace(RunConfig(), {"model": model, "lora": lora}))


def test_trusted_code_and_4_bit_weights_are_accepted():
    custom, _ = REFUSED["custom"]
    check_architecture(custom, ModelConfig(trust_remote_code=True), "peft")
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    check_architecture({**CONFIGS["llama"], "quantization_config": stored}, ModelConfig(), "peft")


@pytest.mark.parametrize(("eos", "warned"), [("<|im_end|>", False), ("<|im_start|>", True)])
def test_an_eos_token_that_ends_no_turn_is_a_warning(tmp_path, capsys, eos, warned):
    folder = make_model(tmp_path / "model", CONFIGS["llama"])
    ids = {name: i for i, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[eos]}))
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "eos_token": eos}))
    load_policy(replace(RunConfig(), {"model": {"name": str(folder), "engine": "peft"}}))
    assert ("correct eos_token_id" in capsys.readouterr().err) == warned


def test_a_missing_chat_template_is_noted(tmp_path, capsys):
    folder = make_model(tmp_path / "model", CONFIGS["qwen3 moe"])
    capsys.readouterr()  # progress bars
    (folder / "chat_template.jinja").unlink()
    settings = {"model": {"name": str(folder), "engine": "peft"}, "lora": {"targets": ("q_proj",)}}
    load_policy(replace(RunConfig(), settings))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {folder} has no chat template, so prompts are plain text")
    spec = resolve(str(folder), ModelFlags())
    load_sampler(spec, "transformers", load_tokenizer(spec), 256, seed=0)
    assert capsys.readouterr().err == f"note: {folder} has no chat template, so prompts are plain text\n"


def test_code_in_a_model_folder_does_not_run(tmp_path, monkeypatch):
    model = shutil.copytree(starter.model_path(), tmp_path / "model")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Trap:\n    pass\n"
    (model / "trap.py").write_text(trap)
    for name, classes in (
        ("config.json", {"AutoConfig": "trap.Trap", "AutoModelForCausalLM": "trap.Trap"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}),
    ):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**settings, "model_type": "trap", "auto_map": classes}))
    (model / "generation_config.json").unlink(missing_ok=True)
    tokenizer = base_model.load_tokenizer(ModelConfig())
    ends = functools.partial(stop_tokens.eos_token_ids, tokenizer=tokenizer, name="trap")
    for load in (base_model.load_base, base_model.load_tokenizer, ends):
        with contextlib.suppress(UserError):
            load(resolve(str(model), ModelFlags()).base)
    with pytest.raises(UserError, match="contains custom code"):
        empty_model(model)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError):  # a trap is no model
        base_model.load_base(resolve(str(model), ModelFlags(trust_remote_code=True)).base)
    assert (tmp_path / "ran").exists()
