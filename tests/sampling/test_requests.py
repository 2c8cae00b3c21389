"""Completions that other threads ask for: waves, kept caches, stop strings, cancellation and errors."""

import random
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
import torch
from helpers.sampling import sample

from lora_grpo import starter
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError
from lora_grpo.hardware import vllm_available
from lora_grpo.models import base_model
from lora_grpo.sampling import Request, RequestQueue, Sampler, SamplingParams, VllmSampler
from lora_grpo.sampling.samples import end_early
from lora_grpo.sampling.vllm_engine import start_engine

PATIENCE = 600.0  # as good as forever
PROMPT = list(range(20, 60))
PLAIN = Request(PROMPT, seed=1, max_tokens=12, temperature=1.0, top_p=1.0)


@pytest.fixture(scope="module")
def model():
    return base_model.load_base(ModelConfig(name=str(starter.model_path()), bits=16)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return base_model.load_tokenizer(ModelConfig(name=str(starter.model_path()), bits=16))


@pytest.fixture
def sampler(model, tokenizer):
    return Sampler(model, tokenizer, [tokenizer.eos_token_id])


def serve(sampler, queue, *agents, adapter=True):
    """Serve in this thread, while each agent runs in a thread of its own; return what the agents return."""
    results = [None] * len(agents)

    def run(number):
        try:
            results[number] = agents[number]()
        except Exception as error:  # noqa: BLE001 - raised by `serve`
            queue.fail(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(agents))]

    def close_at_the_end():
        for thread in threads:
            thread.join()
        queue.close()

    closing = threading.Thread(target=close_at_the_end)
    for thread in (*threads, closing):
        thread.start()
    try:
        with sampler.awake(adapter=adapter):
            sampler.serve(queue)
    finally:
        closing.join()
    return results


def serve_all(sampler, *requests, adapter=True):
    """Return the completions of requests that make one wave."""
    queue = RequestQueue(patience=PATIENCE)
    futures = [queue.submit(request) for request in requests]
    serve(sampler, queue, adapter=adapter)
    return [future.result() for future in futures]


def with_logprobs(samples):
    return [(completion.token_ids, completion.logprobs) for completion in samples]


def play_episode(queue, number, sleeps):
    """Three turns: one that is kept, two branches of it, and one that continues a branch beside a new prompt."""

    def ask(prompt, turn, **options):
        time.sleep(sleeps.random() * 0.03)
        request = replace(PLAIN, prompt_ids=prompt, seed=100 * number + turn, episode=number, order=(turn,), **options)
        return queue.submit(request)

    prompt = PROMPT[: 20 + number]
    first = ask(prompt, 0, key=(number, 0)).result()
    context = prompt + first.token_ids
    branches = []
    for turn, word in ((1, [70, 71, 72]), (2, [80, 81])):
        request = replace(
            PLAIN, prompt_ids=context + word, seed=100 * number + turn, episode=number, order=(turn,),
            continues=(number, 0), key=(number, turn),
        )  # fmt: skip
        branches.append(queue.submit(request))
    [left, right] = [branch.result() for branch in branches]
    queue.forget((number, 1))
    last = ask([*context, 80, 81, *right.token_ids, 90], 3, continues=(number, 2)).result()
    other = ask(PROMPT[number:], 4).result()
    queue.episode_ended(number)
    return with_logprobs([first, left, right, last, other])


def play_episodes(sampler, seed, count=16):
    queue = RequestQueue(patience=PATIENCE, settle=0.2)
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)  # the order in which the threads start
    for number in numbers:
        queue.episode_started(number)
    agents = [lambda number=number: play_episode(queue, number, random.Random(seed + number)) for number in numbers]
    results = dict(zip(numbers, serve(sampler, queue, *agents), strict=True))
    return [results[number] for number in range(count)]


def test_completions_do_not_depend_on_when_they_are_asked_for(sampler):
    """Bit for bit: also the logprobs, which depend on the batch."""
    first = play_episodes(sampler, 0)
    assert first == play_episodes(sampler, 1)
    for number, samples in enumerate(first):
        for token_ids, logprobs in samples:
            assert len(token_ids) == len(logprobs) > 0, number


@pytest.mark.parametrize(("batch_size", "read"), [(None, 0.8), (3, 0.95)])
def test_continued_caches_give_the_logprobs_of_whole_prompts(sampler, monkeypatch, batch_size, read):
    monkeypatch.setattr(sampler, "wake_up", lambda *, adapter: setattr(sampler, "batch_size", batch_size))
    tokens_read = []
    hook = sampler.model.register_forward_pre_hook(
        lambda module, args, inputs: tokens_read.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    continued = play_episodes(sampler, 0, count=6)
    num_continued = sum(tokens_read)
    tokens_read.clear()
    monkeypatch.setattr(sampler, "_take_kept", lambda prompts, params: {})
    whole = play_episodes(sampler, 0, count=6)
    hook.remove()
    assert num_continued < read * sum(tokens_read)
    for episode, expected in zip(continued, whole, strict=True):
        for (token_ids, logprobs), (expected_ids, expected_logprobs) in zip(episode, expected, strict=True):
            assert token_ids == expected_ids
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


def test_a_key_whose_tokens_do_not_begin_the_prompt_is_read_anew(sampler):
    queue = RequestQueue()
    other = [9, *PROMPT]

    def agent():
        queue.submit(replace(PLAIN, key="a")).result()
        changed = queue.submit(replace(PLAIN, prompt_ids=other, continues="a")).result()
        unknown = queue.submit(replace(PLAIN, prompt_ids=other, continues="b")).result()
        return with_logprobs([changed, unknown])

    [[changed, unknown]] = serve(sampler, queue, agent)
    [expected] = with_logprobs(serve_all(sampler, replace(PLAIN, prompt_ids=other)))
    assert changed == unknown == expected


def test_caches_are_kept_until_they_are_forgotten_or_continued(sampler, monkeypatch):
    queue = RequestQueue()
    kept = []
    monkeypatch.setattr(sampler, "sleep", lambda: kept.append({key for _, key in sampler._kept}))

    def agent():
        first, *_ = [queue.submit(replace(PLAIN, key=key)).result() for key in "abc"]
        queue.forget("b")
        queue.forget("unknown")
        return queue.submit(replace(PLAIN, prompt_ids=PROMPT + first.token_ids, continues="a")).result()

    serve(sampler, queue, agent)
    assert kept == [{"c"}]

    # With a batch size, no more caches are kept than completions are decoded at once.
    monkeypatch.setattr(sampler, "wake_up", lambda *, adapter: setattr(sampler, "batch_size", 2))
    sampler._kept.clear()
    serve_all(sampler, *[replace(PLAIN, seed=n, key=n, order=(n,)) for n in range(5)])
    assert len(kept[-1]) == 2


def test_an_episode_that_asks_for_nothing_delays_the_others_once():
    queue = RequestQueue(patience=1.0, settle=0.01)  # much longer than a busy machine takes
    queue.episode_started(0)
    queue.episode_started(1)
    seconds = []
    for _ in range(2):
        queue.submit(replace(PLAIN, episode=0))
        started = time.monotonic()
        [waiting] = queue.next_wave()
        seconds.append(time.monotonic() - started)
        waiting.finish(None)
    assert seconds[0] >= 0.99 > 0.9 > seconds[1]

    # When it has asked again, the others wait for it again.
    queue.submit(replace(PLAIN, episode=1))
    queue.submit(replace(PLAIN, episode=0))
    assert [waiting.request.episode for waiting in queue.next_wave()] == [0, 1]
    threading.Timer(0.1, queue.episode_ended, [1]).start()
    queue.submit(replace(PLAIN, episode=0))
    started = time.monotonic()
    assert len(queue.next_wave()) == 1 and 0.05 < time.monotonic() - started < 0.99


def test_a_completion_is_there_before_the_others_of_its_wave_are_finished(sampler):
    queue = RequestQueue()
    long = queue.submit(replace(PLAIN, max_tokens=120, order=(1,)))
    short = queue.submit(replace(PLAIN, max_tokens=2))
    long_was_done = []
    short.add_done_callback(lambda future: long_was_done.append(long.done()))
    serve(sampler, queue)
    assert long_was_done == [False] and len(short.result().token_ids) == 2


def test_requests_that_are_canceled_are_not_sampled(sampler):
    queue = RequestQueue()
    queue.submit(PLAIN).cancel()
    in_wave = queue.submit(replace(PLAIN, key="kept", order=(1,)))
    first = queue.submit(replace(PLAIN, max_tokens=1))
    first.add_done_callback(lambda future: in_wave.cancel())
    serve(sampler, queue)
    with pytest.raises(CancelledError):
        in_wave.result()
    assert first.result() and sampler._kept == {}


def test_a_wave_may_have_several_temperatures_and_stop_strings(sampler):
    requests = [
        replace(PLAIN, temperature=temperature, stop=stop, order=(n,))
        for n, (temperature, stop) in enumerate([(1.0, ()), (0.0, ()), (1.0, (" ",)), (0.5, ()), (1.0, ())])
    ]
    together = serve_all(sampler, *requests)
    alone = [completion for request in requests for completion in serve_all(sampler, request)]
    assert together == alone
    assert together[0] == together[4] and together[0] != together[1] != together[3]
    assert together[1].logprobs is None


def test_base_and_adapter_in_one_wave(tokenizer):
    from peft import LoraConfig, get_peft_model

    base = base_model.load_base(ModelConfig(name=str(starter.model_path()), bits=16))
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    sampler = Sampler(get_peft_model(base, config).eval(), tokenizer, [tokenizer.eos_token_id])
    requests = [replace(PLAIN, adapter=adapter, order=(n,)) for n, adapter in enumerate((True, False, True))]
    first, of_base, third = serve_all(sampler, *requests)
    options = {"max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "seed": [1]}
    expected = {}
    for adapter in (True, False):
        sampler.wake_up(adapter=adapter)
        [[expected[adapter]]] = sample(sampler, [PROMPT], 1, **options)
    assert first == third == expected[True] != of_base == expected[False]
    assert serve_all(sampler, requests[0], adapter=False) == [of_base]

    # A cache of the base is not continued with the adapter.
    queue = RequestQueue()

    def agent():
        kept = queue.submit(replace(PLAIN, adapter=False, key="a")).result()
        return queue.submit(replace(PLAIN, prompt_ids=PROMPT + kept.token_ids, continues="a")).result()

    [continued] = serve(sampler, queue, agent)
    [whole] = serve_all(sampler, replace(PLAIN, prompt_ids=PROMPT + of_base.token_ids))
    assert with_logprobs([continued]) == with_logprobs([whole])


def test_a_completion_ends_with_the_token_that_completes_a_stop_string(sampler, tokenizer):
    request = replace(PLAIN, max_tokens=60, prompt_ids=tokenizer.encode("Tom has 5 plums."))
    [whole] = serve_all(sampler, request)
    middle = len(whole.text) // 2
    for stop in (whole.text[middle : middle + 3], whole.text[middle], "no such text"):
        [ended] = serve_all(sampler, replace(request, stop=("neither", stop)))
        assert ended.text == whole.text.partition(stop)[0]
        count = len(ended.token_ids)
        assert ended.token_ids == whole.token_ids[:count]
        assert ended.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-5)
        if stop in whole.text:
            assert stop in tokenizer.decode(ended.token_ids) and not ended.truncated
            assert stop not in tokenizer.decode(ended.token_ids[:-1])

    # An engine that samples on gives the same.
    params = SamplingParams(1, 1.0, 1.0, 60, stop=(whole.text[middle : middle + 3],))
    [[stopped]] = [group for _, group in sampler.stream([request.prompt_ids], params, [1])]
    assert end_early(tokenizer, whole, params) == stopped


def test_an_error_reaches_everybody_who_waits(sampler, monkeypatch):
    queue = RequestQueue()
    futures = [queue.submit(replace(PLAIN, temperature=temperature)) for temperature in (0.5, 1.0)]

    def broken(*arguments):
        raise ValueError("broken")

    monkeypatch.setattr(sampler, "_decode", broken)
    with pytest.raises(ValueError, match="broken"):
        serve(sampler, queue)
    for future in (*futures, queue.submit(PLAIN)):
        with pytest.raises(ValueError, match="broken"):
            future.result()


def test_ctrl_c_ends_the_main_thread_and_is_an_error_in_the_others(sampler, monkeypatch):
    queue = RequestQueue()
    future = queue.submit(PLAIN)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sampler, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve(sampler, queue)
    with pytest.raises(RunError, match="interrupted"):
        future.result()


def test_a_closed_queue_takes_no_requests(sampler):
    queue = RequestQueue()
    queue.close()
    assert queue.next_wave() is None
    with pytest.raises(RunError, match="takes no more"):
        queue.submit(PLAIN).result()


@pytest.mark.engines
@pytest.mark.skipif(not vllm_available(), reason="vllm is not installed: make engines")
def test_vllm_takes_requests_as_they_come(tokenizer, tmp_path):
    from peft import LoraConfig, get_peft_model

    settings = ModelConfig(name=str(starter.model_path()), bits=16)
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(base_model.load_base(settings), config).save_pretrained(tmp_path / "adapter")
    engine = start_engine(settings, rank=8, max_sequence_tokens=256, seed=0)
    sampler = VllmSampler(engine, tokenizer, [tokenizer.eos_token_id], adapter=tmp_path / "adapter")
    try:
        expected = {}
        for adapter in (True, False):
            params = SamplingParams(1, 1.0, 0.95, 24)
            prompts = [PROMPT[: 10 + number] for number in range(16)]
            with sampler.awake(adapter=adapter):
                expected[adapter] = [group[0] for _, group in sorted(sampler.stream(prompts, params, range(16)))]
        assert expected[True] != expected[False]

        queue = RequestQueue()

        def agent(number):
            samples = []
            for adapter in (True, False):
                time.sleep(random.random() * 0.05)
                request = Request(PROMPT[: 10 + number], number, 24, 1.0, 0.95, adapter=adapter, episode=number)
                samples.append(queue.submit(request).result())
            if number == 0:  # a client that hangs up
                future = queue.submit(replace(request, max_tokens=200))
                time.sleep(0.02)
                future.cancel()
            return samples

        results = serve(sampler, queue, *[lambda number=number: agent(number) for number in range(16)])
        assert results == [[with_adapter, of_base] for with_adapter, of_base in zip(*expected.values(), strict=True)]
        assert not engine._engine.has_unfinished_requests()

        [whole] = serve_all(sampler, replace(PLAIN, max_tokens=40))
        stop = whole.text[len(whole.text) // 2 :][:2]
        [ended] = serve_all(sampler, replace(PLAIN, max_tokens=40, stop=(stop,)))
        assert ended.text == whole.text.partition(stop)[0] and not ended.truncated
    finally:
        sampler.close()
