"""Compare continuous batching with a decoder that starts all completions together."""

import copy
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers.sampling import sample
from helpers.tiny_models import CONFIGS, OTHERS, make_model
from starter_model.corpus import chat_prompt
from starter_model.problems import pool
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    MistralConfig,
)

from lora_grpo import starter
from lora_grpo.errors import RunError
from lora_grpo.sampling import batch_memory
from lora_grpo.sampling import sampler as sampler_module
from lora_grpo.sampling.growing_cache import cache_argument, has_full_attention
from lora_grpo.sampling.merged_copy import use_grouped_attention
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.samples import SamplingParams
from lora_grpo.sampling.token_selection import select_tokens, uniform_numbers

GREEDY = {"max_tokens": 40, "temperature": 0.0, "top_p": 1.0}
SAMPLED = {"max_tokens": 40, "temperature": 1.0, "top_p": 0.95}
# With these seeds, no uniform number is so close to the boundary between two tokens that rounding matters.
SEEDS = random.Random(0).sample(range(2**40), 90)
CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes. Error code 12"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(starter.model_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(starter.model_path())


@pytest.fixture(scope="module")
def prompts(tokenizer):
    rendered = [chat_prompt(problem.question) for problem in pool("eval", 30)]
    assert len({len(ids) for ids in tokenizer(rendered)["input_ids"]}) > 10
    return rendered


@pytest.fixture
def sampler(model, tokenizer):
    return Sampler(model, tokenizer, [tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def together(model, tokenizer, prompts):
    """Three completions for each of 30 prompts, decoded all together, with greedy decoding and with sampling."""
    sampler = Sampler(model, tokenizer, [tokenizer.eos_token_id])
    greedy = sample(sampler, prompts, 3, **GREEDY, seed=SEEDS)
    sampled = sample(sampler, prompts, 3, **SAMPLED, seed=SEEDS)
    assert {completion.truncated for group in greedy + sampled for completion in group} == {True, False}
    return {"greedy": greedy, "sampled": sampled}


@pytest.fixture
def passes(model):
    """The (rows, columns) of every forward pass."""
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    hook.remove()


@pytest.fixture
def small_memory(model):
    """Make a forward pass with more than `max_rows` rows fail with `error`, as if memory ran out.

    `failed_caches` has weak references to the caches of such passes, and `are_held` whether these caches still existed
    when each later pass began.
    """
    memory = SimpleNamespace(
        max_rows=10**9, error=torch.OutOfMemoryError("CUDA out of memory."), failed_caches=[], are_held=[]
    )

    def fail_if_large(module, args, inputs):
        memory.are_held += [cache() is not None for cache in memory.failed_caches]
        if len(inputs["input_ids"]) > memory.max_rows:
            memory.failed_caches.append(weakref.ref(inputs[cache_argument(module)]))
            raise type(memory.error)(*memory.error.args)

    hook = model.register_forward_pre_hook(fail_if_large, with_kwargs=True)
    yield memory
    hook.remove()


def reference(model, tokenizer, prompts, samples, *, max_tokens, temperature, top_p, seed, select_tokens, eos=None):
    """A plain decoding loop without continuous batching, with the cache and the attention of transformers."""
    pad = tokenizer.pad_token_id
    eos = torch.tensor(eos or [tokenizer.eos_token_id])
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    cached = {cache_argument(model): cache}
    output = model(input_ids=input_ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **cached)
    cache.reorder_cache(torch.arange(len(prompts)).repeat_interleave(samples))
    logits = output.logits[:, -1].repeat_interleave(samples, dim=0)
    mask = mask.repeat_interleave(samples, dim=0)
    position = positions[:, -1].repeat_interleave(samples) + 1
    uniform = uniform_numbers(seed, max_tokens, "cpu")
    rows = torch.arange(len(prompts) * samples)
    total = rows.numel()
    samples = torch.full((total, max_tokens), pad)
    lengths = torch.full((total,), max_tokens)
    for step in range(max_tokens):
        token, _ = select_tokens(logits.float(), temperature, top_p, uniform[rows, step])
        samples[rows, step] = token
        ended = torch.isin(token, eos)
        lengths[rows[ended]] = step + 1
        if step + 1 == max_tokens or bool(ended.all()):
            break
        if bool(ended.any()):
            running = (~ended).nonzero().squeeze(1)
            rows = rows[running]
            token = token[running]
            mask = mask[running]
            position = position[running]
            cache.reorder_cache(running)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        output = model(input_ids=token[:, None], attention_mask=mask, position_ids=position[:, None], **cached)
        logits = output.logits[:, -1]
        position = position + 1
    return [ids[:length] for ids, length in zip(samples.tolist(), lengths.tolist(), strict=True)]


# All together, as a training step does


@pytest.mark.parametrize("name", ["starter", "qwen3", "qwen3_5 text", "gemma2", "phi3", "lfm2", "opt", "qwen3 moe"])
def test_every_step_has_the_logits_of_a_plain_loop(name, model, tokenizer, prompts, monkeypatch, tmp_path):
    """Several query heads for a key head, positions of two kinds, experts, a soft cap, windows, recurrent states."""
    if name != "starter":
        folder = make_model(tmp_path / "model", (CONFIGS | OTHERS)[name])
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    steps = {}  # by their random number: logits and token

    def record(logits, temperature, top_p, numbers):
        tokens, logprobs = select_tokens(logits, temperature, top_p, numbers)
        for number, *step in zip(numbers.tolist(), logits, tokens, strict=True):
            assert number not in steps
            steps[number] = step
        return tokens, logprobs

    def compare(logits, temperature, top_p, numbers):
        """Select the token of the plain loop, because rounding may change it in a random model."""
        expected = [steps.pop(number) for number in numbers.tolist()]
        assert (logits - torch.stack([logits for logits, _ in expected])).abs().max() < 1e-4
        return torch.stack([token for _, token in expected]), torch.zeros(len(expected))

    ends = list(range(0, 768, 20))  # many end tokens, so that some completions end
    plain = Sampler(model, tokenizer, ends)
    grouped = Sampler(use_grouped_attention(copy.deepcopy(model)), tokenizer, ends)
    for sampler in (plain, grouped):
        with torch.no_grad():
            ids = sampler.encode(prompts[:6])
            expected = reference(model, tokenizer, ids, 3, **SAMPLED, seed=SEEDS[:18], select_tokens=record, eos=ends)
        assert len({len(ids) for ids in expected}) > 3
        with monkeypatch.context() as patch:
            patch.setattr(sampler_module, "select_tokens", compare)
            samples = sample(sampler, prompts[:6], 3, **SAMPLED, seed=SEEDS[:18])
        assert [completion.token_ids for group in samples for completion in group] == expected and not steps


# Continuous


@pytest.mark.parametrize(
    ("kind", "settings", "size"), [("sampled", SAMPLED, 7), ("greedy", GREEDY, 16), ("sampled", SAMPLED, 64)]
)
def test_completions_do_not_depend_on_the_batch_size(prompts, sampler, together, passes, kind, settings, size):
    sampler.batch_size = size
    samples = sample(sampler, prompts, 3, **settings, seed=SEEDS)
    assert samples == together[kind]
    assert passes.pop(0)[0] == 1  # the tokens that all prompts start with
    refills = [rows for rows, columns in passes if columns > 1]
    # Each prefill has the prompts of a quarter of the batch.
    assert len(refills) == -(-90 // (size // 4)) and max(refills) <= size // 4 // 3 + 2
    assert max(rows for rows, columns in passes if columns == 1) <= size
    # The batch stays full until no completion is waiting.
    started_last = max(n for n, (_, columns) in enumerate(passes) if columns > 1)
    running = [rows for rows, columns in passes[:started_last] if columns == 1]
    assert sum(running) > 0.7 * size * len(running)


def test_a_completion_depends_on_its_own_seed_alone(prompts, sampler, together):
    sampler.batch_size = 5
    indices = [29, 4, 17]
    seeds = [SEEDS[3 * index + n] for index in indices for n in (2, 0)]
    alone = sample(sampler, [prompts[index] for index in indices], 2, **SAMPLED, seed=seeds)
    assert alone == [[together["sampled"][index][n] for n in (2, 0)] for index in indices]

    [same_seed] = sample(sampler, prompts[:1], 3, **SAMPLED, seed=[8, 8, 8])
    assert len({completion.text for completion in same_seed}) == 1
    [other_seeds] = sample(sampler, prompts[:1], 9, **SAMPLED, seed=range(9))
    assert len({completion.text for completion in other_seeds}) > 1


def test_sample_wakes_up_the_sampler_and_lets_it_sleep_also_after_ctrl_c(prompts, tokenizer, model):
    calls = []

    class Recorded(Sampler):
        def wake_up(self, *, adapter):
            calls.append(("wake_up", adapter))

        def sleep(self):
            calls.append("sleep")

    sampler = Recorded(model, tokenizer, [tokenizer.eos_token_id])
    sampler.sample(prompts[:1], SamplingParams(1, 1.0, 0.95, 4), SEEDS[:1], adapter=False)
    with pytest.raises(KeyboardInterrupt), sampler.awake(adapter=True):
        raise KeyboardInterrupt
    assert calls == [("wake_up", False), "sleep", ("wake_up", True), "sleep"]


def test_a_sliding_window_is_decoded_in_batches_that_end_together(tokenizer, prompts):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=768, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, initializer_range=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    assert not has_full_attention(config)
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    sampler = Sampler(model, tokenizer, list(range(0, 768, 20)))  # many end tokens, so that some completions end
    expected = sample(sampler, prompts[:10], 3, **SAMPLED, seed=range(30))
    assert len({len(completion.token_ids) for group in expected for completion in group}) > 5
    sampler.batch_size = 8
    shapes.clear()
    assert sample(sampler, prompts[:10], 3, **SAMPLED, seed=range(30)) == expected
    assert len([rows for rows, columns in shapes if columns > 1]) == 4
    assert max(rows for rows, _ in shapes) == 8


# Memory that runs out


def test_if_memory_runs_out_the_call_continues_with_half_the_batch(prompts, sampler, together, small_memory, capsys):
    small_memory.max_rows = 20
    small_memory.error = RuntimeError(CPU_MESSAGE)
    sampler.batch_size = 64
    assert sample(sampler, prompts, 3, **SAMPLED, seed=SEEDS) == together["sampled"]
    assert sampler.batch_size == 16
    printed = capsys.readouterr().err
    assert "64; retrying with 32" in printed and "32; retrying with 16" in printed
    # The memory of a failed pass was freed before the next one started.
    assert len(small_memory.failed_caches) == 2
    assert not any(small_memory.are_held)

    small_memory.max_rows = 0
    sampler.batch_size = 4
    with pytest.raises(RunError, match=r"^out of memory .*4 bits"):
        sample(sampler, prompts[:2], 2, **GREEDY, seed=0)


def test_a_training_step_is_never_split_silently(prompts, sampler, small_memory):
    small_memory.max_rows = 4
    with pytest.raises(torch.OutOfMemoryError):
        sample(sampler, prompts[:6], 1, **GREEDY, seed=0)
    assert sampler.batch_size is None


# Batch size from memory


def test_the_batch_size_on_a_cpu_depends_on_the_machine_and_the_processes(sampler, prompts, monkeypatch):
    sampler.fit_batch(prompts[:1], 100)
    assert sampler.batch_size == batch_memory.MAX_BATCH_SIZE
    prompt_tokens = len(sampler.encode(prompts[:1])[0])
    row_bytes = batch_memory.bytes_per_completion(sampler.model, prompt_tokens, 100)
    for rows, size in ((0.5, 1), (1, 1), (2.5, 2), (31, 16), (33, 32)):
        monkeypatch.setattr(batch_memory.machine, "machine_memory", lambda rows=rows: (4 * row_bytes * rows, 0))
        sampler.fit_batch(prompts[:1], 100)
        assert sampler.batch_size == size
    monkeypatch.setenv("WORLD_SIZE", "2")  # two processes share the memory
    sampler.fit_batch(prompts[:1], 100)
    assert sampler.batch_size == size // 2
