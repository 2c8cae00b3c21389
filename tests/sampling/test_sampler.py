import math

import pytest
import torch
from helpers.made_runs import WIDTH, make_adapter
from helpers.sampling import sample
from safetensors.torch import load_file, save_file

from lora_grpo.config.schema import ModelConfig, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.models.policy import load_policy, save_adapter
from lora_grpo.models.target import ModelFlags, resolve
from lora_grpo.prompts.chat import render
from lora_grpo.prompts.styles import SYSTEM_PROMPTS
from lora_grpo.sampling import build
from lora_grpo.sampling.merged_copy import MergedCopySampler
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.token_selection import select_tokens
from lora_grpo.sampling.unsloth_sampler import GenerateSampler

QUESTIONS = ["Tom has 12 plums and buys 3 more. How many?", "Sam buys 5 plums at $12 each. How much does Sam pay?"]
GREEDY = {"max_tokens": 40, "temperature": 0.0, "top_p": 1.0, "seed": 0}
SAMPLED = {"max_tokens": 40, "temperature": 1.0, "top_p": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def policy():
    policy = load_policy(RunConfig(model=ModelConfig(name="starter", engine="peft")))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:  # a new adapter is zero and would hide a sampler that ignores it
            parameter.data.normal_(std=0.02, generator=generator)
    return policy


@pytest.fixture(scope="module")
def prompts(policy):
    system = {"role": "system", "content": SYSTEM_PROMPTS["xml"]}
    return [render(policy.tokenizer, [system, {"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def sampler(policy):
    sampler = MergedCopySampler(policy.model, policy.tokenizer, policy.eos_token_ids)
    sampler.wake_up(adapter=True)
    return sampler


def test_greedy_decoding_equals_generate(policy, prompts):
    live = Sampler(policy.model, policy.tokenizer, policy.eos_token_ids)
    inputs = policy.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    expected = policy.model.generate(**inputs, do_sample=False, max_new_tokens=40)[:, inputs["input_ids"].shape[1] :]
    for reference, [rollout] in zip(expected.tolist(), sample(live, prompts, 1, **GREEDY), strict=True):
        assert rollout.token_ids == reference[: len(rollout.token_ids)]
        assert rollout.token_ids[-1] in policy.eos_token_ids and not rollout.truncated


def test_the_merged_copy_is_the_policy(policy, prompts, sampler):
    inputs = policy.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        live = policy.model(**inputs).logits
        copy = sampler.model(**inputs).logits
    assert (live - copy).abs().max() < 1e-3 < live.abs().max()


@pytest.mark.parametrize("kind", [Sampler, GenerateSampler])
def test_the_live_model_is_sampled_with_and_without_its_adapter(policy, prompts, sampler, kind):
    live = kind(policy.model, policy.tokenizer, policy.eos_token_ids)
    for adapter in (True, False):
        live.wake_up(adapter=adapter)
        sampler.wake_up(adapter=adapter)
        assert sample(live, prompts, 1, **GREEDY) == sample(sampler, prompts, 1, **GREEDY)
    sampler.wake_up(adapter=True)
    live.wake_up(adapter=True)
    first = sample(live, prompts, 4, **SAMPLED)
    assert first == sample(live, prompts, 4, **SAMPLED)
    assert [len(group) for group in first] == [4, 4] and len({rollout.text for rollout in first[0]}) > 1


def test_weights_that_are_frozen_stay_frozen(policy):
    """As with LoRA-FA, which trains B alone."""
    live = Sampler(policy.model, policy.tokenizer, policy.eos_token_ids)
    frozen = [parameter for name, parameter in policy.model.named_parameters() if "lora_A" in name]
    for parameter in frozen:
        parameter.requires_grad = False

    def trained():
        return [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]

    expected = trained()
    assert expected and all("lora_B" in name for name in expected)
    for adapter in (True, False, True):
        live.wake_up(adapter=adapter)
        assert trained() == expected
    for parameter in frozen:
        parameter.requires_grad = True


def test_sampled_tokens_follow_the_model_distribution(policy, prompts, sampler):
    """Compare the first token of 4,000 samples with the softmax: total variation below 0.05 (expected about 0.02)."""
    samples = sample(sampler, prompts[:1], 4000, max_tokens=1, temperature=0.7, top_p=1.0, seed=1)[0]
    first_tokens = torch.tensor([sample.token_ids[0] for sample in samples])
    counts = torch.bincount(first_tokens, minlength=sampler.model.config.vocab_size)
    ids = policy.tokenizer(prompts[0], return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = torch.softmax(sampler.model(ids).logits[0, -1] / 0.7, dim=-1)
    assert 0.5 * (counts / 4000 - expected).abs().sum() < 0.05
    assert all(sample.truncated or sample.token_ids[0] in sampler.eos_token_ids for sample in samples)


@pytest.mark.parametrize("harm", ["NaN", "other names", "a missing weight"])
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, policy, harm):
    save_adapter(policy.model, policy.tokenizer, tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    if harm == "NaN":
        weights[name][0, 0] = math.nan
    elif harm == "other names":
        weights[f"x.{name}"] = weights.pop(name)
    else:
        del weights[name]
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    target = resolve(str(tmp_path / "adapter"), ModelFlags())
    with pytest.raises(UserError, match="does not fit this base or is damaged"):
        build.load_sampler(target, "transformers", policy.tokenizer, 64, 0)


HARMS = {
    "another base": "cannot be loaded into its base model.*--base",
    "torn file": r"adapter_model.safetensors is not a complete safetensors file \(",
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_adapter_that_does_not_load_is_one_line(tmp_path, harm):
    folder = make_adapter(tmp_path / "adapter", width=256 if harm == "another base" else WIDTH, base="starter")
    if harm == "torn file":
        (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 99)
    with pytest.raises(UserError, match=HARMS[harm]) as caught:
        target = resolve(str(folder), ModelFlags())
        build.load_sampler(target, "transformers", build.load_tokenizer(target), 64, 0)
    assert "\n" not in str(caught.value)


CASES = [(0.0, 1.0, 0), (0.49, 1.0, 0), (0.51, 1.0, 1), (0.79, 1.0, 1), (0.81, 1.0, 2), (0.999, 1.0, 2)]
CASES += [(0.999, 0.8, 1), (0.999, 0.5, 0), (0.6, 0.51, 0), (0.7, 0.51, 1)]


@pytest.mark.parametrize(("uniform", "top_p", "token"), CASES)
def test_pick_inverts_the_cumulative_distribution(uniform, top_p, token):
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    assert select_tokens(logits, 1.0, top_p, torch.tensor([uniform]))[0].tolist() == [token]


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
def test_every_token_is_drawn_as_from_one_sum_over_the_vocabulary(vocab_size, top_p):
    """Including the ends of the sums: the lowest and the highest number that is drawn."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(500, vocab_size, generator=generator) * 4
    uniform = torch.rand(500, generator=generator)
    uniform[:100] = 0.0
    uniform[100:200] = 1 - 2**-24
    tokens, logprobs = select_tokens(logits, 1.0, top_p, uniform)

    probabilities = torch.softmax(logits, dim=-1).double()
    ordered, order = probabilities.sort(dim=-1, descending=True)
    is_outside = (ordered.cumsum(-1) - ordered >= top_p) & (top_p < 1)
    nucleus = probabilities.masked_fill(is_outside.gather(-1, order.argsort(-1)), 0)
    nucleus /= nucleus.sum(-1, keepdim=True)
    sums = nucleus.cumsum(-1)
    rows = torch.arange(500)
    assert (nucleus[rows, tokens] > 0).all()
    assert (sums[rows, tokens] >= uniform - 1e-6).all()
    assert (sums[rows, tokens] - nucleus[rows, tokens] <= uniform + 1e-6).all()
    assert torch.allclose(logprobs.double(), nucleus[rows, tokens].log(), atol=1e-5)
