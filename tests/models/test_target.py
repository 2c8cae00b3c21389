"""Names resolve to model specs, using only files."""

import json
import shutil

import pytest
from helpers.made_runs import make_adapter, make_run

from lora_grpo import starter
from lora_grpo.errors import UserError
from lora_grpo.models import model_files
from lora_grpo.models.target import ModelFlags, resolve


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(starter.model_path(), tmp_path / "model")


def test_a_run_resolves_to_its_base_precision_and_adapter(tmp_path):
    run = make_run(tmp_path / "run", model_files.weights_fingerprint(starter.model_path()))
    target = resolve(str(run), ModelFlags())
    assert (target.label, target.base_name, target.base.bits) == ("trained", "starter", 4)
    assert target.adapter == run / "adapter" and target.run["config"]["seed"] == 0
    base = target.without_adapter()
    assert (base.label, base.adapter, base.base) == ("base", None, target.base)
    assert base.identity["adapter_sha256"] is None and target.identity["adapter_sha256"]
    assert resolve(str(run), ModelFlags(), bits=16).base.bits == 16


@pytest.mark.parametrize("name", ["adapter", "checkpoints/checkpoint-2"])
def test_an_adapter_or_checkpoint_resolves_to_its_run(name, tmp_path):
    run = make_run(tmp_path / "run")
    if name != "adapter":
        make_adapter(run / name, alpha=8)
    target = resolve(str(run / name), ModelFlags())
    assert target.adapter == run / name and target.base.bits == 4 and target.run


def test_an_adapter_names_its_base_or_gets_it_by_flag(tmp_path, model):
    adapter = make_adapter(tmp_path / "adapter", base=str(model))
    assert resolve(str(adapter), ModelFlags()).base.name == str(model)
    nameless = make_adapter(tmp_path / "nameless", base=None)
    with pytest.raises(UserError, match="--base"):
        resolve(str(nameless), ModelFlags())
    assert resolve(str(nameless), ModelFlags(base="starter")).base_name == "starter"
    moved = make_adapter(tmp_path / "moved", base="/mnt/old/base")
    with pytest.raises(UserError, match=r"/mnt/old/base, .*--base"):
        resolve(str(moved), ModelFlags())
    assert resolve(str(moved), ModelFlags(base="starter")).base_name == "starter"
    with pytest.raises(UserError, match="--base starter needs an adapter"):
        resolve(str(model), ModelFlags(base="starter"))


def test_the_tokenizer_that_was_saved_with_the_adapter_is_used(tmp_path):
    run = make_run(tmp_path / "run")
    assert resolve(str(run), ModelFlags()).tokenizer == starter.model_path()
    (run / "adapter" / "tokenizer_config.json").write_text("{}")  # not a tokenizer without a vocabulary
    assert resolve(str(run), ModelFlags()).tokenizer == starter.model_path()
    (run / "adapter" / "tokenizer.json").write_text("{}")
    assert resolve(str(run), ModelFlags()).tokenizer == run / "adapter"


def test_a_base_that_changed_since_the_run_is_refused(tmp_path, model):
    run = make_run(tmp_path / "run", model_files.weights_fingerprint(model), str(model))
    resolve(str(run), ModelFlags())
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(bytes(weights))
    with pytest.raises(UserError, match=r"is not the base that the run in .* was trained on"):
        resolve(str(run), ModelFlags())


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "does not exist; "),
        ({}, "has no run.json, adapter_config.json or config.json"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "pickled weights are not loaded"),
        ({"adapter_config.json": "{}", "adapter_model.bin": ""}, "pickled weights are not loaded"),
        ({"adapter_config.json": "[", "adapter_model.safetensors": ""}, r"adapter_config\.json cannot be read"),
    ],
)
def test_a_folder_without_a_model_is_refused(files, says, tmp_path):
    folder = tmp_path / "folder"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(UserError, match=says):
        resolve(str(folder), ModelFlags())


def test_a_hub_id_resolves_to_one_commit_or_is_refused_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="owner/absent is not a folder and cannot be loaded from the Hub") as caught:
        resolve("owner/absent", ModelFlags())
    assert "\n" not in str(caught.value)

    import huggingface_hub

    snapshot = shutil.copytree(starter.model_path(), tmp_path / "0a1b2c")
    requested = []

    def download(name, revision, allow_patterns, ignore_patterns, local_files_only):
        requested.append((name, revision))
        loaded = ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "config.json"]
        others = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"]
        names = [*loaded, *others, "pytorch_model.bin"]
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        assert list(huggingface_hub.utils.filter_repo_objects(names, **patterns)) == loaded
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    target = resolve("owner/model", ModelFlags(revision="main"))
    assert requested == [("owner/model", "main")]
    assert (target.identity["model"], target.identity["revision"]) == ("owner/model", "0a1b2c")
    assert target.identity["weights_sha256"] is None  # the commit identifies the weights


def test_code_of_the_base_runs_only_with_a_flag_given_now(tmp_path, model):
    run = make_run(tmp_path / "run", model_files.weights_fingerprint(model), str(model))
    record = json.loads((run / "run.json").read_text())
    record["config"]["model"]["trust_remote_code"] = True
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"run/run.json would run Python code .*pass --trust-remote-code"):
        resolve(str(run), ModelFlags())
    assert resolve(str(run), ModelFlags(trust_remote_code=True)).base.trust_remote_code
    assert not resolve(str(model), ModelFlags()).base.trust_remote_code
