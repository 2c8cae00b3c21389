import dataclasses

import pytest

from lora_grpo.models.shape import Shape
from lora_grpo.planning.random_model import QWEN, qwen2
from lora_grpo.planning.roofline import Limits, StepWork, measure

TINY = qwen2(32, 64, 2, 4, 2, vocabulary=4096)
SMALL = Shape.of(QWEN["0.5B"])
ADAPTER = 17_596_416
CARD = Limits(copy_gb_per_second=1000.0, matmul_tflops=100.0)


def work(**changes):
    settings = {
        "shape": SMALL,
        "completions": 1,
        "prompt_tokens": 0.0,
        "completion_tokens": 0.0,
        "bits": 16,
        "rank": 32,
        "recomputes": True,
    }
    return StepWork(**{**settings, **changes})


def test_both_rates_are_measured_here_and_of_a_likely_size():
    found = measure(size=256)
    assert found["device"] == "cpu" and found["precision"] == "float32"
    assert 0.5 < found["copy_gb_per_second"] < 1000
    assert 0.001 < found["matmul_tflops"] < 10


def test_one_completion_without_a_context_reads_the_weights_once_a_token():
    read = 2 * (494_032_768 + ADAPTER)
    assert work().decoding_bound(CARD) == pytest.approx(1000e9 / read)


def test_four_bits_read_a_quarter_of_the_linear_weights():
    saved = SMALL.linear_parameters * (16 - 4.127) / 8
    assert 1000e9 / work().decoding_bound(CARD) - 1000e9 / work(bits=4).decoding_bound(CARD) == pytest.approx(
        saved, rel=1e-3
    )


def test_keys_and_values_are_read_for_every_completion():
    alone = work(completions=4).decoding_bound(CARD)
    cached = work(completions=4, prompt_tokens=100, completion_tokens=200).decoding_bound(CARD)
    # 200 tokens on average, 24 layers, keys and values of 128 numbers of two bytes.
    more = 4 * 200 * 24 * 2 * 128 * 2 / 1000e9
    assert 4 / cached - 4 / alone == pytest.approx(more)


def test_many_completions_are_bound_by_the_products():
    operations = 2 * (SMALL.linear_parameters + 151_936 * 896 + ADAPTER)
    assert work(completions=4096).decoding_bound(CARD) == pytest.approx(100e12 / operations)


def counted(model, run):
    """Return what torch counts: two operations for a multiplication and an addition."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run(model)
    return counter.get_total_flops()


@pytest.mark.parametrize("recomputes", [False, True])
def test_training_operations_are_those_that_torch_counts(tmp_path, recomputes):
    """Of an adapter on a frozen base; attention over half of the square, where eager attention computes all of it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from lora_grpo.planning.random_model import build

    build(tmp_path / "model", TINY)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    prompt, completion, rows = 24, 40, 3
    ids = torch.randint(3, TINY["vocab_size"], (rows, prompt + completion))

    def step(model):
        model(ids, logits_to_keep=completion, use_cache=False).logits.logsumexp(-1).sum().backward()

    expected = StepWork(Shape.of(TINY), rows, prompt, completion, 16, 4, recomputes)
    squares = 2 * (prompt + completion) ** 2 * TINY["hidden_size"] * TINY["num_hidden_layers"] * rows
    whole = expected.training_operations() + (3 + recomputes) * squares
    assert counted(model, step) == pytest.approx(whole, rel=0.02)


def test_the_share_is_of_the_measured_rate():
    asked = work(completions=64, prompt_tokens=100, completion_tokens=500)
    seconds = asked.training_operations() / 50e12
    assert asked.training_share(seconds, CARD) == pytest.approx(0.5)
    twice = dataclasses.replace(asked, completions=128)
    assert twice.training_share(seconds, CARD) == pytest.approx(1.0)
