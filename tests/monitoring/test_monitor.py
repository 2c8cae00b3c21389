"""The monitor on real runs: validation, the best adapter, early stopping, and runs that fail on purpose."""

import json

import pytest
from helpers.tiny_runs import run_tiny

from lora_grpo.config import replace
from lora_grpo.config.schema import MIN_VALIDATION_ROWS, Invocation, RunConfig
from lora_grpo.data import split_validation
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import lock

MONITORED = {
    "seed": 1,  # the best step is neither the first nor the last
    "data": {"task": "starter", "train_limit": 200, "eval_limit": 4},
    "monitor": {"rows": 16, "every_steps": 2},
    "train": {
        "max_steps": 6,
        "prompts_per_step": 4,
        "micro_batch_size": 16,
        "checkpoint_steps": 2,
        "learning_rate": 2e-3,
    },
    "rewards": ("xml_tag_count=1.0",),
}


def run_monitored(folder, how=None, before=None, **changes):
    for name, given in changes.items():
        changes[name] = {**MONITORED.get(name, {}), **given} if isinstance(given, dict) else given
    return run_tiny(folder, how, before=before, validates=True, **{**MONITORED, **changes})[0]


def let_go():
    """Release the lock of a run's folder, as the end of a process does."""
    lock.held.pop().release()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def passes(run):
    return {path.name: path.read_bytes() for path in sorted(run.validation.iterdir())}


def rewards_of(run):
    return {
        int(name[5:10]): sum(json.loads(line)["reward"] for line in text.splitlines()) / 16
        for name, text in passes(run).items()
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run_monitored(tmp_path_factory.mktemp("validation_rows") / "run")


def test_validation_rows_are_sampled_before_and_during_training_and_never_trained_on(unbroken):
    assert sorted(passes(unbroken)) == [f"step-0000{step}.jsonl" for step in (0, 2, 4, 6)]
    asked = [{line["id"] for line in lines(path)} for path in unbroken.validation.iterdir()]
    assert all(len(ids) == 16 and ids == asked[0] for ids in asked)
    trained = {line["id"] for path in unbroken.completions.iterdir() for line in lines(path)}
    assert trained and not trained & asked[0]
    steps = {step["step"]: step for step in lines(unbroken.metrics)}
    for number, reward in rewards_of(unbroken).items():
        if number:
            assert steps[number]["validation/reward"] == pytest.approx(reward)
    assert "validation/reward" not in steps[3] and 0 <= steps[4]["validation/accuracy"] <= 1


def test_the_best_adapter_is_the_one_that_earned_most(unbroken):
    earned = rewards_of(unbroken)
    best = max(earned, key=lambda step: (earned[step], -step))
    record = json.loads((unbroken.folder / "run.json").read_text())
    if not best:  # nothing else can be checked in so few steps
        assert "best" not in record and not unbroken.best.exists()
        pytest.fail("choose other settings: this run never became better")
    right = [line["passed"] for line in lines(unbroken.validation / f"step-{best:05d}.jsonl")]
    assert record["best"] == {"step": best, "reward": pytest.approx(earned[best]), "accuracy": sum(right) / 16}
    saved = (unbroken.best / "adapter_model.safetensors").read_bytes()
    kept = unbroken.checkpoints / f"checkpoint-{best}" / "adapter_model.safetensors"
    if kept.exists():
        from safetensors.torch import load

        ours, theirs = load(saved), load(kept.read_bytes())
        assert all((ours[name] == theirs[name]).all() for name in ours)


def test_monitoring_changes_nothing_that_is_trained(unbroken, tmp_path):
    blind = run_monitored(tmp_path / "blind", before=lambda training: setattr(training.monitor, "validation", None))
    same = (blind.adapter / "adapter_model.safetensors").read_bytes()
    assert same == (unbroken.adapter / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_killed_run_resumes_to_the_same_passes_and_the_same_best(step, unbroken, tmp_path):
    def kill(training):
        # At an even step, the checkpoint is complete and the best adapter is not saved yet.
        method = "record_step" if step % 2 else "save_best"
        call = getattr(training.monitor, method)

        def killed(*arguments):
            if training.trainer.state.global_step == step:
                raise KeyboardInterrupt
            return call(*arguments)

        setattr(training.monitor, method, killed)

    with pytest.raises(KeyboardInterrupt):
        run_monitored(tmp_path / "run", before=kill)
    let_go()
    run = run_monitored(tmp_path / "run", Invocation(resume=True))
    assert passes(run) == passes(unbroken)
    assert run.record["best"] == unbroken.record["best"] and run.record["alarms"] == []
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run.best / name).read_bytes() == (unbroken.best / name).read_bytes()


def test_early_stopping_ends_at_the_best_adapter_and_stays_ended(tmp_path, capsys):
    worse = {"train": {"max_steps": 12, "learning_rate": 0.3}, "monitor": {"early_stopping": 2, "stop_on": ()}}
    run = run_monitored(tmp_path / "run", **worse)
    assert run.record["stopped_early"]["step"] < 12 and "stopped early" in capsys.readouterr().err
    earned = rewards_of(run)
    best = max(earned, key=lambda step: (earned[step], -step))
    assert sorted(earned)[-1] == run.record["stopped_early"]["step"] == best + 4
    if best:
        kept = (run.adapter / "adapter_model.safetensors").read_bytes()
        assert kept == (run.best / "adapter_model.safetensors").read_bytes()
        assert run.record["trained_steps"] == best
    steps = len(lines(run.metrics))
    assert "--monitor.early-stopping 0 continues" not in capsys.readouterr().err
    let_go()
    again = run_monitored(tmp_path / "run", Invocation(resume=True), **worse)
    assert len(lines(again.metrics)) == steps and "--monitor.early-stopping 0 continues" in capsys.readouterr().err
    let_go()
    patient = {**worse, "monitor": {**worse["monitor"], "early_stopping": 3}}
    assert lines(run_monitored(tmp_path / "run", Invocation(resume=True), **patient).metrics)[-1]["step"] > steps


def test_rows_are_held_out_by_the_seed_and_never_too_few(capsys):
    rows = [{"id": str(place)} for place in range(400)]
    config = RunConfig()
    kept, validation_rows = split_validation(rows, config)
    assert len(validation_rows) == 40 and len(kept) == 360
    assert sorted([*kept, *validation_rows], key=lambda row: int(row["id"])) == rows
    assert split_validation(rows, config) == (kept, validation_rows)
    assert split_validation(rows, replace(config, {"seed": 1}))[1] != validation_rows
    assert split_validation(rows, replace(config, {"monitor": {"rows": 0}})) == (rows, [])
    assert capsys.readouterr().err == ""
    few = rows[: 10 * MIN_VALIDATION_ROWS - 1]
    assert split_validation(few, config) == (few, [])
    assert "a tenth of 159 is less than 16" in capsys.readouterr().err
    with pytest.raises(UserError, match="early-stopping needs one"):
        split_validation(few, replace(config, {"monitor": {"early_stopping": 3}}))


def fails(folder, name, before=None, **changes):
    """Train until an alarm stops the run, and return its message and run.json."""
    changes["monitor"] = {**changes.get("monitor", {}), "stop_on": (name,)}
    with pytest.raises(RunError) as caught:
        run_monitored(folder, before=before, **changes)
    return str(caught.value), json.loads((folder / "run.json").read_text())


TWENTY = {"max_steps": 20, "prompts_per_step": 2, "micro_batch_size": 8, "checkpoint_steps": 20}


@pytest.mark.slow
def test_an_alarm_that_does_not_stop_is_printed_and_recorded_and_the_run_continues(tmp_path, capsys):
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text("def same(completions, **columns):\n    return [0.0 for _ in completions]\n")
    train_settings = {**TWENTY, "max_steps": 11}
    run = run_monitored(tmp_path / "run", train=train_settings, rewards=(f"{rewards}:same=1.0",), monitor={"rows": 0})
    raised = [(alarm["name"], alarm["step"], alarm["stopped"]) for alarm in run.record["alarms"]]
    assert raised == [("zero_variance", 10, False)]
    assert "alarm, step 10: zero_variance: in 100% of" in capsys.readouterr().err
    assert run.record["trained_steps"] == 11


def test_a_nan_gradient_ends_the_run_before_a_checkpoint(tmp_path):
    def spoil(training):
        trainer = training.trainer
        (parameter, *_) = (each for each in trainer.model.parameters() if each.requires_grad)
        parameter.register_hook(lambda grad: grad * float("nan") if trainer.state.global_step == 2 else grad)

    said, record = fails(tmp_path / "run", "nan", before=spoil, monitor={"rows": 0})
    assert said.startswith("step 3: grad_norm is not finite") and "--resume --monitor.stop-on" in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert record["alarms"] == [{"step": 3, "name": "nan", "message": record["alarms"][0]["message"], "stopped": True}]


def reward_file(folder):
    """Write a file of rewards that are wrong on purpose."""
    path = folder / "my_rewards.py"
    path.write_text(
        "from lora_grpo.rewards.functions import correct_answer\n\n"
        "def wrong(completions, **columns):\n"
        "    return [1.0 - value for value in correct_answer(completions, **columns)]\n"
    )
    return path


STRONG = {"prompts_per_step": 4, "checkpoint_steps": 20, "learning_rate": 5e-3}
GROUPS = {"num_generations": 8, "max_completion_tokens": 40}


@pytest.mark.slow
def test_a_reward_for_wrong_answers_is_seen_as_hacking_and_never_the_best(tmp_path):
    said, record = fails(
        tmp_path / "run",
        "hacking",
        train={**STRONG, "max_steps": 20},
        sampling=GROUPS,
        rewards=(f"{reward_file(tmp_path)}:wrong=1.0",),
        data={"train_limit": 640},
        monitor={"rows": 64, "every_steps": 10},
    )
    assert "of 64: the policy exploits the rewards" in said
    assert [alarm["stopped"] for alarm in record["alarms"] if alarm["name"] == "hacking"] == [True]
    assert "best" not in record and not (tmp_path / "run" / "best").exists()
