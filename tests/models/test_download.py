"""Before a download: a preset that nobody chose gives way where the Hub is out of reach."""

import json

import pytest
from helpers.hub_stand_in import TOKEN, HubStandIn, Repository
from huggingface_hub import constants

from lora_grpo.cli import parse
from lora_grpo.config import ModelConfig, gpu_preset, starter_preset
from lora_grpo.errors import UserError
from lora_grpo.models import check_download
from lora_grpo.models.model_files import HubUnavailable, read_config

QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
PRESETS = {
    "starter": starter_preset(data={"task": "starter"}),
    "16gb": gpu_preset(QWEN, data={"task": "gsm8k"}),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return a function that puts files of a model into an otherwise empty Hub cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def add(name, **files):
        folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text("c0ffee")
        (folder / "snapshots" / "c0ffee").mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / "snapshots" / "c0ffee" / file.replace("__", ".")).write_text(json.dumps(content))

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


def chosen(*arguments):
    config, _ = parse(arguments, recipe="r", description="", presets=PRESETS)
    return config.preset, config.model.name


def test_without_the_hub_an_automatic_preset_names_the_bundled_model(machine, cache):
    machine(16_376)
    with pytest.raises(HubUnavailable, match="HF_HUB_OFFLINE is set"):
        check_download(ModelConfig(name=QWEN))
    for arguments in ((), ("--preset", "auto", "--seed", "3")):
        with pytest.raises(
            UserError, match=rf"^no weights of {QWEN} \(.*HF_HUB_OFFLINE is set\); pass --preset starter"
        ):
            chosen(*arguments)
    assert chosen("--preset", "16gb") == chosen("--plan") == ("16gb", QWEN)
    assert chosen("--model.name", "o/mine") == ("16gb", "o/mine")
    assert chosen("--preset", "starter") == ("starter", "starter")
    cache(QWEN, model__safetensors="")
    assert chosen() == ("16gb", QWEN)


@pytest.mark.parametrize("status", [200, 302, 403, 407, 503])
def test_what_answers_in_place_of_the_hub_is_not_the_hub(machine, cache, hub, status):
    machine(16_376)
    hub.fail("HEAD", QWEN, status=status, times=2)
    with pytest.raises(HubUnavailable, match="the Hub"):
        read_config(ModelConfig(name=QWEN))
    with pytest.raises(UserError, match="no weights of"):
        chosen()
    assert chosen() == ("16gb", QWEN)
