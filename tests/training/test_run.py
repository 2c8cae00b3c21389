"""Train the embedded model for a few steps with the real stack: NF4 base, PEFT, TRL's GRPOTrainer."""

import json
import pickle
import re
import shutil
from statistics import fmean

import pytest
import torch
from helpers.tiny_runs import TINY, run_tiny
from safetensors.torch import load_file

from lora_grpo import distributed, starter
from lora_grpo.config import replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import lock
from lora_grpo.training.trl_config import grpo_arguments, naming_overrides


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
    weights = dict(policy.model.named_parameters())
    for name, tensor in saved.items():
        assert torch.equal(weights[f"{name.removesuffix('.weight')}.default.weight"], tensor), name


def test_every_step_is_in_the_metrics(finished):
    run, _ = finished
    steps = lines(run.metrics)
    assert [step["step"] for step in steps] == [1, 2, 3]
    names = {"reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio"}
    names |= {"entropy", "grad_norm", "learning_rate", "step_time", "num_tokens", "rewards/near_length/mean"}
    for step in steps:
        assert names <= step.keys()
        weighted_sum = 0.5 * step["rewards/xml_tag_count/mean"] + step["rewards/near_length/mean"]
        assert step["reward"] == pytest.approx(weighted_sum, abs=1e-4)


def test_completions_carry_their_rewards(finished):
    run, _ = finished
    assert sorted(path.name for path in run.completions.iterdir()) == ["step-00001.jsonl", "step-00002.jsonl"]
    completions = lines(run.completions / "step-00002.jsonl")
    assert len(completions) == 8
    for completion in completions:
        rewards = completion["rewards"]
        assert completion["reward"] == pytest.approx(0.5 * rewards["xml_tag_count"] + rewards["near_length"])
        assert re.fullmatch(r"starter/train/0[0-3]\d{3}", completion["id"])
    second_step = lines(run.metrics)[1]
    assert fmean(completion["reward"] for completion in completions) == pytest.approx(second_step["reward"], abs=1e-4)


def test_completions_that_several_steps_use_are_logged_if_one_of_the_steps_is(tmp_path):
    run, _ = run_tiny(tmp_path / "out", train={"max_steps": 6, "completions_steps": 4}, grpo=("num_iterations=2",))
    assert sorted(path.name for path in run.completions.iterdir()) == ["step-00001.jsonl", "step-00003.jsonl"]


def test_the_kl_reference_is_the_base(tmp_path):
    run, policy = run_tiny(tmp_path / "out", train={"beta": 0.1, "max_steps": 2})
    first, second = (step["kl"] for step in lines(run.metrics))
    assert first == pytest.approx(0, abs=1e-6)  # a new adapter does not change the base
    assert second > 1e-6
    assert set(policy.model.peft_config) == {"default"}
    assert not (run.adapter / "ref").exists()


def test_accumulation_gives_the_gradient_of_the_whole_step(tmp_path):
    """8 completions in one pass or in four give the same rollouts, and the same adapter within rounding."""
    in_one_pass, _ = run_tiny(tmp_path / "one", train={"micro_batch_size": 8, "max_steps": 1})
    in_four, _ = run_tiny(tmp_path / "four", train={"micro_batch_size": 2, "max_steps": 1})
    [step] = lines(in_four.metrics)
    [expected_step] = lines(in_one_pass.metrics)
    assert step["reward"] == expected_step["reward"]
    assert step["grad_norm"] == pytest.approx(expected_step["grad_norm"], rel=1e-3)
    weights = load_file(in_four.adapter / "adapter_model.safetensors")
    expected_weights = load_file(in_one_pass.adapter / "adapter_model.safetensors")
    assert all((weights[name] - expected_weights[name]).abs().max() < 2e-4 for name in expected_weights)


def test_any_grpo_field_reaches_the_trainer(tmp_path):
    from trl import GRPOConfig

    config = replace(replace(RunConfig(), TINY), {"grpo": ("epsilon_high=0.28", "scale_rewards=none", "epsilon=1e-1")})
    settings = GRPOConfig(**grpo_arguments(config, tmp_path, [1.0, 1.0]))
    assert (settings.epsilon_high, settings.scale_rewards, settings.epsilon) == (0.28, "none", 0.1)


def test_what_only_trl_can_judge_is_one_line(tmp_path):
    with pytest.raises(UserError, match="TRL rejects the configuration") as caught:
        run_tiny(tmp_path / "out", grpo=("sync_ref_model=true",))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("cast_lm_head_to_fp32=true", UserError),  # TRL looks for the embedding of a PEFT model in the wrong place
        ("dataloader_multiprocessing_context=spawn", RunError),  # torch wants workers, and says so at the first batch
    ],
)
def test_a_field_on_which_trl_fails_is_named_in_one_line(tmp_path, field, kind):
    with pytest.raises(kind, match=f"TRL fails with --grpo {field}") as caught:
        run_tiny(tmp_path / "out", grpo=(field,), train={"max_steps": 1})
    assert "\n" not in str(caught.value)


def test_an_error_after_the_first_step_is_not_blamed_on_a_field(tmp_path):
    def fail_in_second_step(training):
        trainer = training.trainer
        training_step = trainer.training_step

        def failing(*arguments, **named):
            if trainer.state.global_step == 1:
                raise RuntimeError("CUDA error")
            return training_step(*arguments, **named)

        trainer.training_step = failing

    with pytest.raises(RuntimeError, match=r"^CUDA error$"):
        run_tiny(tmp_path / "out", before=fail_in_second_step, grpo=("epsilon=0.3",))


def test_a_connection_that_another_process_has_lost_is_not_blamed_on_a_field(monkeypatch):
    monkeypatch.setattr(distributed, "reported_error", lambda: "rank 1 is out of memory")
    with (
        pytest.raises(RuntimeError, match=r"^connection closed$"),
        naming_overrides(RunConfig(grpo=("epsilon=0.3",)), RunError),
    ):
        raise RuntimeError("connection closed")


def test_dora_trains_on_rollouts_of_the_live_model(tmp_path):
    run, _ = run_tiny(tmp_path / "out", lora={"dora": True})
    saved = load_file(run.adapter / "adapter_model.safetensors")
    moved = [name for name, tensor in saved.items() if "lora_B" in name and tensor.abs().max() > 0]
    assert 0 < len(moved) == sum("lora_B" in name for name in saved)
    mismatches = [step["sampling/sampling_logp_difference/mean"] for step in lines(run.metrics)]
    assert len(mismatches) == 3 and max(mismatches) < 1e-5


def test_a_reward_that_fails_stops_the_run_and_names_the_row(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(completions, **columns):\n    return [float('nan') for _ in completions]\n"
    )
    with pytest.raises(RunError, match=r"reward 'mine' returned nan.*row starter/train/.*completion"):
        run_tiny(tmp_path / "out", rewards=(f"{tmp_path}/mine.py:mine",))
    assert not (tmp_path / "out" / "adapter").exists()


def test_a_base_model_without_a_chat_template_trains_on_plain_text(tmp_path):
    folder = shutil.copytree(starter.model_path(), tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    run, _ = run_tiny(tmp_path / "out", model={"name": str(folder)}, train={"max_steps": 1})
    assert "Question:" not in lines(run.completions / "step-00001.jsonl")[0]["completion"]
    assert run.adapter.is_dir()


def test_a_resumed_run_has_the_interval_of_checkpoints_that_it_was_given(tmp_path):
    run_tiny(tmp_path / "out", train={"max_steps": 2, "checkpoint_steps": 2, "keep_checkpoints": 9})
    lock.held.pop().release()  # as the end of a process does
    longer = {"max_steps": 5, "checkpoint_steps": 3, "keep_checkpoints": 9}
    run, _ = run_tiny(tmp_path / "out", Invocation(resume=True), train=longer)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-2", "checkpoint-3", "checkpoint-5"]


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
