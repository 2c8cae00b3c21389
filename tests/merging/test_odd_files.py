"""Files of a base or an adapter with odd values: one line, exit code 2, and nothing written."""

import json
import shutil
import sys

import pytest
from helpers.adapters import make_adapter
from helpers.damage import content, outcome
from helpers.gguf_models import CHATML, byte_level, save, wrapped
from safetensors.numpy import load_file, save_file

from lora_grpo.cli import verbs
from lora_grpo.config import RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.hub.push import prepare
from lora_grpo.merging import MergeOptions, merge
from lora_grpo.models import ModelFlags, resolve, tokenizer_of
from lora_grpo.models.start_adapter import prepare_tokenizer
from lora_grpo.sampling import build

pytestmark = pytest.mark.usefixtures("no_divergence")

TEXT_END = "<|endoftext|>"
TURN_END = "<|im_end|>"
DEMANDING = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}" + CHATML


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder of a base with a tokenizer, and an adapter without one."""
    folder = tmp_path_factory.mktemp("originals")
    tokenizer = wrapped(byte_level(), CHATML, eos_token=TEXT_END, pad_token=TEXT_END)
    save(folder / "base", "Qwen2ForCausalLM", tokenizer)
    make_adapter(folder / "base", folder / "adapter", r=2, target_modules=["q_proj"])
    return folder


@pytest.fixture
def base(originals, tmp_path):
    return shutil.copytree(originals / "base", tmp_path / "base")


@pytest.fixture
def adapter(originals, base, tmp_path):
    folder = shutil.copytree(originals / "adapter", tmp_path / "adapter")
    change_json(folder / "adapter_config.json", base_model_name_or_path=str(base))
    return folder


def change_json(path, **values):
    """Write values into a JSON file that may not exist yet."""
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(settings | values))


def sampler(folder):
    spec = resolve(str(folder), ModelFlags())
    build.load_sampler(spec, "transformers", tokenizer_of(spec), 64, seed=0)


def commands(base, adapter):
    """The commands that read a base and its adapter."""
    return {
        "merge": lambda: merge(MergeOptions(str(adapter), dtype="fp32")),
        "evaluate": lambda: sampler(adapter),
        "evaluate the base": lambda: sampler(base),
        "chat": lambda: sys.exit(verbs.run_front_door(["chat", str(adapter), "--max-completion-tokens", "2", "a"])),
        "export": lambda: export(
            ExportOptions(base, type=("f32",), modelfile=True, output_dir=base.with_name("exported"))
        ),
        "push": lambda: prepare(base, "merged", "me/x"),
    }


def check_refused(main, folder, *parts):
    """Run a command. It ends in one line with these parts, and writes nothing into the folder."""
    files_before = files(folder)
    code, errors = outcome(main)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert (code, len(lines)) == (2, 1), f"{code}, {errors}"
    assert all(part in lines[0] for part in parts), lines[0]
    assert files(folder) == files_before


def files(folder):
    """Return the bytes of every file; `content` has None for a folder."""
    return {path: data for path, data in content(folder).items() if data is not None}


# Ids of tokens

ODD_EOS_IDS = ["2", TURN_END, [[2]], {"a": 2}, -1, 403, 10**12, 2.0, True, [2, None], [True], [2, 403]]
ODD_PAD_IDS = ["2", [2], {"a": 2}, -2, 403, 2.0, True]
ODD_FIELDS = [("eos_token_id", value) for value in ODD_EOS_IDS] + [("pad_token_id", value) for value in ODD_PAD_IDS]


@pytest.mark.parametrize(("field", "value"), ODD_FIELDS)
def test_what_is_not_the_id_of_a_token_is_refused(base, adapter, tmp_path, field, value):
    path = base / "generation_config.json"
    path.write_text(json.dumps({field: value}))
    for main in commands(base, adapter).values():
        check_refused(main, tmp_path, str(path), field, repr(value))
    (base / "tokenizer.json").unlink()
    check_refused(commands(base, adapter)["merge"], tmp_path, str(path), field, repr(value))


@pytest.mark.parametrize(("field", "value"), [("eos_token_id", 403), ("eos_token_id", "2"), ("pad_token_id", True)])
def test_ids_that_only_config_json_declares_are_checked_too(base, adapter, tmp_path, field, value):
    (base / "generation_config.json").unlink()
    change_json(base / "config.json", **{field: value})
    for main in commands(base, adapter).values():
        check_refused(main, tmp_path, str(base), field, repr(value))


@pytest.mark.parametrize("value", [-1, 403, "2"])
def test_a_bos_token_without_an_embedding_is_not_exported(base, adapter, tmp_path, value):
    change_json(base / "config.json", bos_token_id=value)
    check_refused(commands(base, adapter)["export"], tmp_path, str(base), "bos_token_id", repr(value))


def test_an_end_without_a_token_has_a_name_in_errors(base, tmp_path):
    """An embedding may have rows without a token."""
    change_json(base / "generation_config.json", eos_token_id=[0, 402])
    config = replace(RunConfig(), {"model": {"name": str(base), "chat_template": "llama3"}})
    tokenizer = tokenizer_of(resolve(str(base), ModelFlags()))
    with pytest.raises(UserError, match="token 402"):
        prepare_tokenizer(tokenizer, config, None)


# Ends of a completion


@pytest.mark.parametrize(
    ("template", "expected"), [(CHATML, TURN_END), (DEMANDING, TURN_END), (None, None)], ids=["plain", "system", "none"]
)
def test_the_end_of_the_template_is_the_end_if_no_other_is_declared(tmp_path, capsys, template, expected):
    # transformers gives the tokenizer of a Qwen an end that its files do not declare.
    base = save(tmp_path / "base", "LlamaForCausalLM", wrapped(byte_level(), template), eos_token_id=None)
    adapter = make_adapter(base, tmp_path / "adapter", r=2, target_modules=["q_proj"])
    (base / "generation_config.json").unlink(missing_ok=True)
    capsys.readouterr()
    folder = merge(MergeOptions(str(adapter), dtype="fp32"))
    path = folder / "generation_config.json"
    if expected is None:  # a model that never ends has a note
        assert not path.exists()
        assert "note: " in capsys.readouterr().err
    else:
        end = wrapped(byte_level()).convert_tokens_to_ids(expected)
        assert json.loads(path.read_text())["eos_token_id"] == end
        sampler(adapter)  # its tokenizer needs a padding token
        assert "note: " not in capsys.readouterr().err


@pytest.mark.parametrize("template", [CHATML, DEMANDING], ids=["plain", "system"])
def test_a_template_that_demands_a_system_message_ends_and_is_exported(base, adapter, template):
    wrapped(byte_level(), template, eos_token=TEXT_END, pad_token=TEXT_END).save_pretrained(base)
    merged = merge(MergeOptions(str(adapter), dtype="fp32"))
    ends = wrapped(byte_level()).convert_tokens_to_ids([TEXT_END, TURN_END])
    assert json.loads((merged / "generation_config.json").read_text())["eos_token_id"] == ends
    export(ExportOptions(merged, type=("f32",), modelfile=True))
    params = json.loads((merged.with_name(f"{merged.name}-gguf") / "params").read_text())
    assert {*params["stop"]} == {TEXT_END, TURN_END}


# Sampling settings

SETTINGS = [("temperature", "0.3"), ("temperature", True), ("top_p", [1]), ("top_p", 1e39), ("top_k", 2.5)]
SETTINGS += [("top_k", 2**31), ("top_k", "20"), ("mirostat", "1"), ("sequence", 5)]


@pytest.mark.parametrize(("field", "value"), SETTINGS)
def test_a_sampling_setting_that_a_gguf_file_cannot_have_is_refused(base, adapter, tmp_path, field, value):
    path = base / "generation_config.json"
    change_json(path, **{field: value})
    check_refused(commands(base, adapter)["export"], tmp_path, str(path), field, repr(value))


@pytest.mark.parametrize("line", ["license: 5", "license: {a: 1}", "license_link: [1]", "tags: [a, [b]]", "author: 5"])
def test_a_model_card_with_a_value_that_a_gguf_file_cannot_have_is_refused(base, adapter, tmp_path, line):
    path = base / "README.md"
    path.write_text(f"---\n{line}\n---\n")
    check_refused(commands(base, adapter)["export"], tmp_path, str(path))


# Adapters

EXPRESSIONS = [
    ("rank_pattern", {"(": 4}),
    ("alpha_pattern", {"[": 4}),
    ("target_modules", "*_proj"),
    ("exclude_modules", "(?P<"),
    ("layers_pattern", ["layers", "("]),
]


@pytest.mark.parametrize(("field", "value"), EXPRESSIONS)
def test_a_text_that_is_no_regular_expression_is_refused(base, adapter, tmp_path, field, value):
    change_json(adapter / "adapter_config.json", **{field: value})
    mains = commands(base, adapter)
    for command in ("merge", "evaluate", "chat"):
        check_refused(mains[command], tmp_path, str(adapter / "adapter_config.json"), field)


@pytest.mark.parametrize("kind", ["no tensors", "copies of the base's weights"])
def test_an_adapter_that_changes_nothing_is_refused(base, adapter, tmp_path, kind):
    path = adapter / "adapter_model.safetensors"
    name = "model.embed_tokens"
    tensors = {}
    if kind != "no tensors":
        weight = load_file(base / "model.safetensors")[f"{name}.weight"]
        tensors = {f"base_model.model.{name}.base_layer.weight": weight}
    save_file(tensors, path)
    mains = commands(base, adapter)
    for command in ("merge", "evaluate", "chat"):
        check_refused(mains[command], tmp_path, str(adapter))


# Chat templates


@pytest.mark.parametrize("saved", [{"a": 1}, 5, True, [{"name": "default"}], [{"template": "a"}], ["a"], [[]]])
def test_a_chat_template_that_is_no_text_is_refused(base, adapter, tmp_path, saved):
    for folder in (base, adapter):
        (base / "chat_template.jinja").unlink(missing_ok=True)
        path = folder / "tokenizer_config.json"
        before = path.read_bytes() if path.is_file() else b"{}"
        change_json(path, chat_template=saved)
        mains = commands(base, adapter)
        for command in ("merge", "evaluate", "chat"):
            check_refused(mains[command], tmp_path, str(path), "chat_template")
        path.write_bytes(before)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_chat_template_that_is_not_utf_8_is_refused(base, adapter, tmp_path, name):
    path = adapter / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\xff\xfe")
    mains = commands(base, adapter)
    for command in ("merge", "evaluate", "chat"):
        check_refused(mains[command], tmp_path, str(path))
