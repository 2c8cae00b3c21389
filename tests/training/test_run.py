"""Train the embedded model for a few steps with the real stack: NF4 base, PEFT, TRL's GRPOTrainer."""

import copy
import json
import pickle

import pytest
import torch
from helpers.tiny_runs import TINY, run_tiny, starter_data
from safetensors.torch import load_file

from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.evaluation.run import evaluate
from lora_grpo.models.policy import load_policy
from lora_grpo.runs import open_run
from lora_grpo.sampling.build import build_sampler
from lora_grpo.training import make_trainer, train
from lora_grpo.training.trl_config import grpo_arguments


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("run") / "out")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_adapter_learns_and_is_kept_in_full_precision(finished):
    run, policy = finished
    saved = load_file(run.adapter / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    moved = [name for name, tensor in saved.items() if "lora_B" in name and tensor.abs().max() > 0]
    assert len(moved) == len(saved) // 2
    live = {n.replace(".default", ""): p for n, p in policy.model.named_parameters() if p.requires_grad}
    assert all(torch.equal(live[name], tensor) for name, tensor in saved.items())


def test_every_step_is_in_the_metrics(finished):
    run, _ = finished
    steps = lines(run.metrics)
    assert [step["step"] for step in steps] == [1, 2, 3]
    wanted = {"reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio"}
    wanted |= {"entropy", "grad_norm", "learning_rate", "step_time", "num_tokens", "rewards/near_length/mean"}
    assert wanted <= steps[0].keys()
    for step in steps:
        total = 0.5 * step["rewards/xml_tag_count/mean"] + step["rewards/near_length/mean"]
        assert step["reward"] == pytest.approx(total, abs=1e-4)


def test_completions_carry_their_rewards(finished):
    run, _ = finished
    assert sorted(path.name for path in run.completions.iterdir()) == ["step-00001.jsonl", "step-00002.jsonl"]
    logged, steps = lines(run.completions / "step-00002.jsonl"), lines(run.metrics)
    assert len(logged) == 8
    for line in logged:
        assert line["reward"] == pytest.approx(0.5 * line["rewards"]["xml_tag_count"] + line["rewards"]["near_length"])
    assert sum(line["reward"] for line in logged) / 8 == pytest.approx(steps[1]["reward"], abs=1e-4)
    assert {line["id"] for line in logged} <= {f"starter/train/{n:05d}" for n in range(4000)}


def test_a_finished_run_is_not_trained_again(finished):
    run, policy = finished
    before = (run.adapter / "adapter_model.safetensors").read_bytes()
    metrics = run.metrics.read_bytes()
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
    train(run, policy, trainer=None)
    assert (run.adapter / "adapter_model.safetensors").read_bytes() == before
    assert run.metrics.read_bytes() == metrics
    assert any(p.abs().max() > 0 for n, p in policy.model.named_parameters() if "lora_B" in n)


def test_the_kl_reference_is_the_base(tmp_path):
    run, policy = run_tiny(tmp_path / "out", train={"beta": 0.1, "max_steps": 2})
    first, second = (step["kl"] for step in lines(run.metrics))
    assert first == pytest.approx(0, abs=1e-6)  # a new adapter does not change the base
    assert second > 1e-6
    assert set(policy.model.peft_config) == {"default"}
    assert not (run.adapter / "ref").exists()


def test_accumulation_gives_the_gradient_of_the_whole_step(tmp_path):
    """8 completions in one pass or in four give the same rollouts, and the same adapter within rounding."""
    whole, _ = run_tiny(tmp_path / "whole", train={"micro_batch_size": 8, "max_steps": 1})
    parts, _ = run_tiny(tmp_path / "parts", train={"micro_batch_size": 2, "max_steps": 1})
    a, b = (load_file(run.adapter / "adapter_model.safetensors") for run in (whole, parts))
    (one,), (two,) = lines(whole.metrics), lines(parts.metrics)
    assert one["reward"] == two["reward"] and one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)
    assert all((a[name] - b[name]).abs().max() < 2e-4 for name in a)


def test_any_grpo_field_reaches_the_trainer(tmp_path):
    from trl import GRPOConfig

    config = replace(replace(RunConfig(), TINY), {"grpo": ("epsilon_high=0.28", "scale_rewards=none", "epsilon=1e-1")})
    settings = GRPOConfig(**grpo_arguments(config, tmp_path, [1.0, 1.0]))
    assert (settings.epsilon_high, settings.scale_rewards, settings.epsilon) == (0.28, "none", 0.1)


def test_what_only_trl_can_judge_is_one_line(tmp_path):
    with pytest.raises(UserError, match="TRL rejects the configuration") as caught:
        run_tiny(tmp_path / "out", grpo=("delta=0.1", "use_liger_kernel=true"))
    assert "\n" not in str(caught.value)


def test_dora_trains_on_rollouts_of_the_live_model(tmp_path):
    """As in a GPU run, the base is evaluated first, and then the same model is trained."""
    changes = {"lora": {"dora": True}, "train": {"max_steps": 1}, "eval": {"num_samples": 1, "k": (1,)}}
    changes["sampling"] = {"max_completion_tokens": 12}
    config = replace(replace(RunConfig(output_dir=str(tmp_path / "out")), TINY), changes)
    data = copy.deepcopy(starter_data())
    run = open_run(config, Invocation(), "test", data.record)
    policy = load_policy(config)
    sampler = build_sampler(policy, config)
    assert sampler.model is policy.model
    trainer = make_trainer(run, policy, data.train, sampler)
    run.begin(policy.record)
    before = evaluate(run, sampler, data.eval, "base")
    train(run, policy, trainer)
    saved = load_file(run.adapter / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)
    sampler.wake_up(adapter=False)
    (run.evaluation / "base.samples.jsonl").unlink()
    assert evaluate(run, sampler, data.eval, "base") == before


def test_a_reward_that_fails_stops_the_run_and_names_the_row(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(completions, **columns):\n    return [float('nan') for _ in completions]\n"
    )
    with pytest.raises(RunError, match=r"reward 'mine' returned nan.*row starter/train/.*completion"):
        run_tiny(tmp_path / "out", rewards=(f"{tmp_path}/mine.py:mine",))
    assert not (tmp_path / "out" / "adapter").exists()


def test_a_base_model_without_a_chat_template_trains_on_plain_text(tmp_path):
    import shutil

    from lora_grpo import starter

    folder = shutil.copytree(starter.model_path(), tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    run, _ = run_tiny(tmp_path / "out", model={"name": str(folder)}, train={"max_steps": 1})
    assert "Question:" not in lines(run.completions / "step-00001.jsonl")[0]["completion"]
    assert run.adapter.is_dir()


def test_a_setting_that_the_sampler_does_not_read_is_refused(tmp_path):
    with pytest.raises(UserError, match="--grpo top_k has no effect"):
        run_tiny(tmp_path / "out", grpo=("top_k=1",))


def test_a_column_may_have_several_types(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(completions, level, **columns):\n    return [1.0 if each == 'hard' else 0.0 for each in level]\n"
    )
    rows = [{"question": f"{n} + 1?", "answer": n + 1, "level": {"n": 1} if n else "hard"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"task": "gsm8k", "train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "held.jsonl")}
    (tmp_path / "held.jsonl").write_text('{"question": "7 + 7?", "answer": "14"}')
    run, _ = run_tiny(tmp_path / "out", data=files, rewards=(f"{tmp_path}/mine.py:mine",), train={"max_steps": 4})
    assert sum(step["reward"] for step in lines(run.metrics)) == pytest.approx(4 * 2 / 8 / 2)


def test_no_row_that_can_be_graded_stops_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(completions, **columns):\n    return [None for _ in completions]\n")
    with pytest.raises(RunError, match="no row could be graded in step 1"):
        run_tiny(tmp_path / "out", rewards=(f"{tmp_path}/mine.py:mine",))


def test_a_checkpoint_of_someone_else_runs_no_code(tmp_path):
    """A pickle can call any function, so every pickled file of a checkpoint is read as weights only."""
    from transformers import Trainer, TrainingArguments

    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(torch.nn.Linear(1, 1), arguments)
    trainer.create_optimizer_and_scheduler(1)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "adapter_model.bin"):
        torch.save(Trap(), tmp_path / name)
    for load in (trainer._load_optimizer_and_scheduler, trainer._load_rng_state):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            load(str(tmp_path))
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "optimizer.pt", weights_only=False)
    assert (tmp_path / "ran").exists()
