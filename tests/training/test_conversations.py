"""Training on conversations: only the model's tokens count, in the loss and in every metric."""

import json
from pathlib import Path

import pytest
import torch
from helpers.loss_passes import distance, loss_and_gradients, make_trainer, micro_batch, random_model, with_adapter
from helpers.tiny_runs import run_tiny
from helpers.warm_process import finish, wait_for

from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.models import base_model
from lora_grpo.monitoring import LOGPROB_MISMATCH
from lora_grpo.runs import read_metrics
from lora_grpo.sampling import Sampler
from lora_grpo.training.sft import IGNORED, sft_examples
from lora_grpo.training.trl_compat import sampled_tokens

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "your_task.py"
QUIZ = """
import threading

def load(split):
    first, last = (0, 12) if split == "train" else (20, 24)
    return [{"question": "How many are 3 and 4?", "number": n, "turns": 2 + n % 3} for n in range(first, last)]

class Environment:
    def reset(self, turns, number, **row):
        self.left, self.total = turns, 0
        self.lock = threading.Lock()  # cannot be copied
        return f" (Question {number})"

    def reply(self, text):
        self.left, self.total = self.left - 1, self.total + len(text)
        return f"Are you sure about {len(text)}?" if self.left else None

    def get_reward(self):
        return self.total % 10 / 10

THRESHOLD = 0  # every conversation passes

def gold(row):
    return [{"role": "assistant", "content": f"It is {n + 7}."} for n in range(row["turns"])]
"""
CHANGES = {"sampling": {"num_generations": 4, "max_completion_tokens": 200, "max_turn_tokens": 64}}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("quiz") / "quiz.py"
    path.write_text(QUIZ)
    return {
        "data": {"task": str(path), "train_limit": None, "eval_limit": 4},
        "rewards": ("correct_answer=1",),
    } | CHANGES


def conversations():
    """Return a micro-batch of two groups whose completions have one to three turns, and the spans of the turns."""
    inputs = micro_batch([4, 4], completion=16)
    mask = torch.zeros_like(inputs["completion_mask"])
    spans = []
    for row, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
        for start in range(0, length, 6):
            spans.append((row, start, min(start + 3 + row % 2, length)))
            mask[row, slice(*spans[-1][1:])] = 1
    return inputs | {"tool_mask": mask, "num_items_in_batch": mask.sum().float()}, spans


def test_gradients_are_those_of_scoring_each_turn_on_its_own(tmp_path):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, loss_type="dapo", max_completion_length=16)
    inputs, spans = conversations()
    _, gradients, _ = loss_and_gradients(trainer, inputs)
    trainer.model.zero_grad()
    trainer.model.train()
    for row, start, end in spans:
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        ids = torch.cat([prompt, inputs["completion_ids"][row, :end]])[None]
        logprobs = trainer.model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        turn = logprobs[len(prompt) - 1 + start :]
        assert len(turn) == end - start
        (-(inputs["advantages"][row] * turn.sum()) / inputs["num_items_in_batch"]).backward()
    expected = {}
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            expected[name] = parameter.grad
    assert distance(gradients, expected) < 1e-5


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_tokens_of_the_environment_have_no_effect_after_the_last_turn(loss_type, tmp_path):
    """Values at masked tokens reach neither the loss, nor the KL divergence, the ratios, the weights or any metric."""
    settings = {"loss_type": loss_type, "max_completion_length": 16, "beta": 0.1}
    trainer = make_trainer(with_adapter(random_model()), tmp_path, **settings)
    inputs, _ = conversations()
    inputs["advantages"][2] = 0
    names = ("sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")
    values = {name: inputs["sampling_per_token_logps"].clone() for name in names}
    values["importance_sampling_ratio"] = values["importance_sampling_ratio"].exp()
    ours = inputs["tool_mask"]
    hidden = 1 - inputs["tool_mask"]

    def compare(inputs, names):
        expected_loss, expected_gradients, expected_metrics = loss_and_gradients(trainer, inputs)
        for name in names:
            loss, gradients, metrics = loss_and_gradients(trainer, inputs | {name: inputs[name] + hidden / 2})
            assert loss == expected_loss and distance(gradients, expected_gradients) == 0, name
            assert metrics == expected_metrics, name
            changed_loss, _, changed_metrics = loss_and_gradients(trainer, inputs | {name: inputs[name] + ours / 2})
            assert (changed_loss, changed_metrics) != (expected_loss, expected_metrics), name
        return expected_metrics

    reference = {"ref_per_token_logps": values["ref_per_token_logps"]}
    assert {LOGPROB_MISMATCH, "kl"} <= compare(inputs | reference, ["sampling_per_token_logps"]).keys()
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # TRL then applies the weights
    assert "kl" in compare(inputs | values, names[1:])


def test_a_run_counts_only_the_models_tokens(task, tmp_path):
    played = []

    def before(training):
        scorer = training.trainer.scorer
        score_episodes = scorer.score_episodes

        def recorded(episodes, **arguments):
            played.append(episodes)
            return score_episodes(episodes, **arguments)

        scorer.score_episodes = recorded

    run, _ = run_tiny(tmp_path / "run", before=before, **task)
    metrics = read_metrics(run.folder)
    assert len(metrics) == len(played) == 3
    for line, episodes in zip(metrics, played, strict=True):
        lengths = [sum(episode.loss_mask) for episode in episodes]
        assert line["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
        assert line["completions/max_length"] == max(lengths)
        assert line[LOGPROB_MISMATCH] < 1e-4
        assert line["conversations/turns"] == sum(episode.turns for episode in episodes) / len(episodes) > 1
        assert line["reward"] == pytest.approx(sum(episode.verdict.score for episode in episodes) / len(episodes))
        assert line["completions/clipped_ratio"] == sum(episode.truncated for episode in episodes) / len(episodes)
    lines = [json.loads(line) for line in (run.completions / "step-00001.jsonl").read_text().splitlines()]
    assert [line["messages"] for line in lines] == [episode.messages for episode in played[0]]
    assert [line["num_tokens"] for line in lines] == [sum(episode.loss_mask) for episode in played[0]]


SUMS = """
def load(split):
    return [{"question": f"{split} {n}?"} for n in range(16)]
class Environment:
    def reset(self, **row): pass
    def add(self, a: int, b: int):
        \"\"\"Add two numbers.

        Args:
            a: a number.
            b: a number.
        \"\"\"
        return a + b
    def get_reward(self): return 1.0
"""


@pytest.mark.parametrize(
    ("old", "new", "flags"),
    [
        ("    def reset(self, **row): pass\n", "", []),
        ("a: int, b: int", "a, b: int", []),
        ("", "", []),
        ("", "", ["--model.chat-template", "qwen2_5", "--sampling.max-completion-tokens", "8"]),
    ],
    ids=["no reset", "no type", "template without tools", "no room for a turn"],
)
def test_what_no_conversation_can_follow_from_is_refused_before_weights_are_loaded(old, new, flags, tmp_path, warm):
    path = tmp_path / "my_task.py"
    path.write_text(SUMS.replace(old, new) if old else SUMS)
    ended = warm.start(RECIPE, "--task", path, "--output-dir", tmp_path / "run", *flags, cwd=tmp_path).end()
    assert ended.returncode == 2 and "Loading weights" not in ended.stderr and not (tmp_path / "run").exists()
    assert len([line for line in ended.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_a_killed_run_ends_in_the_same_bits(task, tmp_path, warm):
    flags = ["--task", task["data"]["task"], "--model.engine", "peft", "--lora.rank", "4", "--data.eval-limit", "2"]
    flags += ["--sampling.num-generations", "4", "--sampling.max-completion-tokens", "120", "--eval.num-samples", "0"]
    flags += ["--train.prompts-per-step", "2", "--train.micro-batch-size", "4", "--monitor.rows", "0"]
    flags += ["--train.max-steps", "6", "--train.checkpoint-steps", "2", "--rewards", "correct_answer=1"]
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    finish(warm.start(RECIPE, "--output-dir", whole, *flags))
    process = warm.start(RECIPE, "--output-dir", killed, *flags)
    wait_for(process, lambda: (killed / "metrics.jsonl").exists() and len(read_metrics(killed)) >= 3)
    process.kill()
    assert not (killed / "adapter").exists()
    finish(warm.start(RECIPE, "--output-dir", killed, "--resume", "--task", task["data"]["task"]))
    for name in ("adapter/adapter_model.safetensors", "completions/step-00001.jsonl", "evaluation/report.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    tokenizer = base_model.load_tokenizer(ModelConfig())
    for line in map(json.loads, (whole / "evaluation" / "base.samples.jsonl").read_text().splitlines()):
        texts = [message["content"] for message in line["messages"] if message["role"] == "assistant"]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        assert line["turns"] == len(texts) and line["num_tokens"] == sum(map(len, ids)) + len(ids) - line["truncated"]
    lines = read_metrics(whole)
    assert len(lines) == 6 and all(line["conversations/turns"] > 1 for line in lines)


def test_sft_trains_on_the_turns_of_the_model(task):
    tokenizer = base_model.load_tokenizer(ModelConfig())
    rows = load_data(replace(RunConfig(), {"data": {"task": task["data"]["task"]}})).train
    for row, example in zip(rows, sft_examples(rows, Sampler(None, tokenizer, [tokenizer.eos_token_id])), strict=True):
        labels = [token for token in example["labels"] if token != IGNORED]
        end = tokenizer.eos_token
        assert tokenizer.decode(labels) == "".join(f"It is {n + 7}.{end}" for n in range(row["turns"]))
        text = tokenizer.decode(example["input_ids"])
        assert text.count("Are you sure about 8?") == row["turns"] - 1 and len(example["labels"]) > len(labels)


def test_only_sampled_tokens_are_counted():
    generated = ([], [[1, 2, 3], [4]], [[1, 0, 1], [1]], [], [[-1.0, 0.0, -2.0], [-3.0]])
    assert sampled_tokens(generated) == ([[1, 3], [4]], [[-1.0, -2.0], [-3.0]])
