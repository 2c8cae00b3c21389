"""recipes/grpo_from_scratch.py computes the loss and the gradient of the recipes' trainer."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from helpers.fresh_imports import LESSON
from helpers.loss_passes import distance
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig

from lora_grpo import starter
from lora_grpo.prompts import chat
from lora_grpo.tasks import get_task
from lora_grpo.training import FastGRPOTrainer


@pytest.fixture(scope="module")
def lesson():
    spec = importlib.util.spec_from_file_location("grpo_from_scratch", LESSON)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def batch(lesson):
    """The model of the lesson, with an adapter that changes it, and one batch of two groups with different rewards."""
    torch.manual_seed(0)
    model = lesson.load_model(str(starter.model_path()))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.01)
    tokenizer = AutoTokenizer.from_pretrained(starter.model_path())
    rows = chat.add_prompts(get_task("starter").load("train")[:2], "xml")
    group_rows = [row for row in rows for _ in range(lesson.GROUP_SIZE)]
    prompts = [chat.render_row(tokenizer, row) for row in group_rows]
    rollouts = lesson.sample(model, tokenizer, prompts, lesson.TEMPERATURE, torch.Generator().manual_seed(0))
    rewards = lesson.score(rollouts.texts(tokenizer), group_rows)
    assert all(len(group.unique()) > 1 for group in rewards.view(2, -1))  # otherwise there is no gradient
    return model, tokenizer, rollouts, rewards


def trainer_of_recipes(lesson, folder):
    """Return the trainer of the recipes with the settings of the lesson and a new adapter."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return FastGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            starter.model_path(), quantization_config=quantization, dtype=torch.float32
        ),
        args=GRPOConfig(
            str(folder),
            loss_type="dapo",
            num_generations=lesson.GROUP_SIZE,
            per_device_train_batch_size=2 * lesson.GROUP_SIZE,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        peft_config=LoraConfig(
            task_type="CAUSAL_LM", r=lesson.LORA_RANK, lora_alpha=lesson.LORA_ALPHA, target_modules="all-linear"
        ),
        processing_class=AutoTokenizer.from_pretrained(starter.model_path()),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
    )


def name_in_lesson(name):
    """`base_model.model.X.lora_A.default.weight` of PEFT is `X.lora_a` of the lesson."""
    return name.removeprefix("base_model.model.").removesuffix(".default.weight").lower()


def test_loss_and_gradient_are_those_of_the_trainer(lesson, batch, tmp_path):
    model, _, rollouts, rewards = batch
    advantages = lesson.group_advantages(rewards)
    logprobs = lesson.completion_logprobs(model, rollouts)
    mask = rollouts.completion_mask_RT
    assert (logprobs - rollouts.sampling_logprobs_RT)[mask == 1].abs().max() < 1e-4  # the sampler is the policy
    loss = lesson.grpo_loss(logprobs, rollouts, advantages)
    loss.backward()
    adapter = {name.lower(): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    trainer = trainer_of_recipes(lesson, tmp_path)
    trained = {name_in_lesson(name): p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained.keys() == adapter.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(adapter[name])
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = {
        "prompt_ids": rollouts.tokens_RL[:, : rollouts.prompt_length],
        "prompt_mask": rollouts.mask_RL[:, : rollouts.prompt_length],
        "completion_ids": rollouts.tokens_RL[:, rollouts.prompt_length :],
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    trainer_loss = trainer.compute_loss(trainer.model, inputs)
    trainer_loss.backward()

    assert trainer_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    gradients = [{name: p.grad for name, p in parameters.items()} for parameters in (adapter, trained)]
    assert distance(*gradients) < 1e-5


def test_advantages_are_those_of_trl(lesson):
    """The sample deviation of each group, as in TRL: 4 of 16 with reward 3 have mean 0.75 and deviation 1.3416."""
    some_right = [3.0] * 4 + [0.0] * 12
    all_right = [3.0] * 16
    advantages = lesson.group_advantages(torch.tensor(some_right + all_right))
    expected = [2.25 / 1.3417] * 4 + [-0.75 / 1.3417] * 12 + [0.0] * 16
    assert advantages.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<reasoning>\n2 + 3 = 5\n</reasoning>\n<answer>\n5\n</answer>", 3.0),
        ("The answer is 5.", 2.0),
        ("<reasoning>\n2 + 3 = 6\n</reasoning>\n<answer>\n6\n</answer>", 0.0),  # the format alone
        ("", 0.0),
    ],
)
def test_rewards(lesson, completion, reward):
    row = {"id": "sum", "question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5", "prompt_style": "xml"}
    assert lesson.score([completion], [row]).tolist() == [reward]


def test_the_token_that_ends_a_completion_is_trained_on(batch):
    _, tokenizer, rollouts, _ = batch
    completions = rollouts.tokens_RL[:, rollouts.prompt_length :]
    ended = 0
    for token_ids, mask in zip(completions.tolist(), rollouts.completion_mask_RT.tolist(), strict=True):
        if tokenizer.eos_token_id in token_ids:
            length = token_ids.index(tokenizer.eos_token_id) + 1
            assert mask == [1] * length + [0] * (len(mask) - length)
            ended += 1
    assert ended


def test_a_clipped_token_has_no_gradient(lesson):
    """PPO's clip: only a token that has already moved in the direction of its advantage is left alone."""
    sampled = torch.zeros(1, 4)
    moved = torch.tensor([[0.5, -0.5, 0.1, -0.1]], requires_grad=True)
    rollouts = lesson.Rollouts(torch.zeros(1, 5), torch.ones(1, 5), sampled, prompt_length=1)
    for advantage, has_gradient in ((1.0, [False, True, True, True]), (-1.0, [True, False, True, True])):
        moved.grad = None
        lesson.grpo_loss(moved, rollouts, torch.tensor([advantage])).backward()
        assert (moved.grad[0] != 0).tolist() == has_gradient


def test_padding_does_not_change_what_is_sampled(lesson, batch):
    """A short prompt beside a long one has the greedy completion that it has alone."""
    model, tokenizer, _, _ = batch
    rows = chat.add_prompts(get_task("starter").load("eval")[:4], "xml")
    prompts = [chat.render_row(tokenizer, row) for row in rows]
    together = lesson.sample(model, tokenizer, prompts, 0, torch.Generator()).texts(tokenizer)
    alone = [lesson.sample(model, tokenizer, [prompt], 0, torch.Generator()).texts(tokenizer)[0] for prompt in prompts]
    assert together == alone
    assert len({len(tokenizer(prompt)["input_ids"]) for prompt in prompts}) > 1


def test_the_recipe_trains_and_prints_its_table(tmp_path):
    command = [sys.executable, str(LESSON), "--steps", "1", "--eval-rows", "4"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "step   1   reward" in result.stdout
    *_, sampled, greedy = result.stdout.splitlines()
    assert [line.split()[0] for line in (sampled, greedy)] == ["pass@1", "greedy"]
    assert list(tmp_path.iterdir()) == []
