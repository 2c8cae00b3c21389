"""What agents do with OpenAI's client: the ids that were sampled stay as they are, whatever becomes of the history."""

import importlib.util
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from helpers.agent_files import HEAD, play, rows_of
from helpers.warm_process import finish
from trl import chat_template_utils

from lora_grpo import starter
from lora_grpo.config import LAPTOP_FOLDER, ModelConfig
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.hardware import vllm_available
from lora_grpo.models import base_model, stop_tokens
from lora_grpo.rollouts import ModelCall, conversations_of, tree_row
from lora_grpo.runs import read_metrics
from lora_grpo.sampling import GgufSampler, Sampler, VllmSampler, read_gguf
from lora_grpo.sampling.vllm_engine import start_engine

AGENTS = """
import asyncio, json, random

TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Look something up.",
          "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}}]

async def extended(client):
    messages = asks("How many are 3 and 4?")
    for _ in range(3):
        answer = await reply(client, messages, max_tokens=12)
        messages += [answer.choices[0].message, *asks("Are you sure?")]

async def tools(client):
    messages = asks("Who is Tom?")
    for number in range(2):
        answer = await reply(client, messages, tools=TOOLS, max_tokens=12)
        call = {"id": f"call-{number}", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
        messages += [answer.choices[0].message.model_dump(exclude_none=True)]
        if answer.choices[0].message.tool_calls:
            call = answer.choices[0].message.tool_calls[0]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "a boy"})
        else:
            messages += asks("Use the tool.")

async def rewritten(client):
    messages = asks("How many are 3 and 4?")
    answer = await reply(client, messages, max_tokens=12)
    await reply(client, [{"role": "system", "content": "Be brief."}, *asks("And 4 and 5?")], max_tokens=12)
    await reply(client, [*messages, {"role": "assistant", "content": "Seven."}, *asks("And 5?")], max_tokens=12)

async def parallel(client):
    first = await reply(client, asks("Name a number."), max_tokens=12)
    history = [*asks("Name a number."), first.choices[0].message]
    texts = ["Add 1.", "Add 2.", "Add 2."]
    answers = await asyncio.gather(*(reply(client, history + asks(text), max_tokens=12) for text in texts))
    history += [*asks("Add 2."), answers[1].choices[0].message, *asks("Thanks.")]
    await reply(client, history, max_tokens=12)

async def compacted(client):
    messages = asks("How many are 3 and 4?")
    for _ in range(2):
        answer = await reply(client, messages, max_tokens=12)
        messages += [answer.choices[0].message, *asks("Go on.")]
    messages = asks("So far: " + " ".join(m["content"] if isinstance(m, dict) else m.content for m in messages)[:60])
    for _ in range(2):
        answer = await reply(client, messages, max_tokens=12)
        messages += [answer.choices[0].message, *asks("Go on.")]

async def choices(client):
    await reply(client, asks("Name a number."), n=3, max_tokens=12)

async def streamed(client):
    messages = asks("How many are 3 and 4?")
    text = ""
    stream = await reply(client, messages, max_tokens=12, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert chunk.usage.completion_tokens
    await reply(client, [*messages, {"role": "assistant", "content": text}, *asks("Again.")], max_tokens=12)

async def plain_text(client):
    first = await client.completions.create(model="policy", prompt="One, two,", max_tokens=6)
    text = "One, two," + first.choices[0].text
    await client.completions.create(model="policy", prompt=text + " and", max_tokens=6)

def synchronous(base_url):
    client = OpenAI(base_url=base_url, api_key="-", max_retries=0)
    messages = asks("How many are 3 and 4?")
    for _ in range(2):
        answer = reply(client, messages, max_tokens=12)
        messages += [answer.choices[0].message, *asks("Are you sure?")]

KINDS = [extended, tools, rewritten, parallel, compacted, choices, streamed, plain_text]

async def agent(row, base_url):
    number = row["number"] % 9
    if number == 8:
        await asyncio.to_thread(synchronous, base_url)
    else:
        await KINDS[number](CLIENT.with_options(base_url=base_url))
    return random.random()  # arbitrary, so that nearly every group has a gradient
"""
KINDS = [
    *("extended", "tools", "rewritten", "parallel", "compacted", "choices", "streamed", "plain_text"),
    "synchronous",
]

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "your_task.py"
SMOLLM2 = ROOT / LAPTOP_FOLDER
MODELS = {"starter": starter.model_path(), "smollm2": SMOLLM2}


def settings_of(name):
    return ModelConfig(name=str(MODELS[name]), bits=16)


@pytest.fixture(scope="module", params=["starter", pytest.param("smollm2", marks=pytest.mark.real_model)])
def sampler(request):
    settings = settings_of(request.param)
    tokenizer = base_model.load_tokenizer(settings)
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template  # which has tools
    model = base_model.load_base(settings).eval()
    return Sampler(model, tokenizer, stop_tokens.eos_token_ids(settings, tokenizer, request.param))


@pytest.fixture(scope="module")
def episodes(sampler, tmp_path_factory):
    """One episode of each kind, by its name."""
    rows = rows_of(tmp_path_factory.mktemp("agents"), AGENTS)
    played = play(sampler, rows[: len(KINDS)], group_size=1, budget=700)
    for episode in played:
        assert not episode.agent.failure, episode.agent.failure
    return dict(zip(KINDS, played, strict=True))


def scored_alone(model, call):
    """Return the logprobs of a call's sampled tokens from one pass over its sequence alone."""
    ids = torch.tensor([call.context_ids + call.token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float(), dim=-1)
    first = len(call.context_ids)
    return [logprobs[first + n - 1, token].item() for n, token in enumerate(call.token_ids)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_scores_a_call_as_it_was_sampled(sampler, episodes, kind):
    for call in episodes[kind].agent.calls:
        assert call.logprobs == pytest.approx(scored_alone(sampler.model, call), abs=1e-4)


NUM_CALLS = {"extended": 3, "tools": 2, "rewritten": 3, "parallel": 5, "compacted": 4, "choices": 3, "streamed": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_every_call_once(episodes, kind):
    episode = episodes[kind]
    calls = episode.agent.calls
    assert len(calls) == NUM_CALLS.get(kind, 2)
    assert sum(episode.loss_mask) == sum(len(call.token_ids) for call in calls)
    assert sorted(episode.sampled_ids) == sorted(token for call in calls for token in call.token_ids)
    row = tree_row([ModelCall(call.context_ids, call.token_ids, call.logprobs) for call in calls])
    assert (row.prompt_ids, row.token_ids) == (episode.prompt_ids, episode.token_ids)


@pytest.mark.parametrize("kind", ["extended", "tools", "streamed", "plain_text", "synchronous"])
def test_a_history_that_is_extended_continues_the_sampled_ids(episodes, kind):
    episode = episodes[kind]
    is_one_sequence = True
    for earlier, later in zip(episode.agent.calls, episode.agent.calls[1:], strict=False):
        known_ids = earlier.all_ids
        if kind == "plain_text" and earlier.token_ids[-1] in episode.eos_token_ids:
            known_ids = known_ids[:-1]  # the end of a completion is no part of its text
            is_one_sequence = False
        assert later.context_ids[: len(known_ids)] == known_ids
        assert later.parent is earlier
    assert (episode.predecessors is None) == is_one_sequence  # then as in a conversation with an Environment


def test_a_history_that_is_rewritten_begins_anew(episodes):
    calls = episodes["rewritten"].agent.calls
    assert [call.parent for call in calls] == [None, None, None]
    assert episodes["rewritten"].predecessors is not None


def test_parallel_calls_are_branches(episodes):
    first, *branches, last = episodes["parallel"].agent.calls
    assert [branch.parent for branch in branches] == [first] * 3
    assert all(branch.context_ids[: len(first.all_ids)] == first.all_ids for branch in branches)
    assert last.parent in branches
    assert len(conversations_of(episodes["parallel"].agent.calls)) == 3


def test_a_compacted_history_is_two_conversations(episodes):
    assert len(conversations_of(episodes["compacted"].agent.calls)) == 2


def test_choices_have_seeds_of_their_own(episodes):
    calls = episodes["choices"].agent.calls
    assert len({tuple(call.context_ids) for call in calls}) == 1
    assert len({tuple(call.token_ids) for call in calls}) == 3


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.real_model
def test_smollm2_trains_on_what_agents_do(warm, tmp_path):
    task = tmp_path / "my_agent.py"
    task.write_text(HEAD + AGENTS)
    model = tmp_path / "SmolLM2-135M-Instruct"
    shutil.copytree(SMOLLM2, model)
    (model / "chat_template.jinja").write_text(chat_template_utils.qwen2_5_chat_template)
    flags = (
        "--sampling.num-generations 2 --sampling.max-completion-tokens 700 --train.max-steps 1 "
        "--train.prompts-per-step 9 --train.micro-batch-size 6 "
        "--model.max-sequence-tokens 1400 --data.eval-limit 1 --eval.num-samples 1 --eval.k 1"
    )
    finish(
        warm.start(
            *(RECIPE, "--task", task, "--preset", "laptop", "--model.name", model),
            *("--output-dir", tmp_path / "run", *shlex.split(flags)),
        )
    )
    [step] = read_metrics(tmp_path / "run")
    assert step["agents/failed_ratio"] == 0
    assert step["agents/conversations"] > 1
    assert step["grad_norm"] > 0
    assert step["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.engines
@pytest.mark.skipif(not vllm_available(), reason="vllm is not installed: make engines")
@pytest.mark.parametrize("sampler", ["starter"], indirect=True)
def test_vllm_answers_agents_as_they_come(sampler, tmp_path):
    engine = start_engine(settings_of("starter"), rank=None, max_sequence_tokens=1024, seed=0)
    by_vllm = VllmSampler(engine, sampler.tokenizer, sampler.eos_token_ids)
    by_vllm.returns_logprobs = True
    try:
        rows = rows_of(tmp_path, AGENTS)
        played = play(by_vllm, rows[: len(KINDS)], group_size=4, budget=700)
    finally:
        by_vllm.close()
    assert [episode.agent.failure for episode in played] == [""] * 4 * len(KINDS)
    for episode in played:
        for call in episode.agent.calls:
            assert call.logprobs == pytest.approx(scored_alone(sampler.model, call), abs=1e-3)


@pytest.mark.engines
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: make engines")
def test_llama_cpp_answers_agents(tmp_path):
    shutil.copytree(starter.model_path(), tmp_path / "run" / "merged")
    export(ExportOptions(tmp_path / "run" / "merged", type=("f32",)))
    [file] = (tmp_path / "run").rglob("*.gguf")
    rows = rows_of(tmp_path, "async def agent(row, base_url):\n    client = CLIENT.with_options(base_url=base_url)\n"
                   "    await reply(client, asks('Hi'), max_tokens=8)\n    return 1.0\n")  # fmt: skip
    by_llama = GgufSampler(read_gguf(file), rows, 100)
    try:
        played = play(by_llama, rows[:4], group_size=1, budget=100)
    finally:
        by_llama.close()
    assert [episode.agent.failure for episode in played] == [""] * 4
    assert all(episode.agent.calls[0].token_ids for episode in played)
