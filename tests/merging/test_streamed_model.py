"""The forward pass from disk, compared with the model in memory, and divergences, compared with float64."""

import pytest
import torch
from helpers.adapters import live, load, make_adapter, make_base
from helpers.tiny_models import CONFIGS, make_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from lora_grpo.errors import UserError
from lora_grpo.files.tensors import BLOCK_ELEMENTS, model_tensors
from lora_grpo.merging.base_weights import empty_model
from lora_grpo.merging.mapping import make_plan
from lora_grpo.merging.streamed_model import States, StreamedModel, divergences

TEXTS = [[5, 1, 7, 3, 9, 60], [2, 63, 8], [4, 4, 4, 4, 11, 12, 13, 14]]


@pytest.mark.parametrize("tied", [True, False])
def test_states_and_head_give_the_models_own_logits(tied, tmp_path):
    base = make_base(tmp_path / "base", tied=tied, shards=None if tied else "20KB")
    states = StreamedModel(empty_model(base)).states({"base": model_tensors(base)}, TEXTS, keep=2)["base"]
    logits = states.hidden @ states.head.rows(0, 64).T
    model = load(base)
    with torch.no_grad():
        expected = [model(torch.tensor([text])).logits[0, -2:] for text in TEXTS]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=1e-5)


def test_models_in_one_pass_give_their_own_logits(tmp_path):
    base = make_base(tmp_path / "base", tied=True)
    torch.manual_seed(1)
    other = make_base(tmp_path / "other", tied=False)  # no weight in common
    norms = load_file(other / "model.safetensors")
    norms["model.norm.weight"] += 0.5
    save_file(norms, other / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(base, tmp_path / "adapter")
    dora = make_adapter(base, tmp_path / "dora", use_dora=True)
    embedding = make_adapter(base, tmp_path / "embedding", target_modules=["embed_tokens", "q_proj"])
    weights = {"base": model_tensors(base), "other": model_tensors(other)}
    for name, folder in (("adapter", adapter), ("dora", dora), ("embedding", embedding)):
        weights[name] = make_plan(model_tensors(base), folder, empty_model(base)).outputs
    states = StreamedModel(empty_model(base)).states(weights, TEXTS, keep=2)
    live_models = {
        "base": load(base), "other": load(other), "adapter": live(base, adapter), "dora": live(base, dora),
        "embedding": live(base, embedding),
    }  # fmt: skip
    for name, model in live_models.items():
        with torch.no_grad():
            expected = torch.cat([model(torch.tensor([text])).logits[0, -2:] for text in TEXTS])
        found = states[name].hidden @ states[name].head.rows(0, 64).float().T
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_a_model_that_does_more_is_refused(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "gpt2")
    model = StreamedModel(empty_model(tmp_path / "gpt2"))
    weights = model_tensors(tmp_path / "gpt2")
    model.states({"base": weights}, [[1, 2]], keep=1)  # its Conv1D is small enough to stay in memory
    model._model.get_output_embeddings().bias = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(UserError, match="GPT2LMHeadModel changes its logits after the head"):
        model.states({"base": weights}, [[1, 2]], keep=1)
    del weights["transformer.ln_f.bias"]
    with pytest.raises(UserError, match=r"the weights have no transformer\.ln_f\.bias"):
        model.states({"base": weights}, [[1, 2]], keep=1)


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_a_mixture_of_experts_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="the model is a mixture of experts"):
        StreamedModel(empty_model(make_model(tmp_path, CONFIGS[name])))


class InMemory:
    def __init__(self, weight):
        self.weight, self.shape = weight, tuple(weight.shape)

    def rows(self, start, stop):
        return self.weight[start:stop]


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-5])
def test_divergence_is_that_of_float64_over_blocks_of_a_wide_vocabulary(apart):
    torch.manual_seed(0)
    width, tokens = 64, BLOCK_ELEMENTS // 64 * 2 + 5  # three blocks
    heads = [torch.randn(tokens, width)]
    heads.append(heads[0] + apart * torch.randn(tokens, width))
    hidden = torch.randn(7, width)
    models = {name: States(hidden, InMemory(head)) for name, head in zip("ab", heads, strict=True)}
    found = divergences(models, [("a", "b"), ("b", "a"), ("a", "a")])
    first, second = ((hidden.double() @ head.double().T).log_softmax(1) for head in heads)
    assert found["a", "b"] == pytest.approx(float((first.exp() * (first - second)).sum(1).mean()), rel=0.02, abs=1e-13)
    assert found["b", "a"] == pytest.approx(float((second.exp() * (second - first)).sum(1).mean()), rel=0.02, abs=1e-13)
    assert abs(found["a", "a"]) < 1e-13
