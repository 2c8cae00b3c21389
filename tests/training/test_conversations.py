"""Training on conversations: only the model's tokens count, in the loss and in every metric."""

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch
from helpers.loss_passes import distance, loss_and_gradients, make_trainer, micro_batch, random_model, with_adapter
from helpers.tiny_runs import run_tiny

from lora_grpo.config import Invocation, ModelConfig, RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.evaluation import evaluate
from lora_grpo.files import lock
from lora_grpo.models import base_model
from lora_grpo.monitoring import LOGPROB_MISMATCH
from lora_grpo.runs import Run, read_metrics
from lora_grpo.sampling import Sampler, build_sampler
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


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("quiz") / "quiz.py"
    path.write_text(QUIZ)
    return {
        "data": {"task": str(path), "train_limit": None, "eval_limit": 4},
        "sampling": {"num_generations": 4, "max_completion_tokens": 200, "max_turn_tokens": 64},
        "rewards": ("correct_answer=1.0",),
        "eval": {"num_samples": 0},
    }


def conversations():
    """Return a micro-batch of two groups whose completions have one to three turns, and the spans of the turns."""
    inputs = micro_batch([4, 4], completion=16)
    turn_mask = torch.zeros_like(inputs["completion_mask"])
    turn_spans = []
    for row, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
        turn_length = 3 + row % 2
        for start in range(0, length, 6):
            end = min(start + turn_length, length)
            turn_spans.append((row, start, end))
            turn_mask[row, start:end] = 1
    return inputs | {"tool_mask": turn_mask, "num_items_in_batch": turn_mask.sum().float()}, turn_spans


def test_gradients_are_those_of_scoring_each_turn_on_its_own(tmp_path):
    trainer = make_trainer(with_adapter(random_model()), tmp_path, loss_type="dapo", max_completion_length=16)
    inputs, turn_spans = conversations()
    _, gradients, _ = loss_and_gradients(trainer, inputs)

    trainer.model.zero_grad()
    trainer.model.train()
    for row, start, end in turn_spans:
        prompt_ids = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        ids = torch.cat([prompt_ids, inputs["completion_ids"][row, :end]])
        logits = trainer.model(ids[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        turn_logprobs = logprobs[len(prompt_ids) - 1 + start :]
        assert len(turn_logprobs) == end - start
        loss = -inputs["advantages"][row] * turn_logprobs.sum() / inputs["num_items_in_batch"]
        loss.backward()  # gradients add up
    expected = {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.grad is not None}
    assert distance(gradients, expected) < 1e-5


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_tokens_of_the_environment_have_no_effect_after_the_last_turn(loss_type, tmp_path):
    """Values at masked tokens reach neither the loss, nor the KL divergence, the ratios, the weights or any metric."""
    settings = {"loss_type": loss_type, "max_completion_length": 16, "beta": 0.1}
    trainer = make_trainer(with_adapter(random_model()), tmp_path, **settings)
    inputs, _ = conversations()
    inputs["advantages"][2] = 0
    logprobs = inputs["sampling_per_token_logps"]
    mask_of_model = inputs["tool_mask"]
    mask_of_environment = 1 - mask_of_model

    def metrics_with_changes(inputs, names):
        """Change values of the environment's tokens and of the model's, and return the metrics without a change."""
        loss, gradients, metrics = loss_and_gradients(trainer, inputs)
        for name in names:
            changed = inputs | {name: inputs[name] + mask_of_environment / 2}
            same_loss, same_gradients, same_metrics = loss_and_gradients(trainer, changed)
            assert same_loss == loss, name
            assert distance(same_gradients, gradients) == 0, name
            assert same_metrics == metrics, name

            changed = inputs | {name: inputs[name] + mask_of_model / 2}
            other_loss, _, other_metrics = loss_and_gradients(trainer, changed)
            assert (other_loss, other_metrics) != (loss, metrics), name
        return metrics

    inputs["ref_per_token_logps"] = logprobs.clone()
    metrics = metrics_with_changes(inputs, ["sampling_per_token_logps"])
    assert {LOGPROB_MISMATCH, "kl"} <= metrics.keys()

    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    inputs["old_per_token_logps"] = logprobs.clone()
    names = ["old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"]
    assert "kl" in metrics_with_changes(inputs, names)


@pytest.fixture(scope="module")
def unbroken(task, tmp_path_factory):
    """A run, its policy, and the episodes of each step."""
    episodes_of_steps = []

    def record_episodes(training):
        scorer = training.trainer.scorer
        score_episodes = scorer.score_episodes

        def recorded(episodes, **options):
            episodes_of_steps.append(episodes)
            return score_episodes(episodes, **options)

        scorer.score_episodes = recorded

    run, policy = run_tiny(tmp_path_factory.mktemp("conversations") / "run", before=record_episodes, **task)
    return run, policy, episodes_of_steps


def test_a_run_counts_only_the_models_tokens(unbroken):
    run, _, episodes_of_steps = unbroken
    metrics = read_metrics(run.folder)
    assert len(metrics) == len(episodes_of_steps) == 3
    for step, episodes in zip(metrics, episodes_of_steps, strict=True):
        lengths = [sum(episode.loss_mask) for episode in episodes]
        assert step["completions/mean_length"] == pytest.approx(fmean(lengths))
        assert step["completions/max_length"] == max(lengths)
        assert step["completions/clipped_ratio"] == fmean(episode.truncated for episode in episodes)
        assert step["conversations/turns"] == fmean(episode.turns for episode in episodes) > 1
        assert step["reward"] == pytest.approx(fmean(episode.verdict.score for episode in episodes))
        assert step[LOGPROB_MISMATCH] < 1e-4
    lines = [json.loads(line) for line in (run.completions / "step-00001.jsonl").read_text().splitlines()]
    assert [line["messages"] for line in lines] == [episode.messages for episode in episodes_of_steps[0]]
    assert [line["num_tokens"] for line in lines] == [sum(episode.loss_mask) for episode in episodes_of_steps[0]]


def test_an_evaluation_counts_only_the_models_tokens(unbroken):
    """Those of its texts, and an end of turn for each text that was not cut off."""
    run, policy, _ = unbroken
    samples = evaluate(run, build_sampler(policy, run.config), load_data(run.config).eval, "trained")
    assert len(samples) == 4
    for sample in samples:
        texts = [message["content"] for message in sample["messages"] if message["role"] == "assistant"]
        lengths = [len(ids) for ids in policy.tokenizer(texts, add_special_tokens=False)["input_ids"]]
        assert sample["turns"] == len(texts) > 1
        assert sample["num_tokens"] == sum(lengths) + len(texts) - sample["truncated"]


def test_a_run_killed_in_its_third_step_ends_in_the_same_bits(unbroken, task, tmp_path, monkeypatch):
    expected, _, _ = unbroken
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        append_metrics = Run.append_metrics

        def kill_in_third_step(self, metrics):
            if metrics["step"] == 3:
                raise KeyboardInterrupt
            append_metrics(self, metrics)

        patched.setattr(Run, "append_metrics", kill_in_third_step)
        run_tiny(tmp_path / "run", **task)
    lock.held.pop().release()  # as the end of a process does
    assert not (tmp_path / "run" / "adapter").exists()

    resumed, _ = run_tiny(tmp_path / "run", Invocation(resume=True), **task)
    for file in ("adapter/adapter_model.safetensors", "completions/step-00001.jsonl", "completions/step-00002.jsonl"):
        assert (resumed.folder / file).read_bytes() == (expected.folder / file).read_bytes(), file
    rewards = [step["reward"] for step in read_metrics(expected.folder)]
    assert [step["reward"] for step in read_metrics(resumed.folder)] == rewards


CALCULATOR = """
def load(split):
    return [{"question": f"{split} {n}?"} for n in range(16)]

class Environment:
    def reset(self, **row):
        pass

    def add(self, a: int, b: int):
        '''Add two numbers.

        Args:
            a: a number.
            b: a number.
        '''
        return a + b

    def get_reward(self):
        return 1.0
"""


def test_tools_that_the_chat_template_cannot_render_are_refused_before_weights_are_loaded(tmp_path, warm):
    (tmp_path / "my_task.py").write_text(CALCULATOR)
    ended = warm.start(RECIPE, "--task", "my_task.py", "--output-dir", "run", cwd=tmp_path).end()
    assert ended.returncode == 2
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "--model.chat-template" in error
    assert "Loading weights" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_sft_trains_on_the_turns_of_the_model(task):
    tokenizer = base_model.load_tokenizer(ModelConfig())
    rows = load_data(replace(RunConfig(), {"data": {"task": task["data"]["task"]}})).train
    examples = sft_examples(rows, Sampler(None, tokenizer, [tokenizer.eos_token_id]))
    for row, example in zip(rows, examples, strict=True):
        labels = [token for token in example["labels"] if token != IGNORED]
        assert len(labels) < len(example["labels"])
        end = tokenizer.eos_token
        assert tokenizer.decode(labels) == "".join(f"It is {n + 7}.{end}" for n in range(row["turns"]))
        text = tokenizer.decode(example["input_ids"])
        assert text.count("Are you sure about 8?") == row["turns"] - 1


def test_only_sampled_tokens_are_counted():
    token_ids = [[1, 2, 3], [4]]
    loss_mask = [[1, 0, 1], [1]]
    logprobs = [[-1.0, 0.0, -2.0], [-3.0]]
    assert sampled_tokens(([], token_ids, loss_mask, [], logprobs)) == ([[1, 3], [4]], [[-1.0, -2.0], [-3.0]])
