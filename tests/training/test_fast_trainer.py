"""FastGRPOTrainer in place of TRL's: example scripts of its documentation, equal gradients, and what stays TRL's."""

import textwrap
from importlib import metadata
from pathlib import Path

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
from lora_grpo.sampling import completion_seed, merged_copy
from lora_grpo.sampling.merged_copy import MergedCopySampler
from lora_grpo.training import FastGRPOTrainer, trl_compat
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
    rewards = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        rewards.append(0.01 * sum(map(ord, text)) / max(len(text), 1))
    return rewards


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
    reward_inputs = []
    calculate_rewards = GRPOTrainer._calculate_rewards

    def recorded(trainer, inputs, prompts, completions, ids):
        columns = [sorted(row) for row in inputs]
        types = [type(completion) for completion in completions]
        reward_inputs.append((prompts, columns, types))
        return calculate_rewards(trainer, inputs, prompts, completions, ids)

    names = {**globals(), "args": lambda **settings: config(folder, **settings)}
    with monkeypatch.context() as patched:
        patched.setattr(GRPOTrainer, "_calculate_rewards", recorded)
        exec(IMPORTS[side] + "\n" + textwrap.dedent(source), names)
    return names["trainer"], reward_inputs


def logged_steps(trainer):
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_another_import(name, tmp_path, monkeypatch, capsys):
    steps_before = Counter.steps
    trl, reward_inputs_of_trl = run_script(SCRIPTS[name], "trl", tmp_path, monkeypatch)
    fast, reward_inputs = run_script(SCRIPTS[name], "fast", tmp_path, monkeypatch)
    assert type(trl) is GRPOTrainer
    assert type(fast) is FastGRPOTrainer
    assert fast.sampler is not None
    assert not fast.fallback_reason
    assert not fast.packing_disabled_reason
    assert "training as TRL" not in capsys.readouterr().err

    # Rewards and callbacks get the same.
    assert reward_inputs == reward_inputs_of_trl
    assert len(reward_inputs) == 2
    assert Counter.steps - steps_before == (4 if "Counter" in SCRIPTS[name] else 0)

    # Each step logs what TRL logs, and more.
    steps = logged_steps(fast)
    for step, step_of_trl in zip(steps, logged_steps(trl), strict=True):
        assert step_of_trl.keys() <= step.keys()
        assert step["time/rollouts"] > 0
        assert step["sampling/sampling_logp_difference/mean"] < tolerance(fast)
    assert any(step["grad_norm"] > 0 for step in steps)


# The same rollouts have the same gradient.


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def train_both(folder, monkeypatch, **arguments):
    """Train a FastGRPOTrainer, and TRL's on its rollouts. Return gradients and logs of both."""
    rollouts = []
    generate = FastGRPOTrainer._generate_single_turn

    def recorded(self, *args, **kwargs):
        rollouts.append(generate(self, *args, **kwargs))
        return rollouts[-1]

    gradients = Gradients()
    gradients_of_trl = Gradients()
    with monkeypatch.context() as patched:
        patched.setattr(FastGRPOTrainer, "_generate_single_turn", recorded)
        fast = build(FastGRPOTrainer, folder, callbacks=[gradients], **arguments)
        fast.train()
        assert fast.sampler is not None
        patched.setattr(GRPOTrainer, "_generate_single_turn", lambda *args, **kwargs: (rollouts.pop(0)[0], None))
        trl = build(GRPOTrainer, folder, callbacks=[gradients_of_trl], **arguments)
        trl.train()
    return (gradients.steps, logged_steps(fast)), (gradients_of_trl.steps, logged_steps(trl))


def zero_variance(completions, **columns):
    """Return rewards whose variance is zero in every second group."""
    rewards = code_points(completions)
    for index in range(len(rewards)):
        group = index // 4
        if group % 2 == 1:
            rewards[index] = 1.0
    return rewards


ONE_MICRO_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
CASES = {
    "dapo": {},
    "grpo": {"settings": {"loss_type": "grpo"}},
    "dr_grpo, batch": {"settings": {"loss_type": "dr_grpo", "scale_rewards": "batch"}},
    "reference": {"settings": {"beta": 0.1}},
    "zero variance": {"reward": zero_variance},
    "two iterations": {"settings": {"num_iterations": 2, "max_steps": 4}},
    "truncated": {"prompts": CHATS, "settings": {"mask_truncated_completions": True, "max_completion_length": 80}},
    "one micro-batch": {
        "settings": ONE_MICRO_BATCH | {"loss_type": "bnpo", "entropy_coef": 0.1},
        "reward": zero_variance,
    },
    "some tokens": {"settings": ONE_MICRO_BATCH | {"top_entropy_quantile": 0.5}, "reward": zero_variance},
    "chat": {"prompts": CHATS},
    "full fine-tuning": {"peft_config": None, "settings": {"learning_rate": 1e-5}},
    "parts": {"settings": {"steps_per_generation": 1}},
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, tmp_path, monkeypatch):
    (gradients, steps), (gradients_of_trl, steps_of_trl) = train_both(tmp_path, monkeypatch, **CASES[name])
    assert len(gradients) == len(gradients_of_trl) >= 2
    assert distance(gradients[0], gradients_of_trl[0]) < 1e-5
    assert distance(gradients[-1], gradients_of_trl[-1]) < 1e-3  # weights differ by rounding
    for step, step_of_trl in zip(steps, steps_of_trl, strict=True):
        assert step["loss"] == pytest.approx(step_of_trl["loss"], abs=1e-5)
        assert step.get("reward") == pytest.approx(step_of_trl.get("reward"))


def test_prompts_are_read_once_and_zero_variance_groups_are_skipped(tmp_path, monkeypatch):
    """Otherwise equal gradients prove nothing."""
    num_packed_passes = 0
    rows_of_passes = []
    packed_rows = exact_pass.packed_rows
    rows_with_advantage = exact_pass.rows_with_advantage

    def counted(*args):
        nonlocal num_packed_passes
        num_packed_passes += 1
        return packed_rows(*args)

    def recorded(*args, **options):
        rows_of_passes.append(rows_with_advantage(*args, **options))
        return rows_of_passes[-1]

    monkeypatch.setattr(exact_pass, "packed_rows", counted)
    monkeypatch.setattr(exact_pass, "rows_with_advantage", recorded)
    trainer = build(FastGRPOTrainer, tmp_path, reward=zero_variance, settings={"max_steps": 1})
    trainer.train()
    assert trainer.loss_pass.uses_tiles
    assert num_packed_passes == 1
    all_rows, rows_of_skipped_group = rows_of_passes
    assert all_rows is None
    assert len(rows_of_skipped_group) == 0


def test_the_sampler_does_not_repeat_keys_for_query_heads(tmp_path, monkeypatch):
    """It is built after the trainer has replaced the attention of the model that it copies."""
    attend = merged_copy._attend
    widths = []

    def recorded(module, queries, *args, **kwargs):
        widths.append(queries.shape[2])
        return attend(module, queries, *args, **kwargs)

    monkeypatch.setattr(merged_copy, "_attend", recorded)
    build(FastGRPOTrainer, tmp_path, settings={"max_steps": 1}).train()
    assert widths.count(1) > 10  # decoding reads one token at a time


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


def with_images():
    """Return arguments for a model with a processor in place of a tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.config.image_token_id = 7  # TRL 1.16 does not sample it
    return {"model": model, "processing_class": TextProcessor(AutoTokenizer.from_pretrained(MODEL))}


def fixed_rollouts(prompts, trainer):
    prompt_ids = trainer.processing_class(list(prompts))["input_ids"]
    completion_ids = [[5 + index % 3, 9] for index in range(len(prompts))]
    logprobs = [[-1.0, -2.0]] * len(prompts)
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


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
    "images": with_images,
    "PEFT's LoRA": with_own_adapter,
    "several GPUs": on_two_devices,
    "`off_policy_mask_threshold`": lambda: {"settings": {"off_policy_mask_threshold": 0.1, "top_p": 0.9}},
    "LoRA": lambda: {"peft_config": VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])},
}


def trained_weights(model):
    """Return a copy of the weights that are trained, by name."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def are_equal(weights, expected):
    """Return whether two models have the same weights, to the bit."""
    return weights.keys() == expected.keys() and all(
        torch.equal(weight, expected[name]) for name, weight in weights.items()
    )


def losses(trainer):
    return [step["loss"] for step in logged_steps(trainer)]


def reasons(printed):
    return [line for line in printed.splitlines() if ", which takes " in line]


SLOWEST = ("images", "several GPUs", "`top_k`", "`generation_kwargs`")
EXHAUSTIVE = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize("name", [pytest.param(name, marks=EXHAUSTIVE if name in SLOWEST else []) for name in PLAIN])
def test_what_cannot_be_faster_runs_as_in_trl_and_prints_why(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Engine)
    trl = build(GRPOTrainer, tmp_path, **PLAIN[name]())
    trl.train()
    capsys.readouterr()
    fast = build(FastGRPOTrainer, tmp_path, **PLAIN[name]())
    fast.train()
    [line] = reasons(capsys.readouterr().err)
    assert name in line
    assert fast.sampler is None
    assert losses(fast) == losses(trl)
    assert are_equal(trained_weights(fast.model), trained_weights(trl.model))


def test_an_attention_that_cannot_share_prompts_reads_padded_rows(tmp_path, monkeypatch, capsys):
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager")
    capsys.readouterr()
    fast = build(FastGRPOTrainer, tmp_path, model=model)
    [line] = reasons(capsys.readouterr().err)
    assert "eager" in line
    assert fast.packing_disabled_reason
    assert not fast.fallback_reason
    fast.train()
    assert fast.sampler is not None
    assert all(torch.isfinite(weight).all() for weight in trained_weights(fast.model).values())


# The adapter, the check of the sampler, and completions


def quantized():
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=settings, dtype=torch.float32)


def test_the_adapter_of_a_quantized_model_is_float32_and_loads_with_peft(tmp_path):
    trainer = build(FastGRPOTrainer, tmp_path, model=quantized())
    assert {weight.dtype for weight in trained_weights(trainer.model).values()} == {torch.float32}
    trainer.train()
    assert isinstance(trainer.sampler, MergedCopySampler)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved", is_trainable=True)
    assert are_equal(trained_weights(loaded), trained_weights(trainer.model))


def test_a_trained_adapter_is_not_rounded(tmp_path):
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(quantized(), lora)
    weights_before = trained_weights(model)
    trainer = build(FastGRPOTrainer, tmp_path, model=model, peft_config=None, settings={"beta": 0.1})
    assert are_equal(trained_weights(trainer.model), weights_before)
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
    assert "serves a policy" in line
    assert trainer.sampler is None
    assert trainer.state.global_step == 2
    # The loss pass was not at fault.
    assert not trainer.fallback_reason
    assert not trainer.packing_disabled_reason


def test_the_check_leaves_the_weights_and_the_mode(tmp_path):
    trainer = build(FastGRPOTrainer, tmp_path)
    weights_before = trained_weights(trainer.model)
    trainer.model.train()
    trainer._generate_single_turn(trainer.processing_class(TEXTS)["input_ids"], None, {}, 1)
    assert trainer.model.training
    assert are_equal(trained_weights(trainer.model), weights_before)


def test_evaluations_repeat_their_completions_and_leave_the_metrics_of_steps(tmp_path):
    rows = Dataset.from_list([{"prompt": text} for text in TEXTS[:3]])
    trainer = build(FastGRPOTrainer, tmp_path, eval_dataset=rows, settings={"per_device_eval_batch_size": 4})
    first = trainer.evaluate()
    trainer.args.per_device_eval_batch_size = 12
    second = trainer.evaluate()
    assert first["eval_reward"] == pytest.approx(second["eval_reward"])
    assert first["eval_reward_std"] > 0
    assert not trainer._metrics["train"]


class SeedRecorder:
    """In place of a sampler: keeps the seeds of each call, and returns nothing."""

    def __init__(self):
        self.calls = []

    def sample(self, prompts, params, seeds):
        self.calls.append(seeds)
        return [[] for _ in prompts]


EVALUATION_PROMPTS = {
    # The index of a process, its prompts, and which completion of its group the first one is.
    "a prompt twice in the data": (0, [[3]] * 8, 0),
    "a group that began on another process": (1, [[3], [3], [4], [5], [5]], 1),
}


@pytest.mark.parametrize(("process", "prompt_ids", "index"), EVALUATION_PROMPTS.values(), ids=EVALUATION_PROMPTS)
def test_equal_prompts_of_an_evaluation_have_different_seeds(process, prompt_ids, index, tmp_path, monkeypatch):
    trainer = build(FastGRPOTrainer, tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
    trainer.model.eval()
    trainer.step_sampling.sampler = SeedRecorder()
    for _ in range(2):
        trainer._generate_single_turn(prompt_ids, None, {}, 4)
    seeds, seeds_of_repetition = trainer.sampler.calls
    assert seeds == seeds_of_repetition
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == completion_seed(trainer.args.seed, "eval [3]", index)


def test_a_resumed_script_with_dropout_ends_in_the_same_bits(tmp_path):
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], lora_dropout=0.1)
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    unbroken = build(FastGRPOTrainer, tmp_path, peft_config=lora, settings=settings)
    unbroken.train()
    resumed = build(FastGRPOTrainer, tmp_path, peft_config=lora, settings=settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert are_equal(trained_weights(resumed.model), trained_weights(unbroken.model))


def test_the_configuration_of_granite_is_saved_as_it_was(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 4096}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "logits_scaling": 8.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("granite", **sizes))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trainer = build(FastGRPOTrainer, tmp_path, model=model, peft_config=None, processing_class=tokenizer)
    assert "logit_scale" not in trainer.model.config.to_dict()
    assert trainer.loss_pass.uses_tiles == trl_compat.has_fused_head()


def test_rollouts_of_one_step_differ(tmp_path):
    """Two generations in a step, of the same prompt."""
    generations = []

    def reward(completions, **columns):
        generations.append(completions)
        return code_points(completions)

    settings = {"steps_per_generation": 1, "max_steps": 1}
    build(FastGRPOTrainer, tmp_path, TEXTS[:1] * 2, reward, settings).train()
    first, second = generations
    assert first != second
    assert len(set(first)) > 1
