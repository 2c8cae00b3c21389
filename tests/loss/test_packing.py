"""The layout of a packed micro-batch, on three rows that can be checked by hand."""

import pytest
import torch

from lora_grpo.loss.packing import can_pack, pack

PAD = 0
IDS = torch.tensor(
    [
        [PAD, 11, 12, 21, 22, 23],  # two completions of the prompt 11 12
        [PAD, 11, 12, 31, PAD, PAD],
        [13, 14, 15, 41, 42, PAD],  # one of the prompt 13 14 15
    ]
)
MASK = (IDS != PAD).long()


def test_each_prompt_is_stored_once_and_nothing_is_padded():
    packing = pack(IDS, MASK, completion_width=3)
    # Both prompts, then the completions, each without its last token.
    assert packing.ids.tolist() == [[11, 12, 13, 14, 15, 21, 22, 41]]
    assert packing.positions.tolist() == [[0, 1, 0, 1, 2, 2, 3, 3]]


def test_a_completion_attends_to_its_prompt_and_to_itself():
    packing = pack(IDS, MASK, completion_width=3)
    attends_to = []
    for slots, visible_of_tokens in zip(packing.context, packing.visible[:, 0], strict=True):
        attends_to.append([packing.ids[0, slots[visible]].tolist() for visible in visible_of_tokens])
    assert attends_to[0] == [[11, 12, 21], [11, 12, 21, 22]]
    assert attends_to[2][0] == [13, 14, 15, 41]


def test_each_token_is_predicted_from_the_one_before():
    predecessors = pack(IDS, MASK, completion_width=3).predecessors
    before = torch.tensor([11, 12, 13, 14, 15, 21, 22, 41])[predecessors]
    assert before[0].tolist() == [12, 21, 22]
    assert before[1, :1].tolist() == [12]
    assert before[2, :2].tolist() == [15, 41]


@pytest.mark.parametrize(
    ("row", "packs"),
    [
        ([0, 1, 1, 1, 1, 0], True),
        ([1, 1, 1, 0, 0, 0], True),  # a completion that is masked
        ([1, 1, 0, 1, 1, 0], False),  # a prompt that is padded on the right
        ([1, 1, 1, 0, 1, 1], False),  # a completion that is padded on the left
    ],
)
def test_only_rows_in_trls_layout_are_packed(row, packs):
    mask = torch.tensor([row])
    assert can_pack(mask, mask, completion_width=3) is packs
