"""The forward pass from disk, compared with the model in memory, and divergences, compared with float64."""

import pytest
import torch
from helpers.adapters import live, load, make_adapter, make_base
from helpers.tensor_memory import TensorMemory
from helpers.tiny_models import CONFIGS, make_model

from lora_grpo.files import model_tensors
from lora_grpo.files.tensors import BLOCK_ELEMENTS
from lora_grpo.merging import empty_model
from lora_grpo.merging.divergence import States, StreamedModel, between
from lora_grpo.merging.mapping import plan_merge

TEXTS = [[5, 1, 7, 3, 9, 60], [2, 63, 8], [4, 4, 4, 4, 11, 12, 13, 14]]


def check_logits(states, model):
    with torch.no_grad():
        expected = [model(torch.tensor([text])).logits[0, -2:] for text in TEXTS]
    logits = states.hidden @ states.head.rows(0, 64).float().T
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=2e-5)


def test_one_pass_for_each_of_several_models_gives_their_own_logits(tmp_path):
    base = make_base(tmp_path / "base", tied=True)
    untied = make_base(tmp_path / "other", tied=False, shards="20KB")
    streamed = StreamedModel(empty_model(base))
    for name, options in (
        ("lora", {}),
        ("dora", {"use_dora": True}),
        ("embedding", {"target_modules": ["embed_tokens", "q_proj"]}),
    ):
        adapter = make_adapter(base, tmp_path / name, **options)
        plan = plan_merge(model_tensors(base), adapter, empty_model(base))
        check_logits(streamed.states(plan.outputs, TEXTS, compared=2), live(base, adapter))
    for folder in (base, untied):
        check_logits(streamed.states(model_tensors(folder), TEXTS, compared=2), load(folder))


def test_the_weights_of_one_module_are_in_memory_at_a_time(tmp_path):
    folder = make_model(tmp_path, CONFIGS["llama"])
    weights = model_tensors(folder)
    streamed = StreamedModel(empty_model(folder))
    with TensorMemory() as memory:
        streamed.states(weights, [[1, 2]], compared=1)
    assert memory.peak < 0.5 * sum(4 * torch.Size(weight.shape).numel() for weight in weights.values())


class InMemory:
    def __init__(self, weight):
        self.weight = weight
        self.shape = tuple(weight.shape)

    def rows(self, start, stop):
        return self.weight[start:stop]


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-5])
def test_divergence_is_that_of_float64_over_blocks_of_a_wide_vocabulary(apart):
    torch.manual_seed(0)
    width = 64
    vocab_size = BLOCK_ELEMENTS // width * 2 + 5  # three blocks
    head_a = torch.randn(vocab_size, width)
    head_b = head_a + apart * torch.randn(vocab_size, width)
    hidden = torch.randn(7, width)
    models = {"a": States(hidden, InMemory(head_a)), "b": States(hidden, InMemory(head_b))}
    divergences = between(models, [("a", "b"), ("b", "a"), ("a", "a")])

    def kl(first_head, second_head):
        first = (hidden.double() @ first_head.double().T).log_softmax(1)
        second = (hidden.double() @ second_head.double().T).log_softmax(1)
        return float((first.exp() * (first - second)).sum(1).mean())

    assert divergences["a", "b"] == pytest.approx(kl(head_a, head_b), rel=0.02, abs=1e-13)
    assert divergences["b", "a"] == pytest.approx(kl(head_b, head_a), rel=0.02, abs=1e-13)
    assert abs(divergences["a", "a"]) < 1e-13
