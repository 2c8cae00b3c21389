"""A policy whose base is a commit in the Hub cache, with either engine. Unsloth itself runs only on a GPU."""

import json
import shutil
import sys
from types import SimpleNamespace

import peft
import pytest
import transformers
from helpers.made_runs import make_adapter, make_run
from huggingface_hub import constants

from lora_grpo import starter
from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.models import ModelFlags, load_policy, resolve, save_adapter, unsloth_policy

NAME, OLD, NEW = "owner/tiny", "0" * 39 + "1", "0" * 39 + "2"
ENDS = json.loads((starter.model_path() / "generation_config.json").read_text())["eos_token_id"]


class UnslothWithVllm:
    """Loads as Unsloth does if vLLM samples: the branch `main` of a Hub id, and a model rebuilt from config.json."""

    asked = None

    @classmethod
    def from_pretrained(cls, model_name, **options):
        cls.asked = model_name
        model = transformers.AutoModelForCausalLM.from_pretrained(model_name)
        model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
        model.vllm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=options["max_seq_length"]))
        return model, transformers.AutoTokenizer.from_pretrained(model_name)

    @staticmethod
    def get_peft_model(model, target_modules, r, **options):
        model = peft.get_peft_model(model, peft.LoraConfig(r=r, target_modules=target_modules, task_type="CAUSAL_LM"))
        model.load_lora = lambda folder, load_tensors: model.peft_config["default"].save_pretrained(folder)
        return model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hub cache with two commits of the bundled model. The old one, tagged v1, has one more end token."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--tiny"
    for name, commit in {"main": NEW, "v1": OLD}.items():
        snapshot = repository / "snapshots" / commit
        shutil.copytree(starter.model_path(), snapshot)
        settings = json.loads((snapshot / "config.json").read_text()) | {"commit": commit}
        (snapshot / "config.json").write_text(json.dumps(settings))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    ends = json.dumps({"eos_token_id": [ENDS, 1]})
    (repository / "snapshots" / OLD / "generation_config.json").write_text(ends)
    return repository / "snapshots"


@pytest.fixture(params=["peft", "unsloth"])
def load(request, cache, tmp_path, monkeypatch):
    """Return a function that loads a revision of the base with an engine, in an otherwise empty working directory."""
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=UnslothWithVllm))
    monkeypatch.setattr(unsloth_policy, "import_unsloth", lambda: None)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def of_revision(revision):
        model = ModelConfig(NAME, revision, request.param, bits=16)
        return load_policy(replace(RunConfig(model=model), {"lora": {"rank": 2}}))

    return of_revision


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("v1", OLD), (OLD, OLD)])
def test_the_base_is_that_of_the_revision_and_keeps_its_name(load, cache, tmp_path, revision, commit):
    policy = load(revision)
    assert policy.model.config.commit == commit
    if policy.engine == "unsloth":
        assert UnslothWithVllm.asked == str(cache / commit)
    assert {key: policy.record[key] for key in ("base_model", "revision", "fingerprint")} == {
        "base_model": NAME,
        "revision": commit,
        "fingerprint": None,
    }
    save_adapter(policy.model, policy.tokenizer, tmp_path / "adapter")
    for file in (tmp_path / "adapter").glob("*.json"):
        assert str(tmp_path / "hub") not in file.read_text(), file
    target = resolve(str(tmp_path / "adapter"), ModelFlags())
    assert (target.base_name, target.base.name) == (NAME, str(cache / commit))


def test_the_end_tokens_are_those_of_the_generation_config(load):
    policy = load("v1")
    assert policy.eos_token_ids == policy.model.generation_config.eos_token_id == [1, ENDS]


def test_a_revision_that_is_not_there_is_an_error(load):
    with pytest.raises(UserError, match="owner/tiny is not a folder and cannot be loaded from the Hub"):
        load("v2")


@pytest.mark.parametrize("load", ["unsloth"], indirect=True)
def test_the_rollouts_of_unsloth_write_outside_of_the_working_directory(load, tmp_path):
    load(None).model.load_lora("vllm_gen_lora_0", load_tensors=True)
    assert [*(tmp_path / "work").iterdir()] == []


def test_a_revision_is_that_of_an_adapters_base(cache, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", base=NAME)
    assert resolve(str(adapter), ModelFlags()).base.revision == NEW
    assert resolve(str(adapter), ModelFlags(revision="v1")).base.revision == OLD
    assert resolve(str(adapter), ModelFlags(revision="v1")).base.name == str(cache / OLD)


def test_the_commit_of_a_base_is_not_asked_of_another_repository(cache, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", base="owner/other")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"revision": "f" * 40}))
    run = make_run(tmp_path / "run", name="owner/other")
    record = json.loads((run / "run.json").read_text())
    record["policy"]["revision"] = "f" * 40
    (run / "run.json").write_text(json.dumps(record))
    for source in (adapter, run):
        target = resolve(str(source), ModelFlags(base=NAME))
        assert (target.base_name, target.base.revision) == (NAME, NEW)
        assert resolve(str(source), ModelFlags(base=NAME, revision="v1")).base.revision == OLD
        with pytest.raises(UserError, match="owner/other is not a folder and cannot be loaded from the Hub"):
            resolve(str(source), ModelFlags())


def test_the_revision_of_an_adapter_on_the_hub_is_not_that_of_its_base(cache, tmp_path):
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--owner--adapter"
    snapshot = make_adapter(repository / "snapshots" / commit, base=NAME)
    (repository / "refs").mkdir()
    for name in ("main", "v1"):  # the base has both, too
        (repository / "refs" / name).write_text(commit)
    target = resolve("owner/adapter", ModelFlags(revision="v1"))
    assert (target.adapter, target.base.revision) == (snapshot, NEW)
