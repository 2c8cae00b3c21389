"""The tokens of an episode: what parallel requests share is paid for once."""

import asyncio
import json
import threading

import pytest
from trl import chat_template_utils

from lora_grpo import starter
from lora_grpo.config import ModelConfig
from lora_grpo.endpoint import EpisodeLimits, LiveEpisode, Policy
from lora_grpo.endpoint.protocol import ChatRequest, RequestError, parse
from lora_grpo.models import base_model
from lora_grpo.rollouts import tree_row
from lora_grpo.sampling import RequestQueue, SampledTokens

MAX_TOKENS = 4
QUESTION = {"role": "user", "content": "Tom has 3 red plums and 4 yellow plums in his basket. How many plums has he?"}
OTHER_QUESTION = {"role": "user", "content": "Anna reads 12 pages a day for a week. Which page does she reach?"}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = base_model.load_tokenizer(ModelConfig(name=str(starter.model_path())))
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    return tokenizer


def ask(episode, *messages):
    body = {"messages": messages, "max_tokens": MAX_TOKENS}
    return episode.chat(parse(json.dumps(body).encode(), ChatRequest))


def play(tokenizer, agent, *, budget):
    """Return the calls of an agent's episode. The model writes two tokens for each request, and ends its turn."""
    queue = RequestQueue()

    def encode(prompts):
        return tokenizer(prompts, add_special_tokens=False)["input_ids"]

    def answer():
        while (wave := queue.next_wave()) is not None:
            for waiting in wave:
                token_ids = [*encode(["Yes"])[0][:2], tokenizer.eos_token_id]
                text = tokenizer.decode(token_ids, skip_special_tokens=True)
                waiting.finish(SampledTokens(token_ids, text, truncated=False, logprobs=[-1.0] * 3))

    limits = EpisodeLimits(temperature=1.0, top_p=1.0, prompt_tokens=512, budget=budget, turn_tokens=MAX_TOKENS)
    episode = LiveEpisode(0, 0, Policy(tokenizer, [tokenizer.eos_token_id], encode, queue), limits)
    model = threading.Thread(target=answer, daemon=True)
    model.start()
    try:
        asyncio.run(agent(episode))
    finally:
        queue.close()
        model.join()
    return episode.end()


def num_tokens(calls):
    """Return how many tokens follow the prompt of an episode."""
    return len(tree_row([(call.context_ids, call.token_ids, call.logprobs) for call in calls]).token_ids)


def test_parallel_requests_pay_once_for_what_they_share(tokenizer):
    async def votes_twice(episode):
        answers = await asyncio.gather(*(ask(episode, QUESTION) for _ in range(5)))
        history = [QUESTION, answers[0].choices[0].message(), OTHER_QUESTION]
        await asyncio.gather(*(ask(episode, *history) for _ in range(5)))

    calls = play(tokenizer, votes_twice, budget=1000)
    second_question = len(calls[-1].context_ids) - len(calls[0].all_ids)
    assert num_tokens(calls) == 10 * 3 + second_question

    # Five requests wait at once, each for at most four tokens. What an answer does not need is free again.
    budget = 5 * 3 + second_question + 5 * MAX_TOKENS
    assert num_tokens(play(tokenizer, votes_twice, budget=budget)) <= budget
    with pytest.raises(RequestError, match="maximum context length"):
        play(tokenizer, votes_twice, budget=budget - 4 * MAX_TOKENS)


def test_parallel_requests_pay_for_what_they_do_not_share(tokenizer):
    async def asks_both(episode):
        await asyncio.gather(ask(episode, QUESTION), ask(episode, OTHER_QUESTION))

    calls = play(tokenizer, asks_both, budget=1000)
    with pytest.raises(RequestError, match="maximum context length"):
        play(tokenizer, asks_both, budget=num_tokens(calls) // 2)


def test_a_request_that_is_sent_again_after_it_was_canceled_costs_nothing(tokenizer):
    async def hangs_up(episode):
        first = await ask(episode, QUESTION)
        history = [QUESTION, first.choices[0].message(), OTHER_QUESTION]
        for _ in range(3):
            canceled = asyncio.ensure_future(ask(episode, *history))
            await asyncio.sleep(0)  # it is accepted
            canceled.cancel()
        await ask(episode, *history)

    num_needed = num_tokens(play(tokenizer, hangs_up, budget=1000))
    play(tokenizer, hangs_up, budget=num_needed + 4 * MAX_TOKENS)


def test_first_requests_that_were_canceled_cost_nothing(tokenizer):
    async def asks_both(episode):
        await asyncio.gather(ask(episode, QUESTION), ask(episode, OTHER_QUESTION))

    async def hangs_up(episode):
        for _ in range(20):
            requests = [asyncio.ensure_future(ask(episode, question)) for question in (QUESTION, OTHER_QUESTION)]
            await asyncio.sleep(0)  # they are accepted
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)
            assert all(request.cancelled() for request in requests)
        await asks_both(episode)

    calls = play(tokenizer, asks_both, budget=1000)
    play(tokenizer, hangs_up, budget=max(len(call.context_ids) for call in calls) + 2 * MAX_TOKENS)
