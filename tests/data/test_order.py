"""The order of prompts in training."""

import pytest

from lora_grpo.data import prompt_order


def test_each_epoch_has_every_row_once():
    order = prompt_order(5, 15, seed=0)
    epochs = [order[start : start + 5] for start in (0, 5, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(5))] * 3
    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 12])
def test_a_longer_order_starts_with_the_shorter_one(length):
    order = prompt_order(5, length, seed=3)
    assert len(order) == length
    assert prompt_order(5, 23, seed=3)[:length] == order
