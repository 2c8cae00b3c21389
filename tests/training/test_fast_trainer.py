"""FastGRPOTrainer in place of TRL's: example scripts of its documentation, equal gradients, and what stays TRL's."""

import textwrap
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset
from helpers.loss_passes import distance
from packaging.version import Version
from peft import AutoPeftModelForCausalLM, LoraConfig, VeraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    ProcessorMixin,
    TrainerCallback,
)
from transformers.integrations.peft import MIN_PEFT_VERSION
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from lora_grpo import starter
from lora_grpo.loss import exact_pass
from lora_grpo.rewards.functions import completion_text
from lora_grpo.sampling import completion_seed, merged_copy
from lora_grpo.sampling.merged_copy import MergedCopySampler
from lora_grpo.training import FastGRPOTrainer
from lora_grpo.training.logprob_check import tolerance

MODEL = str(starter.model_path())
TEXTS = ["Tom has 3 plums and buys 4.", "Ann has 9 apples.", "How many?", "A box holds 6 pens. Sam has two boxes."]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]


def config(folder, **settings):
    default = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    default |= {"max_completion_length": 16, "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-3}
    default |= {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    return GRPOConfig(output_dir=str(folder), **{**default, **settings})


def code_points(completions, **columns):
    """Return the mean code point of each completion, times 0.01: a reward that nearly always differs."""
    texts = [completion_text(completion) for completion in completions]
    return [0.01 * sum(map(ord, text)) / max(len(text), 1) for text in texts]


def build(trainer_class, folder, prompts=TEXTS, reward=code_points, settings=None, **arguments):
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    default = {"model": MODEL, "peft_config": lora, "reward_funcs": reward}
    default |= {"train_dataset": Dataset.from_list([{"prompt": prompt} for prompt in prompts])}
    return trainer_class(args=config(folder, **(settings or {})), **{**default, **arguments})


# Scripts of TRL's documentation, and one with a format of thoughts and answers. They differ in their import only.

SCRIPTS = {
    "quick start": """
        def reward_len(completions, **kwargs):
            return [-abs(20 - len(completion)) for completion in completions]

        dataset = Dataset.from_list([{"prompt": text} for text in TEXTS])
        trainer = GRPOTrainer(model=MODEL, reward_funcs=reward_len, args=args(bf16=None), train_dataset=dataset)
        trainer.train()
    """,
    "chat": """
        def reward_func(completions, **kwargs):
            completion_contents = [completion[0]["content"] for completion in completions]
            return [float(len(set(content))) for content in completion_contents]

        dataset = Dataset.from_list([{"prompt": chat} for chat in CHATS])
        trainer = GRPOTrainer(
            MODEL, reward_func, args(), dataset, processing_class=AutoTokenizer.from_pretrained(MODEL),
            peft_config=LoraConfig(task_type="CAUSAL_LM"),
        )
        trainer.train()
    """,
    "columns, token ids and trainer state": """
        def by_length(completion_ids, trainer_state, **kwargs):
            return [float(len(ids)) / (trainer_state.global_step + 1) for ids in completion_ids]

        def by_truth(prompts, completions, ground_truth, log_metric, log_extra, **kwargs):
            log_metric("truths", len(ground_truth))
            log_extra("truth", ground_truth)
            return [float(c.count(gt)) for c, gt in zip(completions, ground_truth)]

        dataset = Dataset.from_list([{"prompt": text, "ground_truth": text[0]} for text in TEXTS])
        trainer = GRPOTrainer(model=MODEL, reward_funcs=[by_length, by_truth], args=args(), train_dataset=dataset)
        trainer.train()
    """,
    "tasks with None": """
        def math_reward_func(prompts, completions, task, **kwargs):
            return [float(len(c)) if t == "math" else None for c, t in zip(completions, task)]

        async def coding_reward_func(prompts, completions, task, **kwargs):
            return [float(c.count(" ")) if t == "coding" else None for c, t in zip(completions, task)]

        tasks = ["math", "coding", "math", "none"]
        dataset = Dataset.from_list([{"prompt": text, "task": task} for text, task in zip(TEXTS, tasks)])
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL), reward_funcs=[math_reward_func, coding_reward_func],
            args=args(reward_weights=[1.0, 0.5]), train_dataset=dataset,
        )
        trainer.train()
    """,
    "thoughts and answers": """
        import re

        SYSTEM = "Respond with <reasoning>...</reasoning> and <answer>...</answer>."

        def correctness_reward(prompts, completions, answer, **kwargs):
            responses = [completion[0]["content"] for completion in completions]
            extracted = [r.split("<answer>")[-1].split("</answer>")[0].strip() for r in responses]
            return [2.0 if r == a else 0.0 for r, a in zip(extracted, answer)]

        def format_reward(completions, **kwargs):
            pattern = r"<reasoning>.*?</reasoning>\\s*<answer>.*?</answer>"
            return [float(bool(re.search(pattern, c[0]["content"], re.DOTALL))) for c in completions]

        def tags_reward(completions, **kwargs):
            return [c[0]["content"].count("<") * 0.125 + len(c[0]["content"]) * 0.01 for c in completions]

        rows = [
            {"prompt": [{"role": "system", "content": SYSTEM}, *chat], "answer": str(number)}
            for number, chat in enumerate(CHATS)
        ]
        trainer = GRPOTrainer(
            model=get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), LoraConfig(task_type="CAUSAL_LM")),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            reward_funcs=[correctness_reward, format_reward, tags_reward],
            args=args(beta=0.04, reward_weights=[1.0, 0.5, 0.5], gradient_checkpointing=False),
            train_dataset=Dataset.from_list(rows),
            callbacks=[Counter()],
        )
        trainer.train()
    """,
}
IMPORTS = {
    "trl": "from trl import GRPOTrainer",
    "fast": "from lora_grpo.training import FastGRPOTrainer as GRPOTrainer",
}


class Counter(TrainerCallback):
    steps = 0

    def on_step_end(self, *args, **kwargs):
        Counter.steps += 1


def run_script(source, side, folder, monkeypatch):
    """Return the trainer of a script, and what the trainer passed to its rewards."""
    passed = []
    calculate = GRPOTrainer._calculate_rewards

    def recorded(trainer, inputs, prompts, completions, ids):
        passed.append((prompts, [sorted(row) for row in inputs], [type(completion) for completion in completions]))
        return calculate(trainer, inputs, prompts, completions, ids)

    names = {**globals(), "args": lambda **settings: config(folder, **settings)}
    with monkeypatch.context() as patched:
        patched.setattr(GRPOTrainer, "_calculate_rewards", recorded)
        exec(IMPORTS[side] + "\n" + textwrap.dedent(source), names)
    return names["trainer"], passed


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_another_import(name, tmp_path, monkeypatch, capsys):
    before = Counter.steps
    (trl, passed_by_trl), (fast, passed) = (run_script(SCRIPTS[name], side, tmp_path, monkeypatch) for side in IMPORTS)
    assert (type(trl), type(fast)) == (GRPOTrainer, FastGRPOTrainer)
    assert passed == passed_by_trl and len(passed) == 2
    assert Counter.steps - before == (4 if "Counter" in SCRIPTS[name] else 0)
    assert fast.sampler is not None and not fast.fallback_reason and not fast.packing_disabled_reason
    steps = step_logs(fast)
    steps_of_trl = step_logs(trl)
    assert all(steps_of_trl[number].keys() <= steps[number].keys() for number in range(2))
    assert any(step["grad_norm"] > 0 for step in steps) and all(step["time/rollouts"] > 0 for step in steps)
    assert all(step["sampling/sampling_logp_difference/mean"] < tolerance(fast) for step in steps)
    assert "training as TRL" not in capsys.readouterr().err


# The same rollouts have the same gradient.


def step_logs(trainer):
    """Return what the trainer logged for each step."""
    return [log for log in trainer.state.log_history if "loss" in log]


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.clone()
        self.steps.append(gradients)


def train_both(folder, monkeypatch, **how):
    """Train a FastGRPOTrainer, and TRL's on its rollouts. Return gradients and logs of both."""
    rollouts = []
    sampled = FastGRPOTrainer._generate_single_turn

    def recorded(self, *args, **kwargs):
        rollouts.append(sampled(self, *args, **kwargs))
        return rollouts[-1]

    outcomes = []
    with monkeypatch.context() as patched:
        patched.setattr(FastGRPOTrainer, "_generate_single_turn", recorded)
        fast = build(FastGRPOTrainer, folder, callbacks=[Gradients()], **how)
        fast.train()
        assert fast.sampler is not None
        patched.setattr(GRPOTrainer, "_generate_single_turn", lambda *args, **kwargs: (rollouts.pop(0)[0], None))
        trl = build(GRPOTrainer, folder, callbacks=[Gradients()], **how)
        trl.train()
    for trainer in (fast, trl):
        [recorder] = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Gradients)]
        outcomes.append((recorder.steps, step_logs(trainer)))
    return outcomes


def zero_variance(completions, **columns):
    """Return rewards whose variance is zero in every second group."""
    rewards = code_points(completions)
    return [1.0 if index // 4 % 2 else value for index, value in enumerate(rewards)]


ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
CASES = {
    "dapo": {},
    "grpo": {"settings": {"loss_type": "grpo"}},
    "dr_grpo, batch": {"settings": {"loss_type": "dr_grpo", "scale_rewards": "batch"}},
    "reference": {"settings": {"beta": 0.1}},
    "zero variance": {"reward": zero_variance},
    "two iterations": {"settings": {"num_iterations": 2, "max_steps": 4}},
    "truncated": {"prompts": CHATS, "settings": {"mask_truncated_completions": True, "max_completion_length": 80}},
    "one micro-batch": {"settings": ONE | {"loss_type": "bnpo", "entropy_coef": 0.1}, "reward": zero_variance},
    "some tokens": {"settings": ONE | {"top_entropy_quantile": 0.5}, "reward": zero_variance},
    "chat": {"prompts": CHATS},
    "full fine-tuning": {"peft_config": None, "settings": {"learning_rate": 1e-5}},
    "parts": {"settings": {"steps_per_generation": 1}},
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, tmp_path, monkeypatch):
    (gradients, logs), (expected, expected_logs) = train_both(tmp_path, monkeypatch, **CASES[name])
    assert len(gradients) == len(expected) >= 2
    assert distance(gradients[0], expected[0]) < 1e-5
    assert distance(gradients[-1], expected[-1]) < 1e-3  # weights differ by rounding
    for ours, theirs in zip(logs, expected_logs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours.get("reward") == pytest.approx(theirs.get("reward"))


def test_prompts_are_read_once_and_zero_variance_groups_are_skipped(tmp_path, monkeypatch):
    """Otherwise equal gradients prove nothing."""
    widths = []
    nums_read = []
    packed_rows = exact_pass.packed_rows
    rows_with_advantage = exact_pass.rows_with_advantage

    def recorded_packing(model, completion_width):
        widths.append(completion_width)
        return packed_rows(model, completion_width)

    def recorded_rows(inputs):
        rows = rows_with_advantage(inputs)
        nums_read.append("all" if rows is None else len(rows))
        return rows

    monkeypatch.setattr(exact_pass, "packed_rows", recorded_packing)
    monkeypatch.setattr(exact_pass, "rows_with_advantage", recorded_rows)
    trainer = build(FastGRPOTrainer, tmp_path, reward=zero_variance, settings={"max_steps": 1})
    trainer.train()
    assert len(widths) == 2 and trainer.use_liger_kernel
    assert nums_read == ["all", 1]


def test_the_sampler_does_not_repeat_keys_for_query_heads(tmp_path, monkeypatch):
    """It is built after the trainer has replaced the attention of the model that it copies."""
    attend = merged_copy._attend
    query_lengths = []

    def recorded(module, query, *args, **kwargs):
        query_lengths.append(query.shape[2])
        return attend(module, query, *args, **kwargs)

    monkeypatch.setattr(merged_copy, "_attend", recorded)
    build(FastGRPOTrainer, tmp_path, settings={"max_steps": 1}).train()
    assert query_lengths.count(1) > 10  # one token per row


# What TRL's own code does


class TextProcessor(ProcessorMixin):
    """A processor without images."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template

    def __call__(self, text, **options):
        return self.tokenizer(text, **options)


class Engine:
    """In place of TRL's client of vLLM."""

    def __init__(self, **options):
        pass

    def sync_weights(self):
        pass

    def generate(self, prompts, **options):
        count = len(prompts)
        return prompts, [[5 + index % 3, 9] for index in range(count)], [[[-1.0], [-2.0]]] * count, None


def fixed_rollouts(prompts, trainer):
    ids = trainer.processing_class(list(prompts))["input_ids"]
    completions = [[5 + index % 3, 9] for index in range(len(ids))]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-1.0, -2.0]] * len(ids)}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: a number
        b: a number

    Returns:
        the sum
    """
    return a + b


def with_tools():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = Path(grpo_trainer.__file__).parents[1] / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    return {"tools": [add], "processing_class": tokenizer, "prompts": CHATS}


def with_own_adapter():
    """With the adapter of transformers instead of PEFT's model."""
    if Version(metadata.version("peft")) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"transformers {transformers.__version__} adds adapters with PEFT {MIN_PEFT_VERSION} only")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.add_adapter(LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False))
    return {"model": model, "peft_config": None}


def on_two_devices():
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}  # only named; both are the CPU
    return {"model": model}


PLAIN = {
    "`rollout_func`": lambda: {"rollout_func": fixed_rollouts},
    "`use_vllm`": lambda: {"settings": {"use_vllm": True}},
    "`tools`": with_tools,
    "`top_k`": lambda: {"settings": {"top_k": 5}},
    "`generation_kwargs`": lambda: {"settings": {"generation_kwargs": {"typical_p": 0.9}}},
    "images": lambda: {"processing_class": TextProcessor(AutoTokenizer.from_pretrained(MODEL))},
    "PEFT's LoRA": with_own_adapter,
    "several GPUs": on_two_devices,
    "`off_policy_mask_threshold`": lambda: {"settings": {"off_policy_mask_threshold": 0.1, "top_p": 0.9}},
    "LoRA": lambda: {"peft_config": VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])},
}


def trainable(trainer):
    return {name: weight.detach() for name, weight in trainer.model.named_parameters() if weight.requires_grad}


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def reasons(printed):
    return [line for line in printed.splitlines() if ", which takes " in line]


@pytest.mark.parametrize("name", PLAIN)
def test_what_cannot_be_faster_runs_as_in_trl_and_prints_why(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Engine)
    trl = build(GRPOTrainer, tmp_path, **PLAIN[name]())
    trl.train()
    capsys.readouterr()
    fast = build(FastGRPOTrainer, tmp_path, **PLAIN[name]())
    fast.train()
    [line] = reasons(capsys.readouterr().err)
    assert name in line and fast.sampler is None
    assert losses(fast) == losses(trl)
    expected = trainable(trl)
    assert all(torch.equal(weight, expected[key]) for key, weight in trainable(fast).items())


def test_an_attention_that_cannot_share_prompts_reads_padded_rows(tmp_path, monkeypatch, capsys):
    def eager():
        return AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager")

    capsys.readouterr()
    fast = build(FastGRPOTrainer, tmp_path, model=eager())
    [line] = reasons(capsys.readouterr().err)
    assert "eager" in line and fast.packing_disabled_reason and not fast.fallback_reason
    fast.train()
    assert fast.sampler is not None and all(torch.isfinite(weight).all() for weight in trainable(fast).values())


# The adapter, the check of the sampler, and completions


def quantized():
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=settings, dtype=torch.float32)


def test_the_adapter_of_a_quantized_model_is_float32_and_loads_with_peft(tmp_path):
    trainer = build(FastGRPOTrainer, tmp_path, model=quantized())
    assert {weight.dtype for weight in trainable(trainer).values()} == {torch.float32}
    trainer.train()
    assert isinstance(trainer.sampler, MergedCopySampler)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved", is_trainable=True)
    weights = {name: weight for name, weight in loaded.named_parameters() if weight.requires_grad}
    assert all(torch.equal(weight, weights[name]) for name, weight in trainable(trainer).items())


def test_a_trained_adapter_is_not_rounded(tmp_path):
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(quantized(), lora)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    trainer = build(FastGRPOTrainer, tmp_path, model=model, peft_config=None, settings={"beta": 0.1})
    assert all(torch.equal(weight, before[name]) for name, weight in trainable(trainer).items())
    assert "ref" in model.peft_config


def test_full_weights_load_without_this_package(tmp_path):
    trainer = build(FastGRPOTrainer, tmp_path, peft_config=None)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert "shared_prompts" not in (tmp_path / "saved" / "config.json").read_text()
    assert trainer.model.config._attn_implementation == "shared_prompts"


def test_trl_samples_if_the_sampler_misses_the_adapter(tmp_path, monkeypatch, capsys):
    wake_up = MergedCopySampler.wake_up
    monkeypatch.setattr(MergedCopySampler, "wake_up", lambda sampler, *, adapter: wake_up(sampler, adapter=False))
    capsys.readouterr()
    trainer = build(FastGRPOTrainer, tmp_path)
    trainer.train()
    [line] = reasons(capsys.readouterr().err)
    assert "serves a policy" in line and trainer.sampler is None and trainer.state.global_step == 2
    assert not trainer.fallback_reason and not trainer.packing_disabled_reason  # the loss pass was not at fault


def test_the_check_leaves_the_weights_and_the_mode(tmp_path):
    trainer = build(FastGRPOTrainer, tmp_path)
    before = {name: weight.clone() for name, weight in trainable(trainer).items()}
    trainer.model.train()
    trainer._generate_single_turn(trainer.processing_class(TEXTS)["input_ids"], None, {}, 1)
    assert trainer.model.training
    assert all(torch.equal(weight, before[name]) for name, weight in trainable(trainer).items())


def test_evaluations_repeat_their_completions_and_leave_the_metrics_of_steps(tmp_path):
    rows = Dataset.from_list([{"prompt": text} for text in TEXTS[:3]])
    trainer = build(FastGRPOTrainer, tmp_path, eval_dataset=rows, settings={"per_device_eval_batch_size": 4})
    first = trainer.evaluate()
    trainer.args.per_device_eval_batch_size = 12
    second = trainer.evaluate()
    assert first["eval_reward"] == pytest.approx(second["eval_reward"]) and first["eval_reward_std"] > 0
    assert not trainer._metrics["train"]


@pytest.mark.parametrize(("process", "rows"), [(0, [3] * 8), (1, [3, 3, 4, 5, 5])])
def test_equal_prompts_of_an_evaluation_have_different_seeds(process, rows, tmp_path, monkeypatch):
    """Groups of 4, of which the first may begin on another process, and a prompt twice in the data of a process."""
    trainer = build(FastGRPOTrainer, tmp_path)
    seeds_of_calls = []

    def sample(prompts, params, seeds):
        seeds_of_calls.append(seeds)
        return [[] for _ in prompts]

    monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
    trainer.model.eval()
    trainer.step_sampling.sampler = SimpleNamespace(sample=sample)
    trainer._generate_single_turn([[row] for row in rows], None, {}, 4)
    trainer._generate_single_turn([[row] for row in rows], None, {}, 4)
    [seeds, seeds_again] = seeds_of_calls
    assert seeds == seeds_again and len(set(seeds)) == len(seeds)
    first = completion_seed(trainer.args.seed, "eval [3]", process * 5 % 4)  # the other process has those before
    assert seeds[0] == first


def test_a_resumed_script_with_dropout_ends_in_the_same_bits(tmp_path):
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], lora_dropout=0.1)
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = build(FastGRPOTrainer, tmp_path, peft_config=lora, settings=settings)
    whole.train()
    resumed = build(FastGRPOTrainer, tmp_path, peft_config=lora, settings=settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected = trainable(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in trainable(resumed).items())


def test_the_configuration_of_granite_is_saved_as_it_was(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 4096}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "logits_scaling": 8.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("granite", **sizes))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trainer = build(FastGRPOTrainer, tmp_path, model=model, peft_config=None, processing_class=tokenizer)
    assert "logit_scale" not in trainer.model.config.to_dict() and not trainer.use_liger_kernel


def test_rollouts_of_one_step_differ(tmp_path):
    """Two generations in a step, of the same prompt."""
    rewarded = []

    def reward(completions, **columns):
        rewarded.append(completions)
        return code_points(completions)

    trainer = build(
        FastGRPOTrainer, tmp_path, TEXTS[:1] * 2, reward, settings={"steps_per_generation": 1, "max_steps": 1}
    )
    trainer.train()
    [first, second] = rewarded
    assert first != second
    assert len(set(first)) > 1
