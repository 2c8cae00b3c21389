"""Before a download: what is said where the Hub is out of reach."""

import json

import pytest
from helpers.hub_stand_in import TOKEN, HubStandIn, Repository
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from lora_grpo.cli import parse
from lora_grpo.config import ModelConfig, gpu_preset, starter_preset
from lora_grpo.errors import UserError
from lora_grpo.memory import draft_plan
from lora_grpo.models.model_files import HubUnavailable, read_config

QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
PRESETS = {
    "starter": starter_preset(data={"task": "starter"}),
    "16gb": gpu_preset(QWEN, data={"task": "gsm8k"}),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return a function that puts the config.json of a model into an otherwise empty Hub cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def add(name, config):
        folder = tmp_path / "hub" / repo_folder_name(repo_id=name, repo_type="model")
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("c0ffee")
        (folder / "snapshots" / "c0ffee").mkdir(parents=True)
        (folder / "snapshots" / "c0ffee" / "config.json").write_text(json.dumps(config))

    return add


@pytest.fixture
def hub(monkeypatch):
    """A Hub that can be reached."""
    server = HubStandIn()
    server.repositories[QWEN] = Repository(False, {"config.json": b"{}"})
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.close()


def test_without_the_hub_the_error_names_the_bundled_model(machine, cache):
    machine(16_376)
    config, invocation = parse((), recipe="r", description="", presets=PRESETS)
    assert (config.preset, config.model.name) == ("16gb", QWEN)
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set\); .*--model\.name starter"):
        draft_plan(config, invocation)

    bundled, invocation = parse(("--model.name", "starter"), recipe="r", description="", presets=PRESETS)
    assert draft_plan(bundled, invocation).config.model.name == "starter"

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 512}
    cache(QWEN, {"model_type": "qwen2", **sizes})
    assert draft_plan(config, invocation).config.model.name == QWEN


@pytest.mark.parametrize("status", [200, 302, 403, 407, 503])
def test_what_answers_in_place_of_the_hub_is_not_the_hub(machine, cache, hub, status):
    machine(16_376)
    hub.fail("HEAD", QWEN, status=status, times=2)
    with pytest.raises(HubUnavailable, match="the Hub"):
        read_config(ModelConfig(name=QWEN))
    with pytest.raises(HubUnavailable, match="the Hub"):
        read_config(ModelConfig(name=QWEN))
    assert read_config(ModelConfig(name=QWEN)) == {}


@pytest.mark.parametrize("fault", ["closed port", "unknown host", "no TLS", "hangs up"])
def test_a_hub_that_cannot_be_connected_to_is_unavailable(cache, hub, monkeypatch, fault):
    """Such errors come from huggingface_hub's HTTP library, which is httpx in version 1 and httpx2 in version 2."""
    endpoint = {
        "closed port": "http://127.0.0.1:1",
        "unknown host": "http://hub.invalid",
        "no TLS": f"https:{hub.url.removeprefix('http:')}",
        "hangs up": hub.url,
    }[fault]
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    if fault == "hangs up":
        hub.fail("HEAD", QWEN, status=None, times=9)
    with pytest.raises(HubUnavailable, match=r"it is not cached, and the Hub is unreachable \(.+\)"):
        read_config(ModelConfig(name=QWEN))


@pytest.mark.parametrize(
    ("name", "revision", "reason"),
    [
        ("Qwen/Qwen2.5-1.5B-Instrct", None, "there is no such model, or it is private; correct the name, or"),
        (QWEN, "v9", "it has no commit, branch or tag 'v9'; correct the revision"),
        ("owner/model-GGUF", None, "it has no config.json; pass a model in the format of transformers"),
    ],
    ids=["name", "revision", "format"],
)
def test_what_the_hub_does_not_have_is_said_in_words(cache, hub, name, revision, reason):
    hub.repositories["owner/model-GGUF"] = Repository(False, {"model.gguf": b""})
    with pytest.raises(UserError) as caught:
        read_config(ModelConfig(name=name, revision=revision))
    assert not isinstance(caught.value, HubUnavailable)  # a plan must not go on with other dimensions
    assert f"{name} is not a folder and cannot be loaded from the Hub ({reason}" in str(caught.value)


def test_a_token_that_the_hub_rejects_is_named(cache, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(HubUnavailable, match="the Hub rejected the token; run hf auth login, or unset HF_TOKEN"):
        read_config(ModelConfig(name=QWEN))
