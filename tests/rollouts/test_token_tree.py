"""Calls of an episode as one row: what is shared, and what each token follows."""

import pytest

from lora_grpo.rollouts import ROOT, ModelCall, tree_row

CASES = {
    "an answer": ([([1, 2], [3, 4])], [3, 4], [1, 1], None),
    "a conversation that goes on": ([([1, 2], [3]), ([1, 2, 3, 4], [5, 6])], [3, 4, 5, 6], [1, 0, 1, 1], None),
    "a new system prompt": ([([1, 2], [3]), ([7, 2], [4])], [3, 7, 2, 4], [1, 0, 0, 1], [-1, ROOT, 1, 2]),
    "a shared part of the prompt": ([([1, 2, 3], [4]), ([1, 2, 5], [6])], [4, 5, 6], [1, 0, 1], [-1, -2, 1]),
    "a prompt that is shortened": ([([1, 2, 3], [4]), ([1], [5])], [4, 5], [1, 1], [-1, -3]),
    "branches of equal contexts": ([([1], [2]), ([1], [3])], [2, 3], [1, 1], [-1, -1]),
    "equal answers": ([([1], [2, 3]), ([1], [2, 4])], [2, 3, 2, 4], [1, 1, 1, 1], [-1, 0, -1, 2]),
    "the answer that a context continues": (
        [([1], [2, 3]), ([1], [2, 4]), ([1, 2, 4, 5], [6])],
        [2, 3, 2, 4, 5, 6],
        [1, 1, 1, 1, 0, 1],
        [-1, 0, -1, 2, 3, 4],
    ),
    "a summary in place of turns": (
        [([1], [2]), ([1, 2, 3], [4]), ([1, 9], [5]), ([1, 9, 5, 6], [7])],
        [2, 3, 4, 9, 5, 6, 7],
        [1, 0, 1, 0, 1, 0, 1],
        [-1, 0, 1, -1, 3, 4, 5],
    ),
    "a part of an answer": (
        [([1], [2, 3, 4]), ([1, 2, 3, 5], [6])],
        [2, 3, 4, 5, 6],
        [1, 1, 1, 0, 1],
        [-1, 0, 1, 1, 3],
    ),
}


@pytest.mark.parametrize(("calls", "token_ids", "loss_mask", "predecessors"), CASES.values(), ids=CASES)
def test_a_call_adds_what_no_earlier_one_has(calls, token_ids, loss_mask, predecessors):
    calls = [ModelCall(context, sampled, [-float(token) for token in sampled]) for context, sampled in calls]
    row = tree_row(calls)
    assert row.prompt_ids == calls[0].context_ids
    assert (row.token_ids, row.loss_mask, row.predecessors) == (token_ids, loss_mask, predecessors)
    assert row.logprobs == [-token * is_sampled for token, is_sampled in zip(token_ids, loss_mask, strict=True)]


@pytest.mark.parametrize("calls", [calls for calls, *_ in CASES.values()], ids=CASES)
def test_each_call_can_be_read_from_the_row(calls):
    row = tree_row([(context, sampled, None) for context, sampled in calls])
    assert row.logprobs is None
    predecessors = row.predecessors or list(range(-1, len(row.token_ids) - 1))
    tokens = [*row.prompt_ids, *row.token_ids]
    first_column = -len(row.prompt_ids)

    def path_to(column):
        path = []
        while column != ROOT:
            path.append(tokens[column - first_column])
            if column >= 0:
                column = predecessors[column]
            else:
                column = column - 1 if column > first_column else ROOT
        return path[::-1]

    paths = [path_to(column) for column in range(len(row.token_ids))]
    for context, sampled in calls:
        assert [*context, *sampled] in paths
    assert sum(row.loss_mask) == sum(len(sampled) for _, sampled in calls)


def test_without_the_logprobs_of_a_call_there_are_none():
    assert tree_row([([1], [2], [-1.0]), ([1], [3], None), ([1], [4], [-1.0])]).logprobs is None
