"""The loop of conversations: tokens, masks, seeds, limits, and the cache that goes on from turn to turn."""

import importlib.util
import itertools
import shutil

import pytest
import torch
from helpers.tensor_memory import TensorMemory

from lora_grpo import starter
from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.hardware import vllm_available
from lora_grpo.models import base_model, stop_tokens
from lora_grpo.prompts import chat
from lora_grpo.rollouts import fit_batch, play, play_all
from lora_grpo.sampling import (
    GgufSampler,
    Sampler,
    SamplingParams,
    VllmSampler,
    batch_memory,
    completion_seed,
    continuous_batching,
    growing_cache,
    read_gguf,
)
from lora_grpo.sampling.vllm_engine import start_engine

QUIZ = """
QUESTIONS = ["How many are 3 and 4?", "Tom has 5 plums. He eats 2. How many plums does Tom have now?"]

def load(split):
    first, last = (0, 8) if split == "train" else (8, 11)
    return [{"question": QUESTIONS[n % 2], "number": n, "turns": 2 + n % 7} for n in range(first, last)]

class Environment:
    def reset(self, turns, number, **row):
        self.left, self.texts = turns, []
        return f" (Question {number})"

    def reply(self, text):
        self.texts.append(text)
        self.left -= 1
        return f"Are you sure about {len(text)}? Count again{'!' * len(self.texts)}" if self.left else None

    def get_reward(self):
        return 1.0 if not self.left else 0.25

MAX_TURNS = 8
"""


@pytest.fixture(scope="module")
def quiz(tmp_path_factory):
    path = tmp_path_factory.mktemp("quiz") / "quiz.py"
    path.write_text(QUIZ)
    config = replace(RunConfig(), {"data": {"task": str(path)}})
    return load_data(config).train


@pytest.fixture(scope="module")
def starter_sampler():
    settings = ModelConfig(name=str(starter.model_path()), bits=16)
    tokenizer = base_model.load_tokenizer(settings)
    model = base_model.load_base(settings).eval()
    eos = stop_tokens.eos_token_ids(settings, tokenizer, "starter")
    return Sampler(model, tokenizer, eos)


def play_groups(sampler, rows, group_size=2, budget=600, turn_limit=None, temperature=1.0):
    """Return the episodes of each row, with the same seeds in every call."""
    params = SamplingParams(group_size, temperature, 1.0, budget, turn_limit)
    seeds = [completion_seed(0, "play", number) for number in range(group_size * len(rows))]
    return play_all(sampler, rows, params, seeds)


def play_episodes(sampler, rows, **options):
    return episodes_of(play_groups(sampler, rows, **options))


@pytest.fixture(scope="module")
def played(quiz, starter_sampler):
    """The episodes of each row, played once for all tests."""
    return play_groups(starter_sampler, quiz)


def episodes_of(groups):
    return [episode for group in groups for episode in group]


def token_ids(groups):
    return [[episode.token_ids for episode in group] for group in groups]


def forward_logprobs(model, episode):
    """Return the logprob of each token after the prompt, from one pass over the whole conversation."""
    ids = torch.tensor([episode.prompt_ids + episode.token_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)
    return chosen[len(episode.prompt_ids) - 1 :]


def test_logprobs_of_2_to_8_turns_are_those_of_one_pass(played, starter_sampler):
    episodes = episodes_of(played)
    assert {episode.turns for episode in episodes} >= {2, 3, 4, 5, 6, 7, 8}
    for episode in episodes:
        is_sampled = torch.tensor(episode.loss_mask).bool()
        logprobs = torch.tensor(episode.logprobs)
        expected = forward_logprobs(starter_sampler.model, episode)
        assert (logprobs - expected)[is_sampled].abs().max() < 1e-4
        assert not logprobs[~is_sampled].any()
        assert (episode.verdict.score == 1.0) == (episode.ended_by == "reply")


def test_tokens_are_those_of_the_rendered_conversation(played, starter_sampler):
    """Also where the model writes text that would be tokenized in another way: only ids are extended."""
    tokenizer = starter_sampler.tokenizer
    for episode in episodes_of(played):
        text = tokenizer.decode(episode.prompt_ids + episode.token_ids)
        rendered = chat.render(tokenizer, [*episode.row["prompt"], *episode.messages])
        assert rendered.startswith(text)
        mask_runs = [is_sampled for is_sampled, _ in itertools.groupby(episode.loss_mask)]
        assert sum(mask_runs) == episode.turns
        sampled_text = tokenizer.batch_decode([episode.sampled_ids], skip_special_tokens=True)[0]
        assert sampled_text == "".join(m["content"] for m in episode.messages if m["role"] == "assistant")


def test_the_cache_is_kept_between_turns(quiz, starter_sampler, monkeypatch):
    """The model reads each token once. Without the cache, it reads earlier turns again and samples the same."""
    tokens_read = []
    forward = starter_sampler.model.forward

    def counting(*args, **kwargs):
        tokens_read.append(int(kwargs["input_ids"].numel()))
        return forward(*args, **kwargs)

    monkeypatch.setattr(starter_sampler.model, "forward", counting)
    with_cache = play_groups(starter_sampler, quiz)
    read_with_cache = sum(tokens_read)

    tokens_read.clear()
    monkeypatch.setattr(growing_cache, "has_full_attention", lambda config: False)
    without_cache = play_groups(starter_sampler, quiz)
    read_without_cache = sum(tokens_read)

    assert token_ids(with_cache) == token_ids(without_cache)
    all_tokens = sum(len(group[0].prompt_ids) for group in with_cache)
    all_tokens += sum(len(episode.token_ids) for group in with_cache for episode in group)
    assert read_with_cache < 1.5 * all_tokens < read_without_cache


def test_the_caches_of_earlier_batches_are_freed_one_by_one(starter_sampler):
    prompts = [[number % 50 + 5 for number in range(start, start + 400)] for start in range(12)]
    with torch.no_grad(), TensorMemory() as held:
        batches = [continuous_batching.prefill(starter_sampler.model, 0, [ids], [0]) for ids in prompts]
        expected = [layer.keys.clone() for layer in batches[5].cache.layers]
        before = held.peak = held.live
        joined = continuous_batching.Batch.continued(dict(enumerate(reversed(batches))))
    keys = [layer.keys[6:7] for layer in joined.cache.layers]
    assert all(torch.equal(layer_keys, same) for layer_keys, same in zip(keys, expected, strict=True))
    assert held.peak < 1.4 * before


def test_half_as_many_conversations_are_decoded_at_once(quiz, starter_sampler, monkeypatch):
    monkeypatch.setattr(batch_memory, "MAX_BATCH_SIZE", 32)
    without_environment = [{name: row[name] for name in ("prompt", "question")} for row in quiz]
    sizes = []
    for rows in (quiz, without_environment):
        fit_batch(starter_sampler, rows, SamplingParams(1, 1.0, 1.0, 100))
        sizes.append(starter_sampler.batch_size)
    starter_sampler.batch_size = None  # of the other tests, also if this one fails
    assert sizes == [16, 32]


def test_an_episode_depends_only_on_its_seed_and_row(quiz, starter_sampler):
    together = play_groups(starter_sampler, quiz, group_size=1)
    params = SamplingParams(1, 1.0, 1.0, 600)
    for number in (0, 5):
        [[alone]] = play_all(starter_sampler, [quiz[number]], params, [completion_seed(0, "play", number)])
        assert alone.token_ids == together[number][0].token_ids and alone.turns > 1


def test_the_environments_text_changes_only_what_follows(played, starter_sampler, tmp_path):
    (tmp_path / "quiz.py").write_text(QUIZ.replace("Count again", "Count once more"))
    other_quiz = load_data(replace(RunConfig(), {"data": {"task": str(tmp_path / "quiz.py")}})).train
    other_groups = play_groups(starter_sampler, other_quiz)
    for [episode, _], [other, _] in zip(played, other_groups, strict=True):
        first_turn = slice(episode.loss_mask.index(0))
        assert episode.token_ids[first_turn] == other.token_ids[first_turn]
        assert episode.logprobs[first_turn] == other.logprobs[first_turn]
        assert episode.token_ids != other.token_ids


def test_an_episode_ends_with_its_budget(quiz, played, starter_sampler):
    lengths = sorted(len(episode.token_ids) for episode in episodes_of(played))
    budget = lengths[len(lengths) // 2]
    for episode in play_episodes(starter_sampler, quiz, budget=budget):
        assert len(episode.token_ids) <= budget
        assert episode.loss_mask[-1] == 1, "the environment's messages are left out if no turn can follow"
        assert (episode.ended_by == "budget") == (episode.verdict.score == 0.25)
        assert episode.verdict.reason in ("correct", "token_limit")


def test_an_episode_ends_with_a_turn_that_is_cut(quiz, starter_sampler):
    for episode in play_episodes(starter_sampler, quiz, turn_limit=5):
        assert (episode.turns, episode.truncated, episode.ended_by) == (1, True, "budget")
        assert sum(episode.loss_mask) == 5


def test_groups_are_yielded_when_they_are_over(quiz, played, starter_sampler):
    params = SamplingParams(2, 1.0, 1.0, 600)
    seeds = [completion_seed(0, "play", number) for number in range(2 * len(quiz))]
    with starter_sampler.awake(adapter=True):
        order = [index for index, _ in play(starter_sampler, quiz, params, seeds)]
        starter_sampler.batch_size = 4  # two rows at a time
        two_rows_at_a_time = dict(play(starter_sampler, quiz, params, seeds))
    turns = [quiz[index]["turns"] for index in order]
    assert turns == sorted(turns) and sorted(order) == list(range(len(quiz)))
    in_order = [two_rows_at_a_time[index] for index in range(len(quiz))]
    assert token_ids(in_order) == token_ids(played)


@pytest.mark.engines
@pytest.mark.skipif(not vllm_available(), reason="vllm is not installed: make engines")
def test_vllm_takes_turns_with_the_logprobs_of_one_pass(quiz, starter_sampler):
    settings = ModelConfig(name=str(starter.model_path()), bits=16)
    engine = start_engine(settings, rank=None, max_sequence_tokens=1024, seed=0)
    by_vllm = VllmSampler(engine, starter_sampler.tokenizer, starter_sampler.eos_token_ids)
    by_vllm.returns_logprobs = True
    try:
        episodes = play_episodes(by_vllm, quiz)
    finally:
        by_vllm.close()
    assert {episode.turns for episode in episodes} >= {2, 3, 4, 5, 6, 7, 8}
    for episode in episodes:
        is_sampled = torch.tensor(episode.loss_mask).bool()
        expected = forward_logprobs(starter_sampler.model, episode)
        assert (torch.tensor(episode.logprobs) - expected)[is_sampled].abs().mean() < 1e-4


@pytest.mark.engines
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: make engines")
def test_llama_cpp_takes_the_same_turns(quiz, starter_sampler, tmp_path):
    shutil.copytree(starter.model_path(), tmp_path / "run" / "merged")
    export(ExportOptions(tmp_path / "run" / "merged", type=("f32",)))
    [path] = (tmp_path / "run").rglob("*.gguf")
    by_file = GgufSampler(read_gguf(path), quiz, 600)
    try:
        episodes = play_episodes(by_file, quiz, group_size=1, temperature=0.0)
    finally:
        by_file.close()
    expected = play_episodes(starter_sampler, quiz, group_size=1, temperature=0.0)
    same = [episode.messages == other.messages for episode, other in zip(episodes, expected, strict=True)]
    assert 2 * sum(same) > len(same)  # llama.cpp rounds, so near ties may go on otherwise
    assert len({episode.turns for episode in episodes}) > 2
