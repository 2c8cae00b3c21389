"""Servers as targets: what they sample, render and say, and their errors.

vLLM, llama.cpp and `lora-grpo serve` are real. Ollama, SGLang and other servers are stand-ins in
`helpers/stand_in_servers.py`, made from the documentation and the source of Ollama and SGLang.
"""

import importlib.util
import signal
import socket
import time
import urllib.request

import pytest
import torch
from helpers.stand_in_servers import ChatOnlyStandIn, OllamaStandIn, OpenAIStandIn, SglangStandIn
from helpers.vllm_servers import running_vllm
from helpers.warm_process import wait_for

from lora_grpo.errors import RunError, UserError
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.hardware import vllm_available
from lora_grpo.sampling import LlamaServer
from lora_grpo.verify.servers import open_gguf, open_server

CHATS = [
    [{"role": "user", "content": question}]
    for question in ("Tom has 3 plums and buys 4. How many plums?", "What is 3 plus 4?", "A café 🙂 has 2 cats.")
]
MAX_TOKENS = 24
F32_ROUNDING = 1e-4
"""In nats, of the logprob of one token."""
F16_ROUNDING = 0.05
GENERATION_DEFAULTS = {"temperature": 0.5, "top_k": 2}
"""Of the base's generation_config.json, see conftest.py."""
SERVE_COMMAND = """
import sys
from lora_grpo.cli import run_front_door
sys.exit(run_front_door(sys.argv[1:]))
"""


def with_vllm(test):
    return pytest.mark.engines(pytest.mark.skipif(not vllm_available(), reason="vllm is not installed")(test))


def with_llama_cpp(test):
    missing = importlib.util.find_spec("xllamacpp") is None
    return pytest.mark.engines(pytest.mark.skipif(missing, reason="xllamacpp is not installed")(test))


@pytest.fixture
def opened():
    """Return a function that opens a target, which is closed at the end."""
    targets = []

    def open_target(url, model, tokenizer, **options):
        targets.append(open_server(url, model, tokenizer, **options))
        return targets[-1]

    yield open_target
    for target in targets:
        target.close()


def check_completions(target, models, model, rounding):
    """Check that a target samples with the logprobs of a model, and return its answers."""
    prompts = [models.render(messages) for messages in CHATS]
    answers = target.sample(prompts, MAX_TOKENS)
    ranks = [rank for prompt, answer in zip(prompts, answers, strict=True) for rank in ranks_of(model, prompt, answer)]
    assert max(ranks) >= GENERATION_DEFAULTS["top_k"]  # the server's own settings do not apply
    assert [answer.prompt_tokens for answer in answers] == [len(prompt) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.logprobs == pytest.approx(logprobs(model, prompt, answer.token_ids), abs=rounding)
        ended_or_full = answer.has_ended or len(answer.token_ids) == MAX_TOKENS
        assert ended_or_full and len(answer.token_ids) <= MAX_TOKENS
    assert any(answer.has_ended for answer in answers)
    assert target.sample(prompts, MAX_TOKENS)[0].token_ids == answers[0].token_ids  # a fixed seed
    return answers


def check_chat(target, models, model, *, end_is_hidden=False):
    """Check that a target renders and answers chats as a model does, without rounding that changes a token."""
    assert [target.render(messages) for messages in CHATS] == [models.render(messages) for messages in CHATS]
    check_answers(target, models, model, end_is_hidden=end_is_hidden)


def check_answers(target, models, model, *, end_is_hidden=False):
    answers = target.chat(CHATS, 64)
    for messages, answer in zip(CHATS, answers, strict=True):
        token_ids, _ = model.complete(models.render(messages), 64, 0, 0)
        assert answer.has_ended and model.has_ended(token_ids)
        assert answer.token_ids == (token_ids[:-1] if end_is_hidden else token_ids)
        assert answer.prompt_tokens == len(models.render(messages))


def distributions(model, prompt, token_ids):
    """Return the logprobs of the vocabulary at each token of a completion, by transformers."""
    with torch.no_grad():
        logits = model.model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def logprobs(model, prompt, token_ids):
    """Return the logprob of each token of a completion."""
    return distributions(model, prompt, token_ids)[range(len(token_ids)), token_ids].tolist()


def ranks_of(model, prompt, answer):
    """Return how many tokens are more probable than each one of a completion."""
    rows = distributions(model, prompt, answer.token_ids)
    own = rows[range(len(rows)), answer.token_ids]
    return (rows > own[:, None]).sum(dim=-1).tolist()


# vLLM


@pytest.fixture(scope="module")
def vllm_server(starter_models, tmp_path_factory):
    """A server with the base and the adapter."""
    adapters = {"tuned": starter_models.adapter_folder}
    log_path = tmp_path_factory.mktemp("vllm") / "log"
    with running_vllm(starter_models.base_folder, log_path, adapter_folders=adapters) as url:
        yield url


@with_vllm
@pytest.mark.parametrize("name", ["base", "tuned"])
def test_vllm_answers_with_the_model_that_is_named(vllm_server, starter_models, opened, name):
    model = getattr(starter_models, name)
    target = opened(f"{vllm_server}/v1/", name, starter_models.tokenizer)
    check_completions(target, starter_models, model, F32_ROUNDING)
    check_chat(target, starter_models, model)
    facts = target.facts()
    assert facts.program.startswith("vLLM 0.")
    assert facts.context_tokens == 256
    assert facts.end_token_ids == (starter_models.tokenizer.eos_token_id,)
    assert facts.sampling_defaults == GENERATION_DEFAULTS and facts.warnings == ()


@with_vllm
def test_vllm_lists_its_models_and_its_own_errors(vllm_server, starter_models, opened):
    with pytest.raises(UserError, match=r"several models \(base, tuned\); write .*#NAME"):
        opened(vllm_server, None, starter_models.tokenizer)
    with pytest.raises(UserError, match=r"no model 'tunde'.*one of base, tuned"):
        opened(vllm_server, "tunde", starter_models.tokenizer)
    target = opened(vllm_server, "tuned", starter_models.tokenizer)
    with pytest.raises(UserError, match=r"refuses /v1/completions \(HTTP 400: .*256") as caught:
        target.sample([[5] * 300], MAX_TOKENS)
    assert "\n" not in str(caught.value)


# llama.cpp


@pytest.fixture(scope="module")
def gguf(starter_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    [path] = export(ExportOptions(starter_models.base_folder, type=("f16",), output_dir=folder))
    return path


@pytest.fixture(scope="module")
def llama_server(gguf):
    server = LlamaServer(gguf, slots=4, slot_tokens=256)
    yield server
    server.close()


@with_llama_cpp
def test_llama_cpp_answers_with_its_model(llama_server, starter_models, opened):
    target = opened(llama_server.address, None, starter_models.tokenizer)
    check_completions(target, starter_models, starter_models.base, F16_ROUNDING)
    check_chat(target, starter_models, starter_models.base)
    facts = target.facts()
    assert facts.program.startswith("llama.cpp ")
    assert (facts.weight_type, facts.context_tokens) == ("F16", 256)
    tokenizer = starter_models.tokenizer
    assert set(facts.end_token_ids) == {tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert facts.sampling_defaults == {**GENERATION_DEFAULTS, "min_p": 0.05}  # the last one is llama.cpp's own
    assert facts.warnings == ()


@with_llama_cpp
def test_a_gguf_file_is_run_by_a_server_of_its_own(gguf, starter_models):
    target = open_gguf(gguf, 256)
    try:
        assert target.name == str(gguf)
        check_completions(target, starter_models, starter_models.base, F16_ROUNDING)
        facts = target.facts()
        assert (facts.weight_type, facts.context_tokens) == ("F16", 1024)
        address = target._client.address
        urllib.request.urlopen(f"{address}/health", timeout=5)
    finally:
        target.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{address}/health", timeout=5)


def test_an_adapter_with_another_scale_is_a_warning(starter_models, opened):
    class LlamaCppStandIn(OpenAIStandIn):
        owned_by = "llamacpp"

        @property
        def routes(self):
            return {**super().routes, "/props": "props", "/lora-adapters": "adapters", "/completion": "native"}

        def props(self, body):
            return {"default_generation_settings": {"params": {}, "n_ctx": 64}, "model_ftype": "Q4_K - Medium"}

        def adapters(self, body):
            return [{"id": 0, "path": "a.gguf", "scale": 0.0}, {"id": 1, "path": "b.gguf", "scale": 1.0}]

        def native(self, body):
            assert body["ignore_eos"]
            return {"generation_settings": {"logit_bias": [{"token": 2, "bias": None}, {"token": 5, "bias": 1.0}]}}

    with LlamaCppStandIn(model=starter_models.base).served() as url:
        facts = opened(url, None, starter_models.tokenizer).facts()
    assert facts.weight_type == "q4_k_m"
    assert facts.end_token_ids == (2,)
    [warning] = facts.warnings
    assert "a.gguf has scale 0" in warning and "--lora-init-without-apply" in warning and '"id": 0' in warning


# lora-grpo serve


@pytest.fixture(scope="module")
def our_server(warm, starter_models, tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "lora_grpo_command.py"
    script.write_text(SERVE_COMMAND)
    arguments = ("serve", starter_models.adapter_folder, "--base", starter_models.base_folder, "--bits", "16")
    server = warm.start(script, *arguments, "--port", "0", cwd=script.parent)
    wait_for(server, lambda: "Ctrl-C ends" in server.said()[0])
    yield server.said()[0].partition(" at ")[2].partition(";")[0]
    server.terminate()
    assert server.end().returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("name", ["base", "tuned"])
def test_our_server_answers_with_the_model_that_is_named(our_server, starter_models, opened, name):
    model = getattr(starter_models, name)
    target = opened(our_server, name, starter_models.tokenizer)
    check_completions(target, starter_models, model, F32_ROUNDING)
    check_chat(target, starter_models, model)
    assert target.facts().program == "lora-grpo serve"


# SGLang


@pytest.mark.parametrize("returns_token_ids", [True, False])
def test_sglang_answers_with_the_adapter(starter_models, opened, returns_token_ids):
    """A stand-in. Without `return_token_ids`, as in older versions, the tokens are told by their texts."""
    server = SglangStandIn(base=starter_models.base, tuned=starter_models.tuned)
    server.returns_token_ids = returns_token_ids
    with server.served() as url:
        for name in ("base:tuned", "base") if returns_token_ids else ("tuned",):
            target = opened(url, name, starter_models.tokenizer)
            model = starter_models.base if name == "base" else starter_models.tuned
            check_completions(target, starter_models, model, F32_ROUNDING)
            check_answers(target, starter_models, model)
        rendered = target.render(CHATS[0])
        facts = target.facts()
    assert rendered == (starter_models.render(CHATS[0]) if returns_token_ids else None)
    assert (facts.program, facts.weight_type, facts.context_tokens) == ("SGLang 0.5.6", "bfloat16", 1024)


# Ollama


def test_ollama_answers_with_its_model(starter_models, opened):
    """A stand-in. It hides the end token."""
    with OllamaStandIn(smol=starter_models.tuned).served() as url:
        opened(url, "smol", starter_models.tokenizer)
        opened(url, "smol:latest", starter_models.tokenizer)
        target = opened(url, None, starter_models.tokenizer)
        check_completions(target, starter_models, starter_models.tuned, F32_ROUNDING)
        check_chat(target, starter_models, starter_models.tuned, end_is_hidden=True)
        facts = target.facts()
    assert (facts.program, facts.weight_type, facts.context_tokens) == ("Ollama 0.18.0", "q4_k_m", 2048)
    assert facts.sampling_defaults == {"temperature": 0.7, "top_p": 0.9}
    assert facts.end_token_ids is None


def test_ollama_without_logprobs_decodes_greedily(starter_models, opened):
    """A stand-in for a version before logprobs, which does not tell its prompts either."""
    server = OllamaStandIn(smol=starter_models.base)
    server.gives_logprobs = False
    server.tells_rendering = False
    with server.served() as url:
        target = opened(url, None, starter_models.tokenizer)
        check_greedy(target, starter_models)
        assert target.render(CHATS[0]) is None


def check_greedy(target, models):
    """Check that a target decodes greedily, with tokens that are told by their text."""
    prompts = [models.render(messages) for messages in CHATS]
    for prompt, answer in zip(prompts, target.sample(prompts, MAX_TOKENS), strict=True):
        token_ids, _ = models.base.complete(prompt, MAX_TOKENS, 0, 0)
        text = models.tokenizer.decode(token_ids, skip_special_tokens=True)
        is_canonical = models.base.encode(text) == [token for token in token_ids if token != 2]
        assert (answer is not None) == is_canonical
        if answer:
            assert answer.logprobs is None
            assert answer.token_ids == models.base.encode(text)


# Other servers


def test_another_server_tells_tokens_by_their_texts(starter_models, opened):
    with OpenAIStandIn(one=starter_models.base, two=starter_models.tuned).served() as url:
        target = opened(url, "two", starter_models.tokenizer)
        check_completions(target, starter_models, starter_models.tuned, F32_ROUNDING)
        check_answers(target, starter_models, starter_models.tuned)
        assert target.render(CHATS[0]) is None
        assert target.facts().program == "an OpenAI-compatible server"
        with pytest.raises(UserError, match="several models"):
            opened(url, None, starter_models.tokenizer)


def test_another_server_without_logprobs_decodes_greedily(starter_models, opened):
    server = OpenAIStandIn(one=starter_models.base)
    server.gives_logprobs = False
    with server.served() as url:
        target = opened(url, None, starter_models.tokenizer)
        check_greedy(target, starter_models)
        answers = target.chat(CHATS, 64)
    assert all(answer is None or answer.logprobs is None for answer in answers)
    assert any(answers)


def test_a_server_with_chat_only_samples_no_prompts(starter_models, opened):
    with ChatOnlyStandIn(one=starter_models.base).served() as url:
        target = opened(url, None, starter_models.tokenizer)
        assert target.sample([[5], [6]], 4) == [None, None]
        check_answers(target, starter_models, starter_models.base)


def test_a_model_without_a_chat_template_has_no_chat(starter_models, opened):
    class NoTemplate(SglangStandIn):
        def chat(self, body):
            raise ValueError("default chat template is no longer allowed, so you must provide a chat template")

    with NoTemplate(base=starter_models.base).served() as url:
        target = opened(url, "base", starter_models.tokenizer)
        assert target.chat(CHATS, 4) is None
        assert target.render(CHATS[0]) is None


# Errors


def test_no_server_is_an_error_in_one_line(starter_models, opened):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(UserError, match=rf"no server answers at http://127.0.0.1:{port} \(.*refused\); start it"):
        opened(f"http://127.0.0.1:{port}/v1", None, starter_models.tokenizer)


def test_a_key_is_taken_from_the_environment(starter_models, opened, monkeypatch):
    server = OpenAIStandIn(one=starter_models.base)
    server.key = "sesame"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with server.served() as url:
        with pytest.raises(UserError, match=r"HTTP 401: Invalid API key\); set .* OPENAI_API_KEY"):
            opened(url, None, starter_models.tokenizer)
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        opened(url, None, starter_models.tokenizer)


def test_a_proxy_does_not_matter(starter_models, opened, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with OpenAIStandIn(one=starter_models.base).served() as url:
        opened(url, None, starter_models.tokenizer)


@pytest.mark.parametrize(
    ("route", "answer", "problem"),
    [
        ("list_models", "<html>welcome</html>", r"/v1/models \(no JSON, but '<html>welcome"),
        ("list_models", {"models": []}, r"/v1/models \(KeyError"),
        ("list_models", {"data": []}, "has no model"),
        ("complete", {"choices": []}, r"/v1/completions \(IndexError"),
        ("complete", "{", r"/v1/completions \(no JSON"),
    ],
)
def test_an_answer_of_another_form_is_an_error_in_one_line(starter_models, opened, monkeypatch, route, answer, problem):
    monkeypatch.setattr(OpenAIStandIn, route, lambda self, body: answer)
    with OpenAIStandIn(one=starter_models.base).served() as url, pytest.raises(UserError, match=problem) as caught:
        opened(url, None, starter_models.tokenizer).sample([[5]], 4)
    assert "\n" not in str(caught.value)


def test_a_server_that_hangs_is_an_error_in_one_line(starter_models, opened, monkeypatch):
    monkeypatch.setattr(OpenAIStandIn, "complete", lambda self, body: time.sleep(1.5))
    with OpenAIStandIn(one=starter_models.base).served() as url:
        target = opened(url, None, starter_models.tokenizer, seconds=0.5)
        with pytest.raises(RunError, match=r"did not answer /v1/completions within 0.5 s; see its log"):
            target.sample([[5]], 4)


def test_logits_are_not_taken_for_logprobs(starter_models, opened, monkeypatch):
    complete = OpenAIStandIn.complete

    def with_logits(self, body):
        answer = complete(self, body)
        listed = answer["choices"][0]["logprobs"]
        listed["token_logprobs"] = [logprob + 20 for logprob in listed["token_logprobs"]]
        return answer

    monkeypatch.setattr(OpenAIStandIn, "complete", with_logits)
    with OpenAIStandIn(one=starter_models.base).served() as url:
        target = opened(url, None, starter_models.tokenizer)
        with pytest.raises(UserError, match="a logit; start it without --logprobs-mode"):
            target.sample([starter_models.render(CHATS[0])], 4)
