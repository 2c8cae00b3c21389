"""The order of prompts in training."""

import pytest

from lora_grpo.data import longest_first_in_steps, prompt_order


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


def test_each_step_keeps_its_rows_and_begins_with_the_longest():
    lengths = [30, 10, 50, 20, 40]
    order = prompt_order(5, 14, seed=0)
    by_length = longest_first_in_steps(order, lengths, 4)
    for start in range(0, 14, 4):
        step = by_length[start : start + 4]
        assert sorted(step) == sorted(order[start : start + 4])
        assert [lengths[row] for row in step] == sorted((lengths[row] for row in step), reverse=True)
