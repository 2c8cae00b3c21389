"""Servers that are imitated: with logprobs, without them, and with chat only, each is called by its name."""

import json
import shutil

import peft
import pytest
import torch
import transformers
from helpers.stand_in_servers import ChatOnlyStandIn, Model, OllamaStandIn, OpenAIStandIn, SglangStandIn

from lora_grpo import starter
from lora_grpo.errors import UserError
from lora_grpo.verify import VerifyOptions, verify
from lora_grpo.verify.servers import open_server


class Ollama(OllamaStandIn):
    """It says that its weights are in 32 bits, as those of the stand-in are."""

    def show(self, body):
        return {**super().show(body), "details": {"quantization_level": "F32"}}


SERVERS = {"openai": OpenAIStandIn, "chat only": ChatOnlyStandIn, "sglang": SglangStandIn, "ollama": Ollama}


def findings_of(server_class, starter_models, adapter_folder, tuned, *, gives_logprobs=True):
    """Return what the models `tuned` and `base` of a server are, in one line each."""
    server = server_class(base=starter_models.base, tuned=tuned)
    server.gives_logprobs = gives_logprobs
    with server.served() as url:
        options = VerifyOptions(
            str(adapter_folder),
            base=str(starter_models.base_folder),
            against=(f"{url}#tuned", f"{url}#base"),
            weight_bits=32,
        )
        return [target.result.finding for target in verify(options).targets]


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_with_logprobs_is_called_by_its_name(starter_models, kind):
    findings = findings_of(SERVERS[kind], starter_models, starter_models.adapter_folder, starter_models.tuned)
    assert findings == ["the adapter", "the base"]


@pytest.fixture(scope="module")
def stronger(starter_models, tmp_path_factory):
    """The folder of the adapter at eight times its scale, and the model with it."""
    folder = tmp_path_factory.mktemp("stronger") / "adapter"
    shutil.copytree(starter_models.adapter_folder, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["lora_alpha"] *= 8
    (folder / "adapter_config.json").write_text(json.dumps(config))
    base = transformers.AutoModelForCausalLM.from_pretrained(starter_models.base_folder, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload().eval()
    return folder, Model(merged, starter_models.tokenizer)


@pytest.mark.parametrize("kind", ["openai", "chat only", "ollama"])
def test_greedy_answers_tell_an_adapter_that_changes_them(starter_models, stronger, kind):
    findings = findings_of(SERVERS[kind], starter_models, *stronger, gives_logprobs=False)
    assert findings == ["the adapter", "the base"]


def test_greedy_answers_do_not_tell_an_adapter_that_changes_few(starter_models):
    folder = starter_models.adapter_folder
    findings = findings_of(OpenAIStandIn, starter_models, folder, starter_models.tuned, gives_logprobs=False)
    assert findings == ["cannot tell", "cannot tell"]


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"text": "a", "finish_reason": "stop", "logprobs": [-0.1]}]},
        {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": [1, 2]},
    ],
)
def test_an_answer_of_another_form_is_one_line(answer):
    class Other(OpenAIStandIn):
        def complete(self, body):
            return answer

    tokenizer = transformers.AutoTokenizer.from_pretrained(starter.model_path())
    with Other(tuned=None).served() as url:
        target = open_server(url, "tuned", tokenizer)
        with pytest.raises(UserError, match="gives an unexpected answer to /v1/completions") as caught:
            target.sample([tokenizer("a")["input_ids"]], 2)
        target.close()
    assert "\n" not in str(caught.value)
