"""A base model without a chat template ends its answer where it writes the next question itself."""

import json
from dataclasses import replace

import pytest
from helpers.plain_base import ANSWERS, INVENTED, OTHERS, make_plain_base, rows, rows_file
from helpers.tiny_runs import run_tiny

from lora_grpo.cli import verbs
from lora_grpo.config import RunConfig
from lora_grpo.config import replace as config_with
from lora_grpo.data import load_data
from lora_grpo.models import ModelFlags, resolve
from lora_grpo.prompts import chat, plain_text, styles
from lora_grpo.rewards import Scorer, parse_reward_specs
from lora_grpo.rewards import resolve as resolve_rewards
from lora_grpo.rollouts import grade, play_all
from lora_grpo.sampling import SamplingParams, build

GREEDY = SamplingParams(1, 0.0, 1.0, 64)
SAMPLED = SamplingParams(4, 1.0, 1.0, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_plain_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def sampler(folder):
    model = resolve(folder, ModelFlags(), bits=16)
    return build.load_sampler(model, "transformers", build.load_tokenizer(model), 0, 0)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" 18\n\nQuestion: Next?\nAnswer: 20", " 18\n\n"),
        (" 18\n  Question: Next?", " 18\n"),
        (" 18\nQuestion:", " 18\n"),
        ("\nQuestion: Next?", "\n"),
        (" 18\n\nQuestion: a?\n\nQuestion: b?", " 18\n\n"),
        (" The Question: is easy.\n#### 18", None),
        (" Question: what is 9 + 9?\n#### 18", None),  # after `Answer:`, in the same line
        (" 18\nQuestions: none\n", None),
        (" 18\nThe next Question: 7", None),
        (" 18\nquestion: 7", None),
        (" 18\n\nQuestion", None),
        ("", None),
    ],
)
def test_only_a_line_that_begins_with_question_ends_a_completion(completion, answer):
    assert plain_text.before_next_question(completion) == (completion if answer is None else answer)


def test_an_evaluation_grades_the_answer_and_not_that_of_the_invented_question(sampler):
    episodes = [episode for [episode] in play_all(sampler, rows(), GREEDY, [0] * 4)]
    assert [verdict.passed for verdict in grade("gsm8k", episodes)] == [True] * 4
    assert [episode.text for episode in episodes] == [f" It is {n}.\n#### {n}\n\n" for n in ANSWERS.values()]
    for episode in episodes:
        assert (episode.truncated, episode.ended_by, episode.asked_next_question) == (False, "reply", True)
        assert sampler.tokenizer.decode(episode.token_ids) == f"{episode.text}Question:"
        assert episode.loss_mask == [1] * len(episode.token_ids)


def test_the_command_evaluates_a_base_model(folder, tmp_path):
    source = rows_file(tmp_path)
    out = tmp_path / "out"
    arguments = ["evaluate", folder, "--task", "gsm8k", "--data", source, "--output-dir", str(out)]
    assert verbs.run_front_door([*arguments, "--style", "hashes", "--max-completion-tokens", "64"]) == 0
    samples = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(sample["passed"], sample["truncated"]) for sample in samples] == [(True, False)] * 4


@pytest.mark.parametrize("batch_size", [None, 3])
def test_stopping_early_and_cutting_later_give_the_same_completions(sampler, batch_size):
    prompts = [chat.render_row(sampler.tokenizer, row) for row in rows()]
    samples = []
    for stops in (False, True):
        with sampler.awake(adapter=False):
            sampler.batch_size = batch_size
            params = replace(SAMPLED, ends_at_next_question=stops)
            groups = dict(sampler.stream(prompts, params, range(16)))
            samples.append([sample for number in range(4) for sample in groups[number]])
    uncut, ended = samples
    assert any(INVENTED[:30] in sample.text for sample in uncut)
    assert sum(sample.asked_next_question for sample in ended) > 4
    for longer, sample in zip(uncut, ended, strict=True):
        count = len(sample.token_ids)
        assert longer.token_ids[:count] == sample.token_ids and len(sample.logprobs) == count
        assert longer.logprobs[:count] == pytest.approx(sample.logprobs, abs=1e-4)
        assert sample.text == plain_text.before_next_question(longer.text)
        assert sample.truncated == (longer.truncated and not sample.asked_next_question)


def test_training_counts_the_tokens_that_ended_the_answer_and_no_others(folder, tmp_path):
    run, _ = run_tiny(
        tmp_path / "out",
        model={"name": folder},
        data={
            "task": "gsm8k",
            "train": rows_file(tmp_path),
            "eval": rows_file(tmp_path, OTHERS),
            "prompt_style": "hashes",
            "train_limit": 4,
            "eval_limit": 2,
        },
        sampling={"max_completion_tokens": 64, "num_generations": 4},
        rewards=("near_length:60", "correct_answer=1.0"),
        train={"max_steps": 2, "completions_steps": 1, "learning_rate": 1e-5},
        grpo=("mask_truncated_completions=true",),
    )
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for step in steps:
        lines = [json.loads(x) for x in (run.completions / f"step-{step['step']:05d}.jsonl").read_text().splitlines()]
        assert sum(line["passed"] for line in lines) >= len(lines) / 2
        assert not any("\nQuestion:" in line["completion"] for line in lines)
        assert step["completions/clipped_ratio"] == sum(line["truncated"] for line in lines) / len(lines) < 0.5
        lengths = [line["num_tokens"] for line in lines]
        assert step["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
        assert step["sampling/sampling_logp_difference/mean"] < 1e-4


def test_a_trainer_that_samples_itself_has_the_same_text_graded(sampler):
    scorer = Scorer(resolve_rewards(parse_reward_specs(["correct_answer=1.0"])), sampler.tokenizer, rows())
    completion = f" It is 18.\n#### 18{INVENTED}"
    batch = scorer.score(["q/0"], [completion], [[1]])
    assert batch.rewards == [1.0] and batch.texts == [" It is 18.\n#### 18\n\n"]


def test_the_start_of_a_program_is_no_question(sampler):
    row = {"completion_prefix": "def f():\n", "prompt": [{"role": "user", "content": "?"}]}
    assert not plain_text.asks_in_plain_text(sampler.tokenizer, row)


def test_a_chat_shows_the_answer_and_not_the_next_question(folder, capsys):
    question, answer = next(iter(ANSWERS.items()))
    system = styles.SYSTEM_PROMPTS["hashes"]
    assert verbs.run_front_door(["chat", folder, question, "--system", system, "--max-completion-tokens", "64"]) == 0
    assert capsys.readouterr().out.partition(": ")[2] == f" It is {answer}.\n#### {answer}\n\n\n"


def test_a_reply_follows_the_question_that_the_model_began(folder, tmp_path, sampler):
    task = tmp_path / "reply_task.py"
    task.write_text(
        "def load(split):\n    return [{'question': 'What is 9 plus 9?' if split == 'train' else '?'}]\n"
        "class Environment:\n"
        "    def reset(self, **row):\n        self.right = False\n"
        "    def reply(self, text):\n        self.right = '#### 18' in text\n        return 'Are you sure?'\n"
        "    def get_reward(self):\n        return float(self.right)\n"
        f"SYSTEM_PROMPT = {styles.SYSTEM_PROMPTS['hashes']!r}\nMAX_TURNS = 2\n"
    )
    config = config_with(RunConfig(), {"data": {"task": str(task)}, "train": {"prompts_per_step": 1}})
    [row] = load_data(config).train
    [[episode]] = play_all(sampler, [row], replace(GREEDY, max_tokens=200, max_turn_tokens=64), [0])
    assert [message["content"] for message in episode.messages[:2]] == [" It is 18.\n#### 18\n\n", "Are you sure?"]
    text = sampler.tokenizer.decode(episode.token_ids)
    assert text.startswith(" It is 18.\n#### 18\n\nQuestion: Are you sure?\nAnswer:")
