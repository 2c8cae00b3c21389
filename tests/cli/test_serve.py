"""`lora-grpo serve` with OpenAI's client: both models, what requests ask for, mistakes, and how it ends."""

import asyncio
import contextlib
import http.client
import importlib.util
import json
import signal
import socket

import pytest
import torch
from helpers.made_runs import make_run
from helpers.tiny_runs import run_tiny, starter_data
from helpers.warm_process import wait_for
from openai import APIConnectionError, AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError, OpenAI

from lora_grpo.cli import serve, verbs
from lora_grpo.evaluation import EvaluateOptions, evaluate_tasks
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.merging import MergeOptions, merge
from lora_grpo.models import resolve
from lora_grpo.prompts import chat

MAX_TOKENS = 24
QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]
TOOLS = [{"type": "function", "function": {"name": "roll", "description": "", "parameters": {}}}]
ASKS_FOR_TOOL = [{"role": "user", "content": "Roll a die."}]
TOOL_CALL = '<tool_call>\n{"name": "roll", "arguments": {}}\n</tool_call><|im_end|>'
COMMAND = """
import signal, sys
from lora_grpo.cli import run_front_door
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
sys.exit(run_front_door(sys.argv[1:]))
"""


def learn_tool_call(training):
    """Train the adapter until the model calls the tool, which also changes its other answers."""
    model = training.policy.model
    tokenizer = training.policy.tokenizer
    prompt_ids = tokenizer(chat.render(tokenizer, ASKS_FOR_TOOL, TOOLS), add_special_tokens=False)["input_ids"]
    call_ids = tokenizer(TOOL_CALL, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([prompt_ids + call_ids])
    labels = torch.tensor([[-100] * len(prompt_ids) + call_ids])
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    num_right = 0
    while num_right < 10:
        optimizer.zero_grad()
        output = model(input_ids=ids, labels=labels)
        output.loss.backward()
        optimizer.step()
        greedy_ids = output.logits[0, len(prompt_ids) - 1 : -1].argmax(dim=-1)
        num_right += greedy_ids.tolist() == call_ids


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose model has tools."""
    folder = tmp_path_factory.mktemp("serve") / "my_run"
    run_tiny(
        folder,
        before=learn_tool_call,
        model={"engine": "peft", "bits": 16, "chat_template": "qwen2_5"},
        lora={"rank": 32, "alpha": 64},
        sampling={"max_completion_tokens": MAX_TOKENS},
        train={"max_steps": 1, "learning_rate": 1e-9},
    )
    return folder


@pytest.fixture(scope="module")
def front_door(warm, tmp_path_factory):
    """Return a function that starts `lora-grpo` with arguments."""
    script = tmp_path_factory.mktemp("script") / "lora_grpo_command.py"
    script.write_text(COMMAND)
    return lambda *arguments: warm.start(script, *arguments, cwd=script.parent)


def address_of(server):
    """Wait until a server is ready, and return its base_url."""
    wait_for(server, lambda: "Ctrl-C ends" in server.said()[0])
    return server.said()[0].partition(" at ")[2].partition(";")[0]


@pytest.fixture(scope="module")
def base_url(front_door, run):
    server = front_door("serve", run, "--port", "0")
    yield address_of(server)
    server.terminate()
    assert server.end().returncode == 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def client(base_url):
    with OpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        yield client


def ask(client, messages=QUESTION, model="my_run", **options):
    options = {"max_tokens": MAX_TOKENS, **options}
    return client.chat.completions.create(model=model, messages=messages, **options)


def text_of(answer):
    return answer.choices[0].message.content


def test_models_are_the_run_and_its_base(client):
    assert [model.id for model in client.models.list()] == ["my_run", "base"]
    texts = {model: text_of(ask(client, model=model, temperature=0)) for model in ("my_run", "base")}
    assert texts["my_run"] != texts["base"]


def test_greedy_answers_are_those_of_an_evaluation(base_url, run, tmp_path):
    """Both models, all rows at the same time: as many tokens, and the same text."""
    evaluate_tasks(EvaluateOptions(str(run), compare="base", output_dir=tmp_path / "evaluation"))
    evaluated = {}
    for path in (tmp_path / "evaluation").glob("*results.jsonl"):
        model = "base" if path.name.startswith("compared-") else "my_run"
        for line in path.read_text().splitlines():
            result = json.loads(line)
            if "completion" in result:
                evaluated[model, result["task_id"]] = (result["completion"], result["num_tokens"])
    rows = chat.add_prompts(starter_data().eval, "xml")
    questions = {(model, row["id"]): row["prompt"] for model in ("my_run", "base") for row in rows}
    assert evaluated.keys() == questions.keys() and len(evaluated) == 8

    async def served():
        async with AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
            requests = [ask(client, prompt, model, temperature=0) for (model, _), prompt in questions.items()]
            answers = await asyncio.gather(*requests)
        return [(text_of(answer), answer.usage.completion_tokens) for answer in answers]

    assert dict(zip(questions, asyncio.run(served()), strict=True)) == evaluated


def test_the_model_calls_tools(client):
    answer = ask(client, ASKS_FOR_TOOL, tools=TOOLS, temperature=0, max_tokens=80).choices[0]
    assert answer.finish_reason == "tool_calls"
    [call] = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("roll", {})
    # The client sends the call and its result back.
    messages = [*ASKS_FOR_TOOL, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "6"}]
    longer = ask(client, messages, tools=TOOLS)
    assert longer.usage.prompt_tokens > ask(client, ASKS_FOR_TOOL, tools=TOOLS).usage.prompt_tokens


def test_a_stream_has_the_answer(client):
    whole = ask(client, temperature=0)
    text = ""
    for chunk in ask(client, temperature=0, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == text_of(whole)
    assert chunk.usage == whole.usage

    calls = []
    for chunk in ask(client, ASKS_FOR_TOOL, tools=TOOLS, temperature=0, max_tokens=80, stream=True):
        calls += chunk.choices[0].delta.tool_calls or []
    assert [call.function.name for call in calls] == ["roll"]


def test_choices_follow_the_seed(client):
    def texts(seed):
        answer = ask(client, n=3, seed=seed, temperature=1.5)
        return [choice.message.content for choice in answer.choices]

    assert texts(1) == texts(1) != texts(2)
    assert len(set(texts(1))) == 3
    # Without a seed, every request has another one; without a temperature, it is 1.
    assert text_of(ask(client)) != text_of(ask(client))
    assert text_of(ask(client, seed=3)) == text_of(ask(client, seed=3, temperature=1))


def test_a_stop_text_ends_the_answer(client):
    whole = ask(client, temperature=0)
    stop = text_of(whole)[4:6]
    answer = ask(client, temperature=0, stop=[stop])
    assert text_of(answer) == text_of(whole).partition(stop)[0]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < whole.usage.completion_tokens


def test_logprobs_are_those_of_the_distribution(client):
    answer = ask(client, logprobs=True, seed=5, max_tokens=5)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens <= 5
    assert all(token.logprob < 0 for token in tokens)
    [only] = ask(client, logprobs=True, seed=5, max_tokens=1, top_p=1e-9).choices[0].logprobs.content
    assert only.logprob == 0  # the nucleus has one token


def test_a_text_is_completed(client):
    prompt = chat.render_plain_text([{"role": "user", "content": "What is 3 plus 4?"}])
    answer = client.completions.create(model="base", prompt=prompt, max_tokens=4, temperature=0)
    assert answer.usage.completion_tokens <= 4
    assert answer.choices[0].text


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"model": "gpt-5"}, NotFoundError, "my_run or base"),
        ({"messages": []}, BadRequestError, "messages"),
        ({"messages": [{"role": "judge", "content": "?"}]}, BadRequestError, "'judge'"),
        ({"temperature": -1}, BadRequestError, "temperature"),
        ({"temperature": 0, "logprobs": True}, BadRequestError, "logprobs"),
        ({"max_tokens": 5000}, BadRequestError, "5000"),
        ({"messages": [{"role": "user", "content": "3 plus 4. " * 900}]}, BadRequestError, "--context-tokens"),
        ({"presence_penalty": 0.5}, BadRequestError, "presence_penalty"),
        ({"extra_body": {"top_k": 5}}, BadRequestError, "top_k"),
    ],
)
def test_what_cannot_be_honored_is_one_line(client, options, error, word):
    with pytest.raises(error) as raised:
        ask(client, **options)
    message = raised.value.body["message"]
    assert word in message and "\n" not in message
    assert text_of(ask(client)) is not None  # and the server goes on


def test_another_path_is_an_error(base_url):
    with (
        OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0) as client,
        pytest.raises(NotFoundError, match="base_url"),
    ):
        ask(client)


@pytest.mark.parametrize(("host", "code"), [("localhost:1234", 200), ("attacker.example", 400)])
def test_a_web_site_whose_name_leads_here_gets_nothing(host, code, base_url):
    connection = http.client.HTTPConnection(base_url.removeprefix("http://").removesuffix("/v1"))
    with contextlib.closing(connection):
        connection.request("GET", "/v1/models", headers={"Host": host})
        response = connection.getresponse()
        assert response.status == code
        assert (b"my_run" in response.read()) is (code == 200)


def test_a_server_for_others_with_a_short_context(front_door, run):
    server = front_door("serve", run, "--port", "0", "--host", "0.0.0.0", "--context-tokens", "100")
    address = address_of(server)
    errors = server.said()[1]
    assert errors.count("no password") == 1
    # The system prompt of the training, as clients send it.
    assert json.dumps(chat.add_prompts([{"question": ""}], "xml")[0]["prompt"][0]["content"]) in errors

    # Without max_tokens, an answer may fill the context.
    with OpenAI(base_url=address, api_key="-", max_retries=0) as client:
        usages = [ask(client, max_tokens=None, seed=seed).usage for seed in range(5)]
    assert max(usage.total_tokens for usage in usages) == 100

    # Ctrl-C while requests are sampled: the clients get an error, and the exit code is that of other commands.
    async def ask_until_an_error(client):
        while True:
            await ask(client, n=64)

    async def interrupted():
        async with AsyncOpenAI(base_url=address, api_key="-", max_retries=0) as client:
            clients = [asyncio.create_task(ask_until_an_error(client)) for _ in range(8)]
            await asyncio.sleep(0.2)
            server.interrupt()
            return await asyncio.gather(*clients, return_exceptions=True)

    for error in asyncio.run(interrupted()):
        assert isinstance(error, InternalServerError | APIConnectionError)
    ended = server.end()
    assert ended.returncode == 128 + signal.SIGINT
    assert ended.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("folder", "name"), [("my_run", "my_run"), ("base", "adapter")])
def test_both_models_have_a_name(tmp_path, folder, name):
    run = make_run(tmp_path / folder)
    options = serve.ServeOptions(str(run))
    assert serve._names(options, resolve(str(run), options)) == {name: True, "base": False}


def test_a_port_in_use_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert verbs.run_front_door(["serve", "starter", "--port", str(port)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["missing"],
        ["missing.gguf"],
        ["starter", "--port", "70000"],
        ["starter", "--host", "256.0.0.1"],
        ["starter", "--context-tokens", "5000"],
        ["a.gguf", "--base", "b"],
    ],
)
def test_mistakes_end_with_one_line(arguments, capsys):
    assert verbs.run_front_door(["serve", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.engines
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: make engines")
def test_a_gguf_file_answers_as_its_model(front_door, run):
    merge(MergeOptions(str(run)))
    export(ExportOptions(run, type=("f16",)))
    texts = []
    for source, model in ((run / "gguf" / "my_run.F16.gguf", "my_run.F16"), (run / "merged", "merged")):
        server = front_door("serve", source, "--port", "0")
        with OpenAI(base_url=address_of(server), api_key="-", max_retries=0) as client:
            texts.append(text_of(ask(client, model=model, temperature=0)))
            call = ask(client, ASKS_FOR_TOOL, model, tools=TOOLS, temperature=0, max_tokens=80)
            assert call.choices[0].message.tool_calls[0].function.name == "roll"
        server.terminate()
        assert server.end().returncode == 128 + signal.SIGTERM
    # Rounding to 16 bits decides near ties later in the answer.
    assert texts[0][:10] == texts[1][:10] and len(texts[0]) > 10


@pytest.mark.engines
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make engines")
def test_vllm_serves_both_models_with_logprobs(front_door, run):
    server = front_door("serve", run, "--port", "0", "--backend", "vllm", "--context-tokens", "600")
    with OpenAI(base_url=address_of(server), api_key="-", max_retries=0) as client:
        texts = {model: text_of(ask(client, model=model, temperature=0)) for model in ("my_run", "base")}
        tokens = ask(client, logprobs=True).choices[0].logprobs.content
        call = ask(client, ASKS_FOR_TOOL, tools=TOOLS, temperature=0, max_tokens=80).choices[0].message.tool_calls[0]
    server.terminate()
    assert server.end().returncode == 128 + signal.SIGTERM
    assert texts["my_run"] != texts["base"]
    assert all(token.logprob < 0 for token in tokens)
    assert call.function.name == "roll"
