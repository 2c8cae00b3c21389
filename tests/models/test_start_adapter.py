"""`--lora.from` before anything is loaded: what is taken from the adapter, and what is refused."""

import json
import shlex

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_grpo.cli.arguments import parse
from lora_grpo.errors import UserError
from lora_grpo.models import base_model, prepare_tokenizer, start_folder
from lora_grpo.prompts import chat

PRESETS = {"starter": {"model": {"engine": "peft"}}}
CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "starter",
    "r": 4,
    "lora_alpha": 12,
    "target_modules": ["v_proj", "q_proj"],
    "use_rslora": True,
    "bias": "none",
    "rank_pattern": {},
    "lora_dropout": 0.05,
}


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """Return a function that writes an adapter to `sft`, and work in the folder above it."""
    monkeypatch.chdir(tmp_path)

    def write(folder="sft", rank=4, **changes):
        path = tmp_path / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        weights = {f"{name}.lora_A.weight": (rank, 192), f"{name}.lora_B.weight": (192, rank)}
        save_file(
            {key: np.ones(shape, np.float32) for key, shape in weights.items()}, path / "adapter_model.safetensors"
        )
        return path

    return write


def read(line):
    arguments = ["--preset", "starter", *shlex.split(line)]
    return parse(arguments, recipe="r", description="", presets=PRESETS)[0]


def run_json(folder, name="starter", **policy):
    record = {
        "lora_grpo_run": 1,
        "config": {"model": {"name": name}},
        "data": {},
        "versions": {},
        "policy": {"base_model": name, **policy},
    }
    (folder / "run.json").write_text(json.dumps(record))


def test_rank_scaling_and_targets_come_from_the_adapter(adapter):
    adapter()
    config = read("--lora.from sft --lora.dropout 0.1 --lora.targets q_proj v_proj --lora.alpha 12")
    expected = {"rank": 4, "alpha": 12, "targets": ["q_proj", "v_proj"], "rslora": True, "dora": False}
    assert config.to_dict()["lora"] == {**expected, "dropout": 0.1, "from": "sft"}


def test_a_run_is_named_by_its_folder_or_by_one_of_its_adapters(adapter):
    adapter("a/adapter")
    adapter("a/checkpoints/checkpoint-20", rank=8, r=8)
    run_json(adapter("a"))
    assert read("--lora.from a").lora.rank == 4
    assert read("--lora.from a/checkpoints/checkpoint-20").lora.rank == 8


def test_the_second_run_uses_the_commit_of_the_first(adapter):
    adapter("a/adapter", base_model_name_or_path="owner/model")
    run_json(adapter("a"), "owner/model", revision="c" * 40)
    assert read("--lora.from a --model.name owner/model --plan").model.revision == "c" * 40
    with pytest.raises(UserError, match=r"--model\.revision is v2, but the adapter in a/adapter was trained on cccc"):
        read("--lora.from a --model.name owner/model --model.revision v2 --plan")


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_prompts_are_rendered_with_the_template_of_the_adapter(adapter, file):
    template = "{% set enable_thinking = enable_thinking | default(true) %}\nthinking: {{ enable_thinking }}"
    (adapter() / file).write_text(template if file.endswith("jinja") else json.dumps({"chat_template": template}))
    for flags, thinks in (("", True), ("--model.chat-template-kwargs enable_thinking=false", False)):
        config = read(f"--lora.from sft {flags}")
        tokenizer = base_model.load_tokenizer(config.model)
        assert prepare_tokenizer(tokenizer, config, start_folder(config)) == {"enable_thinking": thinks}
        assert chat.render(tokenizer, [{"role": "user", "content": "?"}]) == f"thinking: {thinks}"


MESSAGES = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}


def prepared(line, adapter=None):
    """Return the tokenizer of a run, and save it with the adapter."""
    config = read(line)
    tokenizer = base_model.load_tokenizer(config.model)
    prepare_tokenizer(tokenizer, config, start_folder(config))
    if adapter:
        tokenizer.save_pretrained(adapter)
    return tokenizer


def test_a_template_is_given_by_its_name_or_as_a_file_and_stays_with_the_adapter(adapter, tmp_path):
    sft, flag = adapter(), "--model.chat-template qwen2_5"
    tokenizer = prepared(flag, sft)
    text = chat.render(tokenizer, MESSAGES, [TOOL])
    assert "look_up" in text and "look_up" not in chat.render(prepared(""), MESSAGES, [TOOL])
    for line in ("--lora.from sft", f"--lora.from sft {flag}"):
        assert chat.render(prepared(line), MESSAGES, [TOOL]) == text
    (tmp_path / "custom.jinja").write_text(f"{tokenizer.chat_template}{{{{ my_word }}}}")
    line = "--model.chat-template custom.jinja"
    custom = prepared(f"{line} --model.chat-template-kwargs my_word=hello", sft)
    assert chat.render(custom, MESSAGES, [TOOL]) == f"{text}hello"
    assert chat.render(prepared(f"--lora.from sft {line}"), MESSAGES, [TOOL]) == f"{text}hello"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model.chat-template qwen25", "did you mean 'qwen2_5'"),
        ("--model.chat-template missing.jinja", "missing.jinja cannot be read"),
        ("--model.chat-template sft", "cannot be read"),
        ("--model.chat-template llama3", "ends an answer with none"),
        ("--model.chat-template other.jinja", r"ends an answer with <\|im_start\|>"),
        ("--model.chat-template broken.jinja", "ends an answer with none"),
        ("--lora.from sft --model.chat-template qwen2_5", "not the template of the adapter"),
    ],
)
def test_a_template_that_does_not_fit_is_refused_in_one_line(adapter, tmp_path, line, message):
    adapter()
    (tmp_path / "other.jinja").write_text("{% for message in messages %}{{ message.content }}<|im_start|>{% endfor %}")
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=message) as refusal:
        prepared(line)
    assert "\n" not in str(refusal.value)


WRONG_CONFIG = [
    ({"lora_alpha": 0.5}, "lora_alpha 0.5"),
    ({"rank_pattern": {"q_proj": 8}}, "sets rank_pattern, .*--model.name"),
    ({"modules_to_save": ["lm_head"], "bias": "all"}, "sets bias, modules_to_save"),
    ({"layers_to_transform": [0]}, "layers_to_transform"),
    ({"target_modules": None}, "target_modules"),
    ({"base_model_name_or_path": None}, "base_model_name_or_path to starter"),
    ({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}, "--model.name Qwen/Qwen3-0.6B"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_CONFIG)
def test_an_adapter_that_cannot_be_trained_is_refused(adapter, changes, message):
    adapter(**changes)
    refuses("--lora.from sft", message)


WRONG_FLAGS = [
    ("--lora.from missing", "missing/adapter_config.json does not exist"),
    ("--lora.from pickled", "pickled weights"),
    ("--lora.from unfinished", "unfinished/adapter/adapter_config.json does not exist"),
    ("--lora.from sft --lora.rank 8", "--lora.rank is 8, .* has 4"),
    ("--lora.from sft --lora.targets all-linear", "--lora.targets is .*all-linear.*, .* has .*q_proj.*v_proj"),
    ("--lora.from sft --lora.no-rslora", "--lora.rslora is False"),
    ("--lora.from sft --output-dir sft --overwrite", "is inside --output-dir"),
    ("--lora.from cut", "not a complete safetensors file"),
    ("--lora.from other-base", "was trained on starter, .* other weights"),
]


@pytest.mark.parametrize(("line", "message"), WRONG_FLAGS)
def test_a_wrong_start_is_refused_in_one_line(adapter, tmp_path, line, message):
    adapter()
    for name in ("pickled", "unfinished"):
        (tmp_path / name).mkdir()
    (tmp_path / "pickled" / "adapter_config.json").write_text("{}")
    run_json(tmp_path / "unfinished")
    weights = adapter("cut") / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    adapter("other-base/adapter")
    run_json(tmp_path / "other-base", fingerprint="0" * 64)
    refuses(line, message)


def refuses(line, message):
    with pytest.raises(UserError, match=message) as refusal:
        read(line)
    assert "\n" not in str(refusal.value)
