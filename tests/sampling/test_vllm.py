"""Evaluate with the real vLLM, which `make engines` installs."""

import importlib.util
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.sampling import sample
from safetensors.torch import load_file, save_file

from lora_grpo.config.schema import ModelConfig
from lora_grpo.errors import RunError
from lora_grpo.hardware import vllm_available
from lora_grpo.models import ADAPTER_WEIGHTS, base_model, engines
from lora_grpo.prompts.chat import add_prompts, render_row
from lora_grpo.sampling.merged_copy import MergedCopySampler
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.samples import SamplingParams
from lora_grpo.sampling.token_selection import completion_seed
from lora_grpo.sampling.unsloth_sampler import SharedVllmSampler
from lora_grpo.sampling.vllm_engine import start_engine
from lora_grpo.sampling.vllm_sampler import VllmSampler, served_rank
from lora_grpo.tasks import sources
from lora_grpo.tasks.registry import get_task

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not vllm_available(), reason="vllm is not installed: make engines"),
]

GREEDY = {"max_tokens": 48, "temperature": 0.0, "top_p": 1.0, "seed": 0}
SAMPLED = {"max_tokens": 48, "temperature": 1.0, "top_p": 0.95, "seed": 3}
TOKENS = 256
STARTER = get_task("starter")
TOKENIZER = base_model.load_tokenizer(ModelConfig())


def ask(split, number):
    rows = add_prompts(sources.sample(STARTER.load(split), number, 0), "xml")
    return rows, [render_row(TOKENIZER, row) for row in rows]


@pytest.fixture(scope="module")
def prompts():
    return ask("eval", 200)[1]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter of rank 8, trained for a few steps on answers in a different format."""
    from peft import LoraConfig, get_peft_model

    engines.prepare_torch(0)
    base = base_model.load_base(ModelConfig(bits=16))
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    rows, requested = ask("train", 256)
    for start in range(0, 256, 16):
        texts = [
            prompt + STARTER.gold({**row, "prompt_style": "hashes"}) + TOKENIZER.eos_token
            for row, prompt in zip(rows[start : start + 16], requested[start : start + 16], strict=True)
        ]
        batch = TOKENIZER(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


def changed_copy(adapter, folder, change):
    """Copy an adapter to a folder, with other weights: `change(name, weight)` returns a name and a weight."""
    shutil.copytree(adapter, folder)
    weights = load_file(adapter / ADAPTER_WEIGHTS)
    save_file(dict(change(name, weight) for name, weight in weights.items()), folder / ADAPTER_WEIGHTS)
    return folder


def engine(settings, rank):
    return start_engine(settings, rank=rank, max_sequence_tokens=TOKENS, seed=0)


PLAIN = pytest.mark.parametrize("pair", [16], indirect=True)
"""One engine at a time. Each starts after the tests of the previous one."""


@pytest.fixture(scope="module")
def pair(request, adapter):
    """The vLLM sampler and the reference: the model itself for 16 bits, or a dequantized copy for 4 bits."""
    from peft import PeftModel

    bits, folder = (16, None) if request.param == "whole" else (request.param, adapter)
    settings = ModelConfig(bits=bits)
    model = PeftModel.from_pretrained(base_model.load_base(settings), adapter).eval()
    eos = [TOKENIZER.eos_token_id]
    reference = (Sampler if bits == 16 else MergedCopySampler)(model, TOKENIZER, eos)
    sampler = VllmSampler(engine(settings, served_rank(folder) if folder else None), TOKENIZER, eos, adapter=folder)
    yield sampler, reference
    sampler.close()


@pytest.fixture
def sampler(pair):
    pair[0].wake_up(adapter=True)
    return pair[0]


def greedy(sampler, prompts, *, adapter):
    sampler.wake_up(adapter=adapter)
    return [group[0] for group in sample(sampler, prompts, 1, **GREEDY)]


def gap(reference, prompt, one, other):
    """Return the difference between the reference logits of the first tokens that differ."""
    index = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    ids = torch.tensor([reference.encode([prompt])[0] + one[:index]])
    with torch.no_grad():
        logits = reference.model(ids).logits[0, -1]
    return abs(float(logits[one[index]] - logits[other[index]]))


WHOLE = pytest.param("whole", False, marks=pytest.mark.exhaustive)
"""An engine without adapters, which `agents/test_exact_tokens.py` and `rollouts/test_loop.py` compare as well."""


@pytest.mark.parametrize(
    ("pair", "adapter_on"), [(16, True), (16, False), (4, True), (4, False), WHOLE], indirect=["pair"]
)
def test_greedy_completions_are_those_of_transformers(request, pair, prompts, adapter_on):
    if request.node.callspec.params["pair"] != 16 and not adapter_on:
        prompts = prompts[:100]  # fewer prompts for the bases of other engines, to save time
    sampler, reference = pair
    samples = greedy(sampler, prompts, adapter=adapter_on)
    expected = greedy(reference, prompts, adapter=adapter_on)
    differing = [index for index in range(len(prompts)) if samples[index] != expected[index]]
    print(f"{len(prompts) - len(differing)} of {len(prompts)} completions identical")
    assert len(differing) <= len(prompts) / 100
    for index in differing:
        assert gap(reference, prompts[index], samples[index].token_ids, expected[index].token_ids) < 1e-3


@PLAIN
def test_vllm_does_not_see_flashinfer(sampler):
    """FlashInfer 0.6.16 cannot be imported on Python 3.11."""
    assert importlib.util.find_spec("flashinfer") is None and "flashinfer" in sys.modules


@PLAIN
def test_a_seed_determines_its_completion(sampler, prompts):
    twice = [prompts[0], prompts[1], prompts[0]]
    seeds = [5, 6, 7, 8, 9, 10]
    first = sample(sampler, twice, 2, **{**SAMPLED, "seed": seeds})
    assert sample(sampler, twice, 2, **{**SAMPLED, "seed": seeds}) == first
    # A seed gives the same completion alone, in another order and in a larger batch.
    assert sample(sampler, twice[1:2], 2, **{**SAMPLED, "seed": [8, 7]}) == [first[1][::-1]]
    texts = {rollout.text for group in (first[0], first[2]) for rollout in group}
    assert len(texts) == 4
    assert sample(sampler, twice, 2, **{**SAMPLED, "seed": [seed + 100 for seed in seeds]}) != first


@PLAIN
def test_closing_a_stream_aborts_the_rest(sampler, prompts):
    expected = sample(sampler, prompts[:20], 2, **SAMPLED)
    seeds = [completion_seed(3, "test", number) for number in range(40)]  # those of SAMPLED
    stream = sampler.stream(prompts[:20], SamplingParams(2, 1.0, 0.95, 48), seeds)
    kept = dict(next(stream) for _ in range(3))
    with pytest.raises(RuntimeError, match="is running; finish or close it"):
        sample(sampler, prompts[:1], 1, **SAMPLED)
    stream.close()
    assert len(kept) == 3 and kept == {index: expected[index] for index in kept}
    assert not sampler.engine._engine.has_unfinished_requests()
    assert sample(sampler, prompts[:20], 2, **SAMPLED) == expected


@PLAIN
def test_the_engine_of_unsloth_yields_prompts_as_they_finish(sampler, prompts, adapter):
    engine = SimpleNamespace(llm_engine=sampler.engine._engine)
    load = {"save_lora": lambda folder: None, "load_lora": lambda folder: sampler.engine.load_adapter(adapter)}
    shared = SharedVllmSampler(SimpleNamespace(vllm_engine=engine, **load), TOKENIZER, sampler.eos_token_ids)
    expected = sample(sampler, prompts[:20], 2, **SAMPLED)
    shared.wake_up(adapter=True)
    params = SamplingParams(2, 1.0, 0.95, 48)
    seeds = [completion_seed(3, "test", number) for number in range(40)]  # those of SAMPLED
    streamed = dict(shared.stream(prompts[:20], params, seeds))
    assert streamed == dict(enumerate(expected))
    assert [*streamed] != sorted(streamed)


@PLAIN
def test_an_ignored_adapter_is_an_error(pair, monkeypatch, adapter):
    sampler = pair[0]
    add = sampler.engine._engine.add_request
    assert sampler._load_saved(adapter)
    monkeypatch.setattr(sampler.engine._engine, "add_request", lambda *requested, lora_request: add(*requested))
    with pytest.raises(RunError, match=r"ignores the adapter in"):
        sampler._load_saved(adapter)


@PLAIN
def test_an_adapter_for_other_modules_is_an_error(pair, adapter, tmp_path):
    """vLLM loads it, finds none of its modules in the model, and answers with the base model."""
    sampler = pair[0]
    renamed = changed_copy(
        adapter, tmp_path / "renamed", lambda name, weight: (name.replace(".layers.", ".blocks.layers."), weight)
    )
    with pytest.raises(RunError, match=r"ignores the adapter in"):
        sampler._load_saved(renamed)


@PLAIN
def test_three_adapters_give_three_answers(pair, prompts, adapter, tmp_path):
    """Each replaces the one before, as in training."""
    from peft import PeftModel

    sampler = pair[0]
    answers = []
    for scale in (1.0, 0.5, -1.0):
        folder = changed_copy(
            adapter,
            tmp_path / str(scale),
            lambda name, weight, scale=scale: (name, weight * scale if "lora_B" in name else weight),
        )
        model = PeftModel.from_pretrained(base_model.load_base(ModelConfig(bits=16)), folder).eval()
        expected = greedy(Sampler(model, TOKENIZER, sampler.eos_token_ids), prompts[:20], adapter=True)
        served = VllmSampler(sampler.engine, TOKENIZER, sampler.eos_token_ids, adapter=folder)
        answers.append(greedy(served, prompts[:20], adapter=True))
        assert answers[-1] == expected
    assert answers[0] != answers[1] != answers[2] != answers[0]


def test_an_adapter_in_16_bits_gives_the_logprobs_of_one_in_float32(prompts, adapter, monkeypatch):
    """On a GPU, the base and vLLM's adapters have 16 bits, to which vLLM rounds the float32 file of the adapter."""
    from peft import PeftModel

    settings = ModelConfig(bits=16)
    model = PeftModel.from_pretrained(base_model.load_base(settings), adapter).eval()
    monkeypatch.setattr(base_model, "compute_dtype", lambda: torch.bfloat16)
    in_16_bits = engine(settings, served_rank(adapter))
    assert in_16_bits.adapter_dtype == torch.bfloat16
    eos = [TOKENIZER.eos_token_id]
    saved_in_float32 = VllmSampler(in_16_bits, TOKENIZER, eos, adapter=adapter)
    saved_in_float32.returns_logprobs = True
    in_training = VllmSampler(in_16_bits, TOKENIZER, eos, policy=model)

    def completions(sampler, *, adapter=True):
        sampler.wake_up(adapter=adapter)
        return sample(sampler, prompts[:20], 2, **SAMPLED)

    try:
        expected = completions(saved_in_float32)
        assert completions(in_training) == expected
        assert in_training.phase_seconds["adapter_sync"] > 0

        # The adapter is used, and also its next version.
        assert completions(in_training, adapter=False) != expected
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.mul_(0.5)
        assert completions(in_training) != expected
    finally:
        in_16_bits.close()
