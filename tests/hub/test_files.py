"""Only known files are uploaded, and their settings have no paths of this machine."""

import json
import shutil

import pytest
from helpers.pushed_runs import make_merged, make_run

from lora_grpo.errors import UserError
from lora_grpo.hub.files import collect, find_model


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(make_run(tmp_path / "of") / "adapter", folder)
    (folder / "manifest.json").unlink()
    return folder


def names_in(folder, kind="adapter"):
    return [file.name for file in collect(folder, kind, None)[0]]


def test_only_files_of_known_names_are_uploaded(adapter):
    for name in ("LICENSE", "NOTICE.md", "LICENSE.py", "LICENSE-key.env", ".lock", "manifest.json", "README.md"):
        (adapter / name).write_text("{}")
    for name in ("trainer_state.json", "secrets.json", "deeper/config.json", "training_args.bin"):
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text("{}")
    (adapter / "manifest.json").unlink()
    files, skipped = collect(adapter, "adapter", None)
    assert [file.name for file in files] == [
        "LICENSE", "NOTICE.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert skipped == [
        "LICENSE-key.env",
        "LICENSE.py",
        "deeper/config.json",
        "secrets.json",
        "trainer_state.json",
        "training_args.bin",
    ]


def test_the_code_that_settings_name_is_uploaded(tmp_path):
    merged = make_merged(make_run(tmp_path / "run"))
    auto_map = {"AutoConfig": "own_config.C", "AutoModelForCausalLM": "own_model.M", "AutoModel": "o/n--elsewhere.M"}
    (merged / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    tokenizer_map = {"AutoTokenizer": ["own_tokenizer.T", None]}
    (merged / "tokenizer_config.json").write_text(json.dumps({"auto_map": tokenizer_map}))
    code = {
        "own_config": "import torch\n",
        "own_model": "import secret\nfrom .own_config import C\nfrom .own_layers import L\n",
        "own_layers": "from .own_config import C\n",
        "own_tokenizer": "from .missing import T\n",
        "elsewhere": "",
        "secret": "",
    }
    for name, text in code.items():
        (merged / f"{name}.py").write_text(text)
    files, skipped = collect(merged, "merged", None)
    names = [file.name for file in files if file.name.endswith(".py")]
    assert names == ["own_config.py", "own_layers.py", "own_model.py", "own_tokenizer.py"]
    assert skipped == ["elsewhere.py", "merge_report.json", "secret.py"]


def test_a_link_to_outside_the_folder_is_refused(tmp_path, adapter):
    (tmp_path / "private.json").write_text("{}")
    (adapter / "vocab.json").symlink_to(tmp_path / "private.json")
    with pytest.raises(UserError, match="links to outside"):
        names_in(adapter)
    (adapter / "vocab.json").unlink()
    (adapter / "vocab.json").symlink_to("tokenizer.json")
    assert "vocab.json" in names_in(adapter)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "adapter").symlink_to(adapter)
    with pytest.raises(UserError, match="links to outside"):
        names_in(tmp_path / "run" / "adapter")


def test_a_link_that_the_user_has_named_is_followed(tmp_path, adapter, monkeypatch):
    (tmp_path / "best model").symlink_to(adapter)
    folder, kind = find_model(str(tmp_path / "best model"), None)
    assert names_in(folder, kind) == names_in(adapter)
    (adapter / "deeper").mkdir()
    monkeypatch.chdir(adapter / "deeper")
    folder, kind = find_model("..", None)
    assert names_in(folder, kind) == names_in(adapter)


def uploaded(folder, name, base="owner/base"):
    """Return a file as it is uploaded."""
    kind = "adapter" if (folder / "adapter_config.json").is_file() else "merged"
    return next(file for file in collect(folder, kind, base)[0] if file.name == name).read()


LOOK_LIKE_PATHS = {
    "eos_token": "/nothink", "pad_token": {"content": "~~", "special": True}, "unk_token": "./x", "bos_token": "/",
    "additional_special_tokens": ["/think", "../up", "~", r"\\server"], "chat_template": "/{{ messages }}/",
    "extra_special_tokens": {"image_token": "/img"}, "model_input_names": ["/a/b"], "added_tokens_decoder": {
        "0": {"content": "/nothink"}, "1": {"content": "C:/"},
    },
}  # fmt: skip


@pytest.mark.parametrize("extra", [{}, {"name_or_path": "/data/models/x"}], ids=["nothing to change", "a path too"])
def test_text_that_looks_like_a_path_is_uploaded_as_it_is(adapter, extra):
    text = json.dumps(LOOK_LIKE_PATHS | {"unk_token": "./é"} | extra, indent=5, ensure_ascii=False)
    (adapter / "tokenizer_config.json").write_text(text)
    public_text = uploaded(adapter, "tokenizer_config.json").decode()
    assert json.loads(public_text) == LOOK_LIKE_PATHS | {"unk_token": "./é"}
    assert (public_text == text) == (not extra) and "é" in public_text
    for name in ("special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text('{"eos_token": "/nothink", "name": "~~"}')
        assert uploaded(adapter, name) == (adapter / name).read_bytes()


PATHS = {
    "base_model_name_or_path": ("owner/base", "owner/base"),
    "target_modules": (r"/.*\.(q|v)_proj", r"/.*\.(q|v)_proj"),
    "exclude_modules": (r"~.*\b(vision)\..*", r"~.*\b(vision)\..*"),
    "vocab_file": ("/data/x/vocab.txt", "vocab.txt"),
    "tokenizer_file": (r"C:\Users\me\tokenizer.json", "tokenizer.json"),
    "special_tokens_map_file": (r"models\x\special.json", "special.json"),
    "cache_dir": ("~/cache", "cache"),
    "nested": ({"_name_or_path": "/data/x", "teacher_path": "../t"}, {"teacher_path": "t"}),
    "relative_file": ("vocab.txt", "vocab.txt"),
    "path": ("/data/x", "x"),
    "paths": (["/data/x", r"D:\y", "z"], ["x", "y", "z"]),
    "local_files": ({"train": ["~/a.json"], "url": "https://a/b"}, {"train": ["a.json"], "url": "https://a/b"}),
    "directory": ("/data/x", "x"),
    "output": ("/home/alice/out", "out"),
    "trained_on": (r"C:\Users\alice\rows.json", "rows.json"),
    "auto_map": (
        {
            "AutoConfig": "/home/alice/code--config.C",
            "AutoTokenizer": ["./code--t.T", None],
            "A": "o/n--m.M",
            "B": "m.M",
        },
        {"AutoConfig": "config.C", "AutoTokenizer": ["t.T", None], "A": "o/n--m.M", "B": "m.M"},
    ),
    "pathology": ("/nothing", "/nothing"),
    "extra_special_tokens": (["/usr/bin", "~/", "/home/alice"], ["/usr/bin", "~/", "/home/alice"]),
    "image_token": ("/etc/hosts", "/etc/hosts"),
    "pattern": ("/etc/hosts", "/etc/hosts"),
}


def test_only_settings_that_hold_paths_are_changed(adapter, tmp_path):
    before = json.loads((adapter / "adapter_config.json").read_text())
    here = tmp_path / "data"
    here.mkdir()
    values = {name: value for name, (value, _) in PATHS.items()} | {"teacher": str(here), "long": "/a/" + "b" * 9999}
    (adapter / "adapter_config.json").write_text(json.dumps(before | values))
    expected = {name: value for name, (_, value) in PATHS.items()} | {"teacher": "data", "long": "/a/" + "b" * 9999}
    assert json.loads(uploaded(adapter, "adapter_config.json")) == before | expected
    (adapter / "preprocessor_config.json").write_text('{"_name_or_path": "/data/x", "size": 3}')
    assert json.loads(uploaded(adapter, "preprocessor_config.json")) == {"size": 3}


@pytest.mark.parametrize("name", ["owner/base", "gpt2", ""])
def test_the_hub_id_that_a_model_was_loaded_from_is_kept(adapter, name):
    text = json.dumps({"_name_or_path": name, "text_config": {"name_or_path": name}}, indent=7)
    (adapter / "tokenizer_config.json").write_text(text)
    assert uploaded(adapter, "tokenizer_config.json").decode() == text


@pytest.mark.parametrize("name", ["/data/base", "./base", "~/base", r"C:\base", "a/b/c", "models/base"])
def test_the_folder_that_a_model_was_loaded_from_is_left_out(adapter, tmp_path, monkeypatch, name):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    (adapter / "tokenizer_config.json").write_text(json.dumps({"_name_or_path": name, "size": 1}))
    assert json.loads(uploaded(adapter, "tokenizer_config.json")) == {"size": 1}


def test_settings_with_a_lone_surrogate_are_uploaded(adapter):
    text = '{"eos_token": "\\ud800", "pad_token": "é", "vocab_file": "/data/x/vocab.txt"}'
    (adapter / "tokenizer_config.json").write_text(text, encoding="utf-8")
    public_text = uploaded(adapter, "tokenizer_config.json").decode()
    assert json.loads(public_text) == {"eos_token": "\ud800", "pad_token": "é", "vocab_file": "vocab.txt"}
    assert "é" in public_text


def test_the_path_of_an_adapters_base_is_replaced_by_its_name(adapter):
    config = adapter / "adapter_config.json"
    before = config.read_bytes()
    assert json.loads(uploaded(adapter, "adapter_config.json"))["base_model_name_or_path"] == "owner/base"
    assert config.read_bytes() == before
