"""A merged model stops where its training stopped, and has the chat template that training rendered."""

import json
import shutil

import gguf
import pytest
import torch
from helpers.adapters import load, make_adapter
from helpers.gguf_models import CHATML, ZEPHYR, byte_level, save, wrapped
from transformers import AutoTokenizer, GenerationConfig

from lora_grpo.errors import UserError
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.merging import MergeOptions, merge, read_report
from lora_grpo.models import ModelFlags, completion_ends, resolve, stop_tokens, tokenizer_of
from lora_grpo.sampling import build

pytestmark = pytest.mark.usefixtures("no_divergence")

TEXT_END = "<|endoftext|>"
TURN_END = "<|im_end|>"
MORE = "<|end|>"
SPECIAL = (TEXT_END, "<|im_start|>", TURN_END, MORE)
# As in gpt-oss: another token ends an answer that is the last one.
HARMONY = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer_with(eos=TEXT_END, template=None, pad=TEXT_END):
    return wrapped(byte_level(special=SPECIAL), template, eos_token=eos, pad_token=pad)


def id_of(token):
    return tokenizer_with().convert_tokens_to_ids(token)


def ids_of(tokens):
    return {id_of(token) for token in tokens}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A base that answers with TURN_END at once, for ever, and an adapter without a tokenizer."""
    folder = save(tmp_path_factory.mktemp("bases") / "base", "Qwen2ForCausalLM", tokenizer_with())
    model = load(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1)
        model.lm_head.weight.fill_(-1)
        model.lm_head.weight[id_of(TURN_END)] = 1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.fill_(0)
            layer.mlp.down_proj.weight.fill_(0)
        model.model.norm.weight.fill_(1)
    model.save_pretrained(folder)
    return folder, make_adapter(folder, folder.with_name("adapter"), r=2, target_modules=["q_proj"])


@pytest.fixture
def base(bases, tmp_path):
    return shutil.copytree(bases[0], tmp_path / "base")


@pytest.fixture
def adapter(bases, tmp_path):
    return shutil.copytree(bases[1], tmp_path / "adapter")


def set_json(path, **values):
    """Write the values into a JSON file that may exist; None removes one."""
    settings = json.loads(path.read_text()) if path.is_file() else {}
    settings = {name: value for name, value in (settings | values).items() if value is not None}
    path.write_text(json.dumps(settings))


def merged(base, adapter):
    return merge(MergeOptions(str(adapter), base=str(base), dtype="fp32"))


def new_tokens(folder):
    """Return the tokens that transformers writes after a prompt, of at most 20."""
    inputs = AutoTokenizer.from_pretrained(folder)("Hello", return_tensors="pt")
    output = load(folder).generate(**inputs, max_new_tokens=20, do_sample=False)[0]
    prompt_tokens = inputs["input_ids"].shape[1]
    return output[prompt_tokens:].tolist()


def with_ids(values):
    """Return the values of a generation config with the ids of the tokens that it names."""
    settings = dict(values)
    if "eos_token_id" in values:
        settings["eos_token_id"] = [id_of(token) for token in values["eos_token_id"]]
    if values.get("pad_token_id") == TEXT_END:
        settings["pad_token_id"] = id_of(TEXT_END)
    return settings


STOPS = {
    # The base's generation_config.json, the adapter's EOS token and chat template, and the merged model's EOS tokens.
    "the adapter's tokenizer ends elsewhere": ({"eos_token_id": [TEXT_END]}, TURN_END, CHATML, (TEXT_END, TURN_END)),
    "only its chat template does": ({"eos_token_id": [TEXT_END]}, TEXT_END, CHATML, (TEXT_END, TURN_END)),
    "a list that has one": ({"eos_token_id": [TEXT_END, MORE]}, TURN_END, CHATML, (TEXT_END, MORE, TURN_END)),
    "no generation config": (None, TURN_END, CHATML, (TEXT_END, TURN_END)),
    "a generation config without one": ({"temperature": 0.7}, TURN_END, CHATML, (TURN_END,)),
    "an adapter without a chat template": ({"eos_token_id": [TEXT_END]}, TURN_END, None, (TEXT_END, TURN_END)),
    "thoughts that end in another token": ({"eos_token_id": [TURN_END]}, TURN_END, HARMONY, (TURN_END,)),
}


@pytest.mark.parametrize(("declared", "eos", "template", "expected"), STOPS.values(), ids=STOPS)
def test_a_merged_model_stops_at_every_token_that_ended_completions(base, adapter, declared, eos, template, expected):
    (base / "generation_config.json").unlink()
    if declared is not None:
        set_json(base / "generation_config.json", **with_ids(declared))
    tokenizer_with(eos, template).save_pretrained(adapter)
    folder = merged(base, adapter)
    assert set(stop_tokens.as_ids(GenerationConfig.from_pretrained(folder).eos_token_id)) == ids_of(expected)
    assert new_tokens(folder) == [id_of(TURN_END)]
    # An evaluation of the adapter ends where the merged model does.
    spec = resolve(str(adapter), ModelFlags(base=str(base)))
    assert set(completion_ends(spec, tokenizer_of(spec))) == ids_of(expected)


def test_config_json_does_not_decide_if_there_is_a_generation_config(base, adapter):
    set_json(base / "config.json", eos_token_id=id_of(MORE))
    set_json(base / "generation_config.json", eos_token_id=id_of(TEXT_END))
    tokenizer_with(TURN_END, CHATML).save_pretrained(adapter)
    settings = json.loads((merged(base, adapter) / "generation_config.json").read_text())
    assert set(settings["eos_token_id"]) == ids_of([TEXT_END, TURN_END])


BOTH_ENDS = [TURN_END, TEXT_END]
GENERATION_CONFIGS = {
    # The base's generation_config.json, and what the merged model's has instead.
    "all is there": (
        {"eos_token_id": BOTH_ENDS, "pad_token_id": 0, "temperature": 0.7, "repetition_penalty": 1.1},
        {},
    ),
    "no padding": ({"eos_token_id": BOTH_ENDS, "temperature": 0.7}, {"pad_token_id": TEXT_END}),
    "a wrong padding": ({"eos_token_id": BOTH_ENDS, "pad_token_id": -1}, {"pad_token_id": TEXT_END}),
    "no end of a turn": (
        {"eos_token_id": [TEXT_END], "pad_token_id": 0, "top_k": 20},
        {"eos_token_id": [TEXT_END, TURN_END]},
    ),
}


@pytest.mark.parametrize(("settings", "changed"), GENERATION_CONFIGS.values(), ids=GENERATION_CONFIGS)
def test_only_what_must_change_in_the_generation_config_does(base, adapter, settings, changed):
    """An unchanged file is the base's to the byte, also if its form is unusual."""
    before = json.dumps(with_ids(settings), indent=7)
    (base / "generation_config.json").write_text(before)
    tokenizer_with(TURN_END, CHATML).save_pretrained(adapter)
    after = (merged(base, adapter) / "generation_config.json").read_text()
    assert json.loads(after) == with_ids(settings | changed)
    assert (after == before) == (not changed)


def test_a_base_whose_config_says_it_all_gets_no_generation_config(base, adapter):
    (base / "generation_config.json").unlink()
    set_json(base / "config.json", eos_token_id=id_of(TURN_END))
    tokenizer_with(TURN_END, CHATML).save_pretrained(adapter)
    folder = merged(base, adapter)
    assert not (folder / "generation_config.json").exists()
    assert new_tokens(folder) == [id_of(TURN_END)]


def test_a_damaged_generation_config_is_refused_before_a_merge(base, adapter):
    (base / "generation_config.json").write_text("{")
    tokenizer_with(TURN_END, CHATML).save_pretrained(adapter)
    with pytest.raises(UserError):
        merged(base, adapter)
    assert not adapter.with_name("adapter-merged").exists()


@pytest.mark.parametrize("eos", [TURN_END, TEXT_END])
def test_a_gguf_file_ends_where_the_merged_model_does(base, adapter, eos):
    set_json(base / "generation_config.json", eos_token_id=id_of(TEXT_END))
    tokenizer_with(eos, CHATML).save_pretrained(adapter)
    export(ExportOptions(merged(base, adapter), type=("f32",), modelfile=True))
    [path] = adapter.parent.glob("adapter-merged-gguf/*.gguf")
    header = gguf.GGUFReader(path)
    token_ids = {}
    for name in ("eos", "eot", "eom", "padding"):
        field = header.get_field(f"tokenizer.ggml.{name}_token_id")
        if field:
            token_ids[name] = field.contents()
    assert token_ids["eos"] == id_of(eos)
    assert token_ids["eot"] == id_of(TURN_END)
    assert token_ids.pop("padding") == id_of(TEXT_END)
    assert set(token_ids.values()) == ids_of([TEXT_END, TURN_END])
    stops = json.loads((path.parent / "params").read_text())["stop"]
    assert {*stops} == {TEXT_END, TURN_END}


# The chat template

TEMPLATES = {
    # The base's template, the adapter's tokenizer and template, where the merged model's is from, and its text.
    "of the adapter": (CHATML, True, ZEPHYR, "adapter", ZEPHYR),
    "of the base, for a tokenizer without one": (CHATML, True, None, "base", CHATML),
    "of the base, for an adapter without a tokenizer": (CHATML, False, None, "base", CHATML),
    "a lone file of the adapter": (CHATML, False, ZEPHYR, "adapter", ZEPHYR),
    "a lone file, and a base without one": (None, False, ZEPHYR, "adapter", ZEPHYR),
    "none": (None, True, None, None, None),
}


@pytest.mark.parametrize("is_in_config", [False, True], ids=["jinja files", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("of_base", "has_tokenizer", "of_adapter", "origin", "expected"), TEMPLATES.values(), ids=TEMPLATES
)
def test_the_merged_model_has_the_chat_template_of_training(
    base, adapter, capsys, of_base, has_tokenizer, of_adapter, origin, expected, is_in_config
):
    (base / "generation_config.json").unlink()
    tokenizer_with(TURN_END, of_base).save_pretrained(base, save_jinja_files=not is_in_config)
    if has_tokenizer:
        tokenizer_with(TURN_END, of_adapter).save_pretrained(adapter)
    elif of_adapter:
        (adapter / "chat_template.jinja").write_text(of_adapter)
    folder = merged(base, adapter)
    assert AutoTokenizer.from_pretrained(folder).chat_template == expected
    assert read_report(folder).chat_template == origin
    assert ("template  " in capsys.readouterr().out) == (origin != "adapter")
    # Chat and evaluations of the adapter render the same.
    assert build.load_tokenizer(resolve(str(adapter), ModelFlags(base=str(base)))).chat_template == expected


def test_a_run_trained_without_a_template_stays_without_one(base, adapter, tmp_path):
    """The base got its template after the training."""
    tokenizer_with(TURN_END, None).save_pretrained(adapter)
    tokenizer_with(TURN_END, CHATML).save_pretrained(base)
    run = tmp_path / "run"
    run.mkdir()
    shutil.move(adapter, run / "adapter")
    policy = {"fingerprint": None, "revision": None}
    model = {"name": str(base), "bits": 16, "trust_remote_code": False}
    record = {"lora_grpo_run": 1, "config": {"model": model}, "data": {}, "versions": {}, "policy": policy}
    (run / "run.json").write_text(json.dumps(record))
    folder = merge(MergeOptions(str(run), dtype="fp32"))
    assert AutoTokenizer.from_pretrained(folder).chat_template is None


def test_other_templates_come_along_and_change_the_identity_of_a_tokenizer(base, adapter):
    templates = {"default": ZEPHYR, "tool_use": CHATML}
    tokenizer_with(TURN_END, templates).save_pretrained(adapter)
    assert (adapter / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert AutoTokenizer.from_pretrained(merged(base, adapter)).chat_template == templates

    (adapter / "tokenizer.json").unlink()
    spec = resolve(str(adapter), ModelFlags(base=str(base)))
    assert tokenizer_of(spec).chat_template == templates
    before = spec.identity["tokenizer_sha256"]
    (adapter / "chat_template.jinja").write_text(CHATML)
    assert resolve(str(adapter), ModelFlags(base=str(base))).identity["tokenizer_sha256"] != before


def test_a_tokenizer_model_alone_is_no_tokenizer(base, adapter):
    """transformers needs tokenizer_config.json to load it."""
    (adapter / "tokenizer.model").write_bytes(b"pieces")
    folder = merged(base, adapter)
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (folder / "tokenizer.model").exists()
