"""Runs with a teacher: another adapter, a second model, and the model itself with more in its prompt."""

import json
from pathlib import Path

import pytest
import torch
from helpers.teachers import with_kernel
from helpers.tiny_models import CONFIGS, make_model
from helpers.tiny_runs import begin_tiny, run_tiny, write_starter_files

from lora_grpo.config import Invocation
from lora_grpo.data import teacher_prompt_text
from lora_grpo.errors import UserError
from lora_grpo.files import lock
from lora_grpo.models import base_model
from lora_grpo.monitoring import TEACHER_DISAGREEMENT, TEACHER_KL
from lora_grpo.runs import Run, read_metrics
from lora_grpo.training import train
from lora_grpo.training.teacher_pass import TeacherPass

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py"
LEARNED = {"max_steps": 3, "learning_rate": 0.02}
HINTED = """
def load(split):
    first, last = (0, 12) if split == "train" else (20, 24)
    return [{"question": f"What is {n} plus 3?", "answer": str(n + 3)} for n in range(first, last)]

def check(completion, row):
    return row["answer"] in completion

def teacher_prompt(row):
    return f"{row['question']} The answer is {row['answer']}; explain it."
"""
QUIZ = """
def load(split):
    first, last = (0, 12) if split == "train" else (20, 24)
    return [{"question": "How many are 3 and 4?", "number": n} for n in range(first, last)]

class Environment:
    def reset(self, number, **row):
        self.left = 2 + number % 3
        return f" (Question {number})"

    def reply(self, text):
        self.left -= 1
        return "Are you sure?" if self.left else None

    def get_reward(self):
        return 0.0

def teacher_prompt(row):
    return "Say seven."
"""
TASKS = {"hinted": HINTED, "quiz": QUIZ}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A run whose adapter differs much from the base."""
    run, _ = run_tiny(tmp_path_factory.mktemp("teacher") / "taught", train=LEARNED)
    return run.folder


def task(folder, name):
    path = folder / f"{name}.py"
    path.write_text(TASKS[name])
    return {
        "data": {"task": str(path), "train_limit": None},
        "rewards": ("correct_answer=1.0",),
        "sampling": {"max_completion_tokens": 96, "max_turn_tokens": 16},
    }


def values(run, name):
    return [step[name] for step in read_metrics(run.folder)]


def test_another_adapter_teaches_without_rewards(adapter, tmp_path):
    """The model comes closer to its teacher although all rewards are equal, so that GRPO alone would learn nothing."""
    settings = {"name": str(adapter), "reward_weight": 0.0}
    training = {"max_steps": 8, "learning_rate": 5e-3, "prompts_per_step": 4}
    run, policy = run_tiny(tmp_path / "run", teacher=settings, rewards=("pattern:never in a text=1.0",), train=training)
    assert values(run, "frac_reward_zero_std") == [1.0] * 8
    kls = values(run, TEACHER_KL)
    assert kls[0] > 0.1
    assert kls[-1] < 0.8 * kls[0]
    assert values(run, TEACHER_DISAGREEMENT)[-1] < values(run, TEACHER_DISAGREEMENT)[0]
    assert all(seconds > 0 for seconds in values(run, "time/teacher"))

    record = json.loads((run.folder / "run.json").read_text())
    assert record["teacher"] == {
        "name": "taught", "kind": "adapter", "has_adapter": True, "base_model": None, "revision": None, "bits": None,
        "has_own_prompt": False,
    }  # fmt: skip
    assert len(record["policy"]["teacher_sha256"]) == 64
    checkpoint = max(run.checkpoints.glob("checkpoint-*"))
    assert not (checkpoint / "teacher").exists()
    assert policy.model.active_adapter == "default"


@pytest.mark.parametrize("loss", ["sampled", pytest.param("reverse_kl", marks=with_kernel)])
def test_a_run_killed_in_its_third_step_ends_in_the_same_bits(adapter, tmp_path, monkeypatch, loss):
    changes = {"teacher": {"name": str(adapter), "loss": loss}, "lora": {"dropout": 0.1}}
    expected, _ = run_tiny(tmp_path / "unbroken", **changes)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        append_metrics = Run.append_metrics

        def kill_in_third_step(self, metrics):
            if metrics["step"] == 3:
                raise KeyboardInterrupt
            append_metrics(self, metrics)

        patched.setattr(Run, "append_metrics", kill_in_third_step)
        run_tiny(tmp_path / "run", **changes)
    lock.held.pop().release()  # as the end of a process does
    assert not (tmp_path / "run" / "adapter").exists()

    resumed, _ = run_tiny(tmp_path / "run", Invocation(resume=True), **changes)
    file = "adapter/adapter_model.safetensors"
    assert (resumed.folder / file).read_bytes() == (expected.folder / file).read_bytes()
    assert values(resumed, TEACHER_KL) == values(expected, TEACHER_KL)


def test_a_run_is_not_resumed_with_another_teacher(adapter, tmp_path):
    teacher = tmp_path / "other"
    run_tiny(teacher, train={**LEARNED, "max_steps": 1})
    changes = {"teacher": {"name": str(teacher)}}
    run_tiny(tmp_path / "run", **changes)
    lock.held.pop().release()  # as the end of a process does
    weights = teacher / "adapter" / "adapter_model.safetensors"
    weights.write_bytes((adapter / "adapter" / "adapter_model.safetensors").read_bytes())
    with pytest.raises(UserError, match="began with teacher_sha256"):
        run_tiny(tmp_path / "run", Invocation(resume=True), train={"max_steps": 4}, **changes)


@pytest.mark.parametrize(
    ("bits", "loss"), [(16, "sampled"), (4, "sampled"), pytest.param(16, "forward_kl", marks=with_kernel)]
)
def test_a_second_model_teaches_with_the_same_tokenizer(tmp_path, bits, loss):
    config = {**CONFIGS["llama"], "hidden_size": 128}
    teacher = make_model(tmp_path / "other", config)
    run, policy = run_tiny(tmp_path / "run", teacher={"name": str(teacher), "bits": bits, "loss": loss})
    assert all(kl > 0 for kl in values(run, TEACHER_KL))
    assert ("teacher/divergence" in read_metrics(run.folder)[0]) == (loss != "sampled")
    assert json.loads((run.folder / "run.json").read_text())["teacher"]["bits"] == bits
    assert list(policy.model.peft_config) == ["default"]


def test_a_teacher_whose_logprobs_depend_on_padding_is_refused(tmp_path):
    sizes = {"vocab_size": 768, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2}
    teacher = make_model(tmp_path / "other", {"model_type": "xglm", **sizes})
    with pytest.raises(UserError, match="counts the padding of xglm"):
        begin_tiny(tmp_path / "run", teacher={"name": str(teacher), "bits": 16})


def test_completions_without_a_reward_learn_from_the_teacher(adapter, tmp_path, capsys):
    (tmp_path / "none.py").write_text("def nothing(completions, **columns): return [None] * len(completions)\n")
    run, _ = run_tiny(
        tmp_path / "run",
        teacher={"name": str(adapter)},
        rewards=(f"{tmp_path / 'none.py'}:nothing",),
        train={"max_steps": 1},
    )
    [step] = read_metrics(run.folder)
    assert step["grad_norm"] > 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if "every reward returned None" in line]
    assert "through its teacher alone" in warning and "no gradient" not in warning


def test_a_teacher_and_a_kl_penalty_leave_all_but_the_trained_adapter_unchanged(adapter, tmp_path):
    """The model has three adapters: the trained one, its start, from which the penalty measures, and the teacher."""
    start, _ = run_tiny(tmp_path / "start", train={**LEARNED, "max_steps": 1}, seed=1)
    settings = {"lora": {"from": str(start.folder)}, "teacher": {"name": str(adapter)}}
    training = begin_tiny(tmp_path / "run", train={**LEARNED, "beta": 0.1}, **settings)
    model = training.policy.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert any(".teacher." in name for name in before) and any(".ref." in name for name in before)
    training.run.begin(training.policy.record)
    train(training)

    changed = [name for name, parameter in model.named_parameters() if not parameter.equal(before[name])]
    assert changed and all(".default." in name for name in changed)
    steps = read_metrics(training.run.folder)
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6) and steps[-1]["kl"] > 1e-4  # from the start of the run
    assert all(step[TEACHER_KL] > 0.01 for step in steps)  # from the teacher


@pytest.mark.parametrize("name", TASKS)
def test_the_model_itself_teaches_with_more_in_its_prompt(tmp_path, monkeypatch, name):
    """The teacher's logprobs are those of the base after its own prompts, also of a conversation's later turns."""
    read = TeacherPass.read
    readings = []

    def recorded(self, inputs, predecessors):
        scores = read(self, inputs, predecessors)
        readings.append((inputs, scores.logprobs))
        return scores

    monkeypatch.setattr(TeacherPass, "read", recorded)
    training = begin_tiny(tmp_path / "run", teacher={"name": "self"}, train={"max_steps": 1}, **task(tmp_path, name))
    training.run.begin(training.policy.record)
    train(training)

    tokenizer = training.policy.tokenizer
    rows = training.trainer.scorer.rows.values()
    prompts_of_teacher = set()
    for row in rows:
        ids = tokenizer(teacher_prompt_text(tokenizer, row), add_special_tokens=False)["input_ids"]
        prompts_of_teacher.add(tuple(ids))
    assert readings
    if name == "quiz":  # the replies of the environment are in the rows, and no tokens of the model
        assert all(((inputs["tool_mask"] == 0) & inputs["completion_mask"].bool()).any() for inputs, _ in readings)
    base = base_model.load_base(training.run.config.model)
    for inputs, logprobs in readings:
        for row, completion_ids in enumerate(inputs["completion_ids"]):
            mask = inputs["teacher_prompt_mask"][row].bool()
            prompt_ids = inputs["teacher_prompt_ids"][row][mask]
            assert tuple(prompt_ids.tolist()) in prompts_of_teacher
            assert not prompt_ids.equal(inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()])
            length = int(inputs["completion_mask"][row].sum())
            ids = torch.cat([prompt_ids, completion_ids[:length]])[None]
            with torch.no_grad():
                distributions = base(ids).logits[:, -length - 1 : -1].log_softmax(-1)
            expected = distributions.gather(2, ids[:, -length:, None])[0, :, 0]
            assert torch.allclose(logprobs[row, :length], expected, atol=1e-4)
    assert training.run.record["teacher"]["has_own_prompt"]


def test_a_teacher_with_another_tokenizer_is_refused_before_weights_are_loaded(tmp_path, warm):
    make_model(tmp_path / "other", CONFIGS["llama"])
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {token: 767 - number for token, number in content["model"]["vocab"].items()}
    file.write_text(json.dumps(content))
    flags = [*write_starter_files(tmp_path), "--preset", "starter", "--output-dir", tmp_path / "run"]
    ended = warm.start(RECIPE, *flags, "--teacher", tmp_path / "other").end()
    assert ended.returncode == 2
    [error] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "has another tokenizer" in error
    assert "Loading weights" not in ended.stderr
    assert not (tmp_path / "run" / "run.json").exists()
