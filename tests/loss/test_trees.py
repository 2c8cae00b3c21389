"""Completions that are trees: each call of an episode has the logprobs and gradients that it has on its own."""

import math

import pytest
import torch
from helpers.loss_passes import distance, loss_and_gradients, make_trainer, micro_batch, random_model, with_adapter
from torch.nn.attention import flex_attention

from lora_grpo.loss import packing, shared_prompts
from lora_grpo.loss.packing import pack
from lora_grpo.rollouts import ROOT, tree_row
from lora_grpo.training import trl_compat

BUDGET = 40
PROMPT = [11, 12, 13, 14, 15]
TURN = [21, 22, 23]
ANSWER = [31, 32]

# Calls of episodes, as contexts and sampled tokens. All begin with the same prompt, like the episodes of a group.
HISTORIES = {
    "linear": [(PROMPT, TURN), ([*PROMPT, *TURN, 41, 42], ANSWER)],
    "new system prompt": [
        (PROMPT, TURN),
        ([51, 52, *PROMPT[2:], *TURN], ANSWER),
        ([51, 52, *PROMPT[2:], 43], [44, 45]),
    ],
    "parallel": [(PROMPT, TURN), (PROMPT, [21, 24]), ([*PROMPT, 61], ANSWER), ([*PROMPT, 62], [33]), (PROMPT, TURN)],
    "summary": [
        (PROMPT, TURN),
        ([*PROMPT, *TURN, 41], ANSWER),
        ([*PROMPT, 71, 72, 73], [34, 35]),
        ([*PROMPT, 71, 72, 73, 34, 35, 42], [36]),
    ],
    "part of the prompt": [(PROMPT, TURN), ([*PROMPT[:2], 63, 64], ANSWER), (PROMPT[:3], [37, 38])],
    "part of an answer": [(PROMPT, TURN), ([*PROMPT, *TURN[:2], 65], ANSWER)],
    "nothing in common": [(PROMPT, TURN), ([81, 82], ANSWER), ([83], [39])],
    "plain": [(PROMPT, [*TURN, *ANSWER])],
}


def batch_of(*histories):
    """Return inputs of TRL's `_compute_loss` for episodes, one row for each."""
    rows = [tree_row([(context, sampled, None) for context, sampled in history]) for history in histories]
    prompt_width = max(len(row.prompt_ids) for row in rows)
    width = max(len(row.token_ids) for row in rows)

    def padded(tokens, width, padding=0, left=False):
        missing = [padding] * (width - len(tokens))
        return [*missing, *tokens] if left else [*tokens, *missing]

    def columns_before(row):
        return row.predecessors or list(range(-1, len(row.token_ids) - 1))

    generator = torch.Generator().manual_seed(0)
    tool_mask = torch.tensor([padded(row.loss_mask, width, padding=1) for row in rows])
    completion_mask = torch.tensor([padded([1] * len(row.token_ids), width) for row in rows])
    return {
        "prompt_ids": torch.tensor([padded(row.prompt_ids, prompt_width, left=True) for row in rows]),
        "prompt_mask": torch.tensor([padded([1] * len(row.prompt_ids), prompt_width, left=True) for row in rows]),
        "completion_ids": torch.tensor([padded(row.token_ids, width) for row in rows]),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "predecessors": torch.tensor([padded(columns_before(row), width, padding=-1) for row in rows]),
        "advantages": torch.randn(len(rows), generator=generator),
        "num_items_in_batch": (completion_mask * tool_mask).sum().float(),
        "sampling_per_token_logps": -torch.rand(len(rows), width, generator=generator) * completion_mask,
    }


def logprobs_of_call(model, context, sampled):
    """Return the logprobs of a call's sampled tokens, from a pass that reads nothing else."""
    ids = torch.tensor([[*context, *sampled]])
    logits = model(input_ids=ids).logits[0, len(context) - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(sampled)), sampled]


def logprobs_of_calls(model, history):
    return torch.cat([logprobs_of_call(model, context, sampled) for context, sampled in history])


def scores(trainer, inputs, model=None, **options):
    """Return the logprobs and entropies of the completions' tokens."""
    ids, mask = (torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], 1) for part in ("ids", "mask"))
    width = inputs["completion_ids"].shape[1]
    options = {"compute_entropy": True, "predecessors": inputs.get("predecessors"), **options}
    with torch.no_grad():
        return trainer.loss_pass.logprobs(model or trainer.model, ids, mask, width, **options)[:2]


@pytest.fixture(params=["packed", "packed with flex", "padded"])
def way(request, monkeypatch):
    """How the model reads trees. PyTorch has the gradient of FlexAttention on a CPU, but refuses it."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    return request.param


def trainer_that_reads(way, folder, model=None, **settings):
    attention = "flex" if way == "packed with flex" else "sdpa"
    model = with_adapter(model or random_model("qwen3", num_key_value_heads=1))
    trainer = make_trainer(model, folder, packed_attention=attention, max_completion_length=BUDGET, **settings)
    assert trainer.packing_disabled_reason == ""
    if way == "padded":
        trainer.loss_pass.packing_disabled_reason = "for comparison"
    return trainer


@pytest.mark.parametrize("batch_size", [None, 3])
def test_each_call_has_its_own_logprobs(way, batch_size, tmp_path):
    trainer = trainer_that_reads(way, tmp_path)
    inputs = batch_of(*HISTORIES.values())
    logprobs, entropies = scores(trainer, inputs, batch_size=batch_size)
    for row, history in enumerate(HISTORIES.values()):
        is_sampled = (inputs["completion_mask"] * inputs["tool_mask"])[row].bool()
        with torch.no_grad():
            expected = logprobs_of_calls(trainer.model, history)
        torch.testing.assert_close(logprobs[row][is_sampled], expected, rtol=0, atol=1e-5)
        assert (entropies[row][is_sampled] > 0).all()


def test_packed_and_padded_trees_have_the_same_scores(tmp_path):
    """Of all tokens that follow another one, also of those that were not sampled."""
    trainer = trainer_that_reads("packed", tmp_path)
    inputs = batch_of(*HISTORIES.values())
    packed_scores = scores(trainer, inputs)
    trainer.loss_pass.packing_disabled_reason = "for comparison"
    padded_scores = scores(trainer, inputs)
    has_score = inputs["completion_mask"].bool() & (inputs["predecessors"] != ROOT)
    for packed, padded in zip(packed_scores, padded_scores, strict=True):
        torch.testing.assert_close(packed[has_score], padded[has_score], rtol=0, atol=1e-5)
        assert (padded[~has_score] == 0).all()


def expected_gradients(trainer, inputs, histories, loss_type):
    """Return the loss and its gradients, with every call scored on its own. Nothing is clipped, as ratios are 1."""
    trainer.model.zero_grad()
    trainer.model.train()
    losses = []
    for history, advantage in zip(histories, inputs["advantages"], strict=True):
        logprobs = logprobs_of_calls(trainer.model, history)
        losses.append(-advantage * (logprobs - logprobs.detach()).exp())
    if loss_type == "grpo":
        loss = torch.stack([of_episode.mean() for of_episode in losses]).mean()
    elif loss_type == "dapo":
        loss = torch.cat(losses).mean()
    else:
        loss = torch.cat(losses).sum() / (len(histories) * BUDGET)
    loss.backward()
    weights = trainer.model.named_parameters()
    return loss.item(), {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_gradients_are_those_of_scoring_each_call_on_its_own(way, loss_type, tmp_path):
    trainer = trainer_that_reads(way, tmp_path, loss_type=loss_type)
    inputs = batch_of(*HISTORIES.values())
    loss, gradients, _ = loss_and_gradients(trainer, inputs)
    expected_loss, expected = expected_gradients(trainer, inputs, HISTORIES.values(), loss_type)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert distance(gradients, expected) < 1e-5


@pytest.mark.parametrize(("loss_type", "expected"), [("grpo", -1.5), ("dapo", -13 / 9), ("dr_grpo", -13 / 80)])
def test_an_episode_is_one_completion_for_a_normalizer(loss_type, expected, tmp_path):
    """Two episodes of 5 and 4 sampled tokens, with advantages of 1 and 2: the mean of means, of tokens, of budgets."""
    trainer = trainer_that_reads("packed", tmp_path, loss_type=loss_type)
    inputs = batch_of(HISTORIES["linear"], [(PROMPT, [21]), ([51], [22, 23]), (PROMPT[:2], [24])])
    inputs["advantages"] = torch.tensor([1.0, 2.0])
    loss, _, _ = loss_and_gradients(trainer, inputs)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"beta": 0.1}], ids=str)
def test_packed_and_padded_trees_have_the_same_loss(settings, tmp_path):
    trainer = trainer_that_reads("packed", tmp_path, **settings)
    inputs = batch_of(*HISTORIES.values())
    inputs["ref_per_token_logps"] = scores(trainer, inputs)[0] + inputs["sampling_per_token_logps"] / 10
    trainer.model.train()
    loss, gradients, metrics = loss_and_gradients(trainer, inputs)
    trainer.loss_pass.packing_disabled_reason = "for comparison"
    padded_loss, padded_gradients, padded_metrics = loss_and_gradients(trainer, inputs)
    assert loss == pytest.approx(padded_loss, rel=1e-5)
    assert metrics == pytest.approx(padded_metrics, rel=1e-5)
    assert distance(gradients, padded_gradients) < 1e-5


@pytest.mark.parametrize("way", ["packed", "padded"])
def test_episodes_without_an_advantage_are_not_read(way, tmp_path, monkeypatch):
    trainer = trainer_that_reads(way, tmp_path)
    inputs = batch_of(*HISTORIES.values())
    inputs["advantages"][[1, 3, 6]] = 0
    rows_read = []
    score_trees = trainer.loss_pass._score_trees
    monkeypatch.setattr(
        trainer.loss_pass,
        "_score_trees",
        lambda *args, **kwargs: rows_read.append(len(args[1])) or score_trees(*args, **kwargs),
    )
    loss, gradients, _ = loss_and_gradients(trainer, inputs)
    assert rows_read == [len(HISTORIES) - 3]
    expected_loss, expected = expected_gradients(trainer, inputs, HISTORIES.values(), "dapo")
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert distance(gradients, expected) < 1e-5


def test_a_weight_of_an_episode_is_that_of_all_its_calls(tmp_path):
    settings = {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1e9}
    trainer = trainer_that_reads("packed", tmp_path, **settings)
    trl_compat.enable_importance_sampling(trainer)
    inputs = batch_of(HISTORIES["summary"], HISTORIES["nothing in common"])
    inputs["sampling_per_token_logps"] = scores(trainer, inputs)[0] - 0.1  # each token less probable than in the policy
    _, _, metrics = loss_and_gradients(trainer, inputs)
    num_sampled = [8, 6]
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(math.exp(0.1 * num_sampled[1]), rel=1e-4)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(0.1 * num_sampled[0]), rel=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("way", ["packed", "padded"])
def test_trees_that_are_masked_have_no_loss(way, tmp_path):
    """As `mask_truncated_completions` leaves completions out: with some of the rows, and with all."""
    trainer = trainer_that_reads(way, tmp_path)
    histories = [HISTORIES["summary"], HISTORIES["nothing in common"], HISTORIES["plain"]]
    inputs = batch_of(*histories)
    inputs["completion_mask"][1] = 0
    masked_loss, masked_gradients, _ = loss_and_gradients(trainer, inputs)
    without = {name: value[[0, 2]] if value.dim() else value for name, value in inputs.items()}
    loss, gradients, _ = loss_and_gradients(trainer, without)
    assert masked_loss == pytest.approx(loss, rel=1e-5)
    assert distance(masked_gradients, gradients) < 1e-5
    inputs["completion_mask"][:] = 0
    assert loss_and_gradients(trainer, inputs)[0] == 0


def test_the_layers_read_every_token_of_a_tree_once(tmp_path):
    trainer = trainer_that_reads("packed", tmp_path)
    read = []
    norm = trainer.model.base_model.model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda module, args, output: read.append(args[0].shape[:2].numel()))
    inputs = batch_of(*HISTORIES.values())
    scores(trainer, inputs)
    assert read == [len(PROMPT) + inputs["completion_mask"].sum() - len(HISTORIES)]  # the last of a row is never read


def test_a_window_that_is_shorter_than_rows_is_a_window_of_each_call(tmp_path):
    """The model attends to the last four tokens of a call, not of a row."""
    model = random_model("mistral", sliding_window=4)
    trainer = make_trainer(with_adapter(model), tmp_path, max_completion_length=BUDGET)
    assert "last 4 tokens" in trainer.packing_disabled_reason
    inputs = batch_of(*HISTORIES.values())
    logprobs, _ = scores(trainer, inputs)
    is_sampled = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    with torch.no_grad():
        expected = torch.cat([logprobs_of_calls(trainer.model, history) for history in HISTORIES.values()])
    torch.testing.assert_close(logprobs[is_sampled], expected, rtol=0, atol=1e-5)


def test_a_separate_reference_model_reads_paths(tmp_path):
    """It has no hooks that would pack trees."""
    trainer = trainer_that_reads("packed", tmp_path)
    reference = random_model("qwen3", num_key_value_heads=1)
    if trl_compat.has_fused_head():  # which TRL adds to its reference models
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(reference, outputs=("log_probs", "entropy"))
    inputs = batch_of(*HISTORIES.values())
    logprobs, _ = scores(trainer, inputs, model=reference)
    is_sampled = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    with torch.no_grad():
        expected = torch.cat([logprobs_of_calls(reference, history) for history in HISTORIES.values()])
    torch.testing.assert_close(logprobs[is_sampled], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_that_are_not_trees_are_read_as_without_predecessors(is_packed, tmp_path, monkeypatch):
    trainer = trainer_that_reads("packed" if is_packed else "padded", tmp_path)
    inputs = micro_batch([3, 1, 4])
    width = inputs["completion_ids"].shape[1]
    loss, gradients, metrics = loss_and_gradients(trainer, inputs)
    passed = []
    monkeypatch.setattr(shared_prompts, "pack", lambda *args: passed.append(args[3]) or packing.pack(*args))
    inputs["predecessors"] = torch.arange(-1, width - 1).repeat(8, 1).where(inputs["completion_mask"].bool(), -1)
    same_loss, same_gradients, same_metrics = loss_and_gradients(trainer, inputs)
    assert passed == [None] * is_packed
    assert (same_loss, same_metrics) == (loss, metrics)
    assert distance(same_gradients, gradients) == 0


def test_the_layout_of_a_tree():
    """The example of `rollouts/token_tree.py`, without its last call, and a plain row."""
    #               s   a   b    X   Y   c   Z   d   W
    tree_ids = [10, 11, 12, 21, 22, 13, 23, 14, 24]
    plain_ids = [10, 11, 12, 31, 32, 0, 0, 0, 0]
    ids = torch.tensor([tree_ids, plain_ids])
    predecessors = torch.tensor([[-1, 0, 1, 2, -2, 4], [-1, 0, -1, -1, -1, -1]])
    layout = pack(ids, (ids > 0).long(), 6, predecessors)
    assert layout.ids.tolist() == [[10, 11, 12, 21, 22, 13, 23, 14, 31]]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 2, 3]]
    attends_to = []
    for entry in layout.completion_entries.tolist():
        row, column = divmod(entry, layout.completion_slots.shape[1])
        attends_to.append(layout.ids[0, layout.context[row][layout.visible[row, 0, column]]].tolist())
    assert attends_to == [
        [10, 11, 12, 21],
        [10, 11, 12, 21, 22],
        [10, 11, 12, 21, 22, 13],
        [10, 11, 12, 21, 22, 13, 23],
        [10, 11, 14],
        [10, 11, 12, 31],
    ]
    before = layout.ids[0][layout.predecessors]
    assert before[0].tolist() == [12, 21, 22, 13, 11, 14]
    assert before[1, :2].tolist() == [12, 31]
