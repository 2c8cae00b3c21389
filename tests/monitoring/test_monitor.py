"""The monitor on real runs: validation, the best adapter, early stopping, and runs that fail on purpose."""

import json
import math
from statistics import fmean

import pytest
from helpers.tiny_runs import run_tiny

from lora_grpo.config import replace
from lora_grpo.config.schema import MIN_VALIDATION_ROWS, Invocation, RunConfig
from lora_grpo.data import split_validation
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import lock
from lora_grpo.monitoring import Validation
from lora_grpo.runs import Run
from lora_grpo.runs.checkpoints import checkpoints_in

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


def run_monitored(folder, invocation=None, before=None, **changes):
    """Train with the settings of MONITORED, of which `changes` replace some."""
    settings = dict(MONITORED)
    for name, change in changes.items():
        if isinstance(change, dict):
            settings[name] = {**MONITORED.get(name, {}), **change}
        else:
            settings[name] = change
    run, _ = run_tiny(folder, invocation, before=before, validates=True, **settings)
    return run


def release_folder():
    """Release the lock of a run's folder, as the end of a process does."""
    lock.held.pop().release()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def validation_files(run):
    return {path.name: path.read_bytes() for path in sorted(run.validation.iterdir())}


def validation_rewards(run):
    """Return the mean reward of each validation pass, by step."""
    rewards = {}
    for path in sorted(run.validation.iterdir()):
        step = int(path.stem.removeprefix("step-"))
        rewards[step] = fmean(line["reward"] for line in lines(path))
    return rewards


def best_step(rewards):
    """Return the first step with the highest reward."""
    return max(rewards, key=lambda step: (rewards[step], -step))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run_monitored(tmp_path_factory.mktemp("validation_rows") / "run")


def test_validation_rows_are_sampled_before_and_during_training_and_never_trained_on(unbroken):
    assert [*validation_files(unbroken)] == [f"step-0000{step}.jsonl" for step in (0, 2, 4, 6)]
    ids_of_passes = [{line["id"] for line in lines(path)} for path in unbroken.validation.iterdir()]
    validation_ids = ids_of_passes[0]
    assert len(validation_ids) == 16
    assert all(ids == validation_ids for ids in ids_of_passes)
    trained_ids = {line["id"] for path in unbroken.completions.iterdir() for line in lines(path)}
    assert trained_ids
    assert trained_ids.isdisjoint(validation_ids)

    rewards = validation_rewards(unbroken)
    steps = {step["step"]: step for step in lines(unbroken.metrics)}
    for number in (2, 4, 6):
        assert steps[number]["validation/reward"] == pytest.approx(rewards[number])
        assert 0 <= steps[number]["validation/accuracy"] <= 1
    assert "validation/reward" not in steps[3]


def test_the_best_adapter_is_the_one_that_earned_most(unbroken):
    rewards = validation_rewards(unbroken)
    best = best_step(rewards)
    assert 0 < best < 6, "choose other settings: the best step of this run is its first or last"
    accuracy = fmean(line["passed"] for line in lines(unbroken.validation / f"step-{best:05d}.jsonl"))
    record = json.loads((unbroken.folder / "run.json").read_text())
    assert record["best"] == {"step": best, "reward": pytest.approx(rewards[best]), "accuracy": accuracy}

    from safetensors.torch import load_file

    best_weights = load_file(unbroken.best / "adapter_model.safetensors")
    weights_of_checkpoint = load_file(unbroken.checkpoints / f"checkpoint-{best}" / "adapter_model.safetensors")
    assert best_weights.keys() == weights_of_checkpoint.keys()
    assert all((best_weights[name] == weights_of_checkpoint[name]).all() for name in best_weights)


def test_monitoring_changes_nothing_that_is_trained(unbroken, tmp_path):
    def disable_validation(training):
        training.monitor.validation = None

    blind = run_monitored(tmp_path / "blind", before=disable_validation)
    weights = (blind.adapter / "adapter_model.safetensors").read_bytes()
    assert weights == (unbroken.adapter / "adapter_model.safetensors").read_bytes()


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
    release_folder()
    run = run_monitored(tmp_path / "run", Invocation(resume=True))
    assert validation_files(run) == validation_files(unbroken)
    assert run.record["best"] == unbroken.record["best"]
    assert run.record["alarms"] == []
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run.best / name).read_bytes() == (unbroken.best / name).read_bytes()


def test_a_run_killed_before_it_saved_its_last_step_as_the_best_saves_it_when_resumed(unbroken, tmp_path, monkeypatch):
    best = unbroken.record["best"]
    until_best = {"max_steps": best["step"]}

    def kill(training):
        save_best = training.monitor.save_best

        def killed():
            if training.trainer.state.global_step == best["step"]:
                raise KeyboardInterrupt
            save_best()

        training.monitor.save_best = killed

    with pytest.raises(KeyboardInterrupt):
        run_monitored(tmp_path / "run", before=kill, train=until_best)
    assert json.loads((tmp_path / "run" / "run.json").read_text()).get("best") != best
    release_folder()

    monkeypatch.setattr(Validation, "sample", None)  # no pass is repeated
    run = run_monitored(tmp_path / "run", Invocation(resume=True), train=until_best)
    assert run.record["best"] == best
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run.best / name).read_bytes() == (unbroken.best / name).read_bytes()


def test_early_stopping_ends_at_the_best_adapter_and_stays_ended(tmp_path, capsys):
    worse = {"train": {"max_steps": 12, "learning_rate": 0.3}, "monitor": {"early_stopping": 2, "stop_on": ()}}
    run = run_monitored(tmp_path / "run", **worse)
    printed = capsys.readouterr().err
    assert "stopped early" in printed
    assert "--monitor.early-stopping 0 continues" not in printed
    last_step = run.record["stopped_early"]["step"]
    assert last_step < 12
    rewards = validation_rewards(run)
    best = best_step(rewards)
    assert max(rewards) == last_step == best + 4  # two passes
    if best > 0:
        weights = (run.adapter / "adapter_model.safetensors").read_bytes()
        assert weights == (run.best / "adapter_model.safetensors").read_bytes()
        assert run.record["trained_steps"] == best
    assert len(lines(run.metrics)) == last_step

    # --resume does not train on, unless the run may wait longer.
    release_folder()
    resumed = run_monitored(tmp_path / "run", Invocation(resume=True), **worse)
    assert len(lines(resumed.metrics)) == last_step
    assert "--monitor.early-stopping 0 continues" in capsys.readouterr().err
    release_folder()
    worse["monitor"]["early_stopping"] = 3
    patient = run_monitored(tmp_path / "run", Invocation(resume=True), **worse)
    assert lines(patient.metrics)[-1]["step"] > last_step

    # A run that goes on to its last step was not stopped early.
    release_folder()
    worse["monitor"]["early_stopping"] = 0
    endless = run_monitored(tmp_path / "run", Invocation(resume=True), **worse)
    assert lines(endless.metrics)[-1]["step"] == 12
    assert "stopped_early" not in endless.record
    assert "stopped_early" not in json.loads((endless.folder / "run.json").read_text())


def test_rows_are_held_out_by_the_seed_and_never_too_few(capsys):
    rows = [{"id": number} for number in range(400)]
    config = RunConfig()
    train_rows, validation_rows = split_validation(rows, config)
    assert len(train_rows) == 360
    assert len(validation_rows) == 40
    assert sorted([*train_rows, *validation_rows], key=lambda row: row["id"]) == rows

    assert split_validation(rows, config) == (train_rows, validation_rows)
    _, other_validation_rows = split_validation(rows, replace(config, {"seed": 1}))
    assert other_validation_rows != validation_rows
    assert split_validation(rows, replace(config, {"monitor": {"rows": 0}})) == (rows, [])
    assert capsys.readouterr().err == ""

    too_few = rows[: 10 * MIN_VALIDATION_ROWS - 1]
    assert split_validation(too_few, config) == (too_few, [])
    assert "a tenth of 159 is less than 16" in capsys.readouterr().err
    with pytest.raises(UserError, match="early-stopping needs one"):
        split_validation(too_few, replace(config, {"monitor": {"early_stopping": 3}}))


def run_until_alarm(folder, alarm, before=None, monitor=None, **changes):
    """Train until an alarm stops the run, and return its message and run.json."""
    monitor = {**(monitor or {}), "stop_on": (alarm,)}
    with pytest.raises(RunError) as stopped:
        run_monitored(folder, before=before, monitor=monitor, **changes)
    return str(stopped.value), json.loads((folder / "run.json").read_text())


@pytest.mark.slow
def test_an_alarm_that_does_not_stop_is_printed_and_recorded_and_the_run_continues(tmp_path, capsys):
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text("def same(completions, **columns):\n    return [0.0 for _ in completions]\n")
    run = run_monitored(
        tmp_path / "run",
        train={"max_steps": 11, "prompts_per_step": 2, "micro_batch_size": 8, "checkpoint_steps": 20},
        rewards=(f"{rewards}:same=1.0",),
        monitor={"rows": 0},
    )
    [alarm] = run.record["alarms"]
    assert (alarm["name"], alarm["step"], alarm["stopped"]) == ("zero_variance", 10, False)
    assert "alarm, step 10: zero_variance: in 100% of" in capsys.readouterr().err
    assert run.record["trained_steps"] == 11


def test_a_nan_gradient_ends_the_run_before_a_checkpoint(tmp_path):
    def spoil_third_step(training):
        trainer = training.trainer

        def spoil(gradient):
            return gradient * float("nan") if trainer.state.global_step == 2 else gradient

        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        trained[0].register_hook(spoil)

    message, record = run_until_alarm(tmp_path / "run", "nan", before=spoil_third_step, monitor={"rows": 0})
    assert message.startswith("step 3: grad_norm is not finite")
    assert "--resume --monitor.stop-on" in message
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-2"]
    [alarm] = record["alarms"]
    assert (alarm["step"], alarm["name"], alarm["stopped"]) == (3, "nan", True)


def test_a_loss_that_is_nan_is_recorded_and_ends_the_run(tmp_path):
    """Also where the gradient is finite. transformers would log the mean of the other losses."""

    def spoil_third_step(training):
        trainer = training.trainer
        training_step = trainer.training_step

        def spoiled(*arguments, **named):
            loss = training_step(*arguments, **named)
            return loss * float("nan") if trainer.state.global_step == 2 else loss

        trainer.training_step = spoiled

    message, record = run_until_alarm(tmp_path / "run", "nan", before=spoil_third_step, monitor={"rows": 0})
    assert message.startswith("step 3: loss is not finite")
    [alarm] = record["alarms"]
    assert (alarm["step"], alarm["name"], alarm["stopped"]) == (3, "nan", True)
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert [math.isnan(step["loss"]) for step in steps] == [False, False, True]

    # Without the alarm, it is the loss of this step alone.
    run = run_monitored(tmp_path / "on", before=spoil_third_step, monitor={"rows": 0, "stop_on": ()})
    assert [step["step"] for step in lines(run.metrics) if math.isnan(step["loss"])] == [3]


def test_slow_steps_are_saved_before_many_minutes_are_lost(tmp_path, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(Run, "clock", staticmethod(lambda: clock))

    def take_four_minutes_a_step(training):
        trainer = training.trainer
        training_step = trainer.training_step

        def slow(*arguments, **named):
            nonlocal clock
            clock += 240
            return training_step(*arguments, **named)

        trainer.training_step = slow

    run = run_monitored(
        tmp_path / "run",
        before=take_four_minutes_a_step,
        train={
            "max_steps": 8,
            "prompts_per_step": 1,
            "micro_batch_size": 2,
            "checkpoint_steps": 5,
            "keep_checkpoints": 9,
        },
        sampling={"num_generations": 2},
        monitor={"rows": 0},
    )
    # Three steps after the last checkpoint are 12 minutes.
    steps = sorted(checkpoint.step for checkpoint in checkpoints_in(run.checkpoints))
    assert steps == [3, 5, 8]


def reward_file(folder):
    """Write a file of rewards that are wrong on purpose."""
    path = folder / "my_rewards.py"
    path.write_text(
        "from lora_grpo.rewards.functions import correct_answer\n\n"
        "def wrong(completions, **columns):\n"
        "    return [1.0 - value for value in correct_answer(completions, **columns)]\n"
    )
    return path


@pytest.mark.slow
def test_a_reward_for_wrong_answers_is_seen_as_hacking_and_never_the_best(tmp_path):
    message, record = run_until_alarm(
        tmp_path / "run",
        "hacking",
        train={"max_steps": 20, "prompts_per_step": 4, "checkpoint_steps": 20, "learning_rate": 5e-3},
        sampling={"num_generations": 8, "max_completion_tokens": 40},
        rewards=(f"{reward_file(tmp_path)}:wrong=1.0",),
        data={"train_limit": 640},
        monitor={"rows": 64, "every_steps": 10},
    )
    assert "of 64: the policy exploits the rewards" in message
    assert [alarm["stopped"] for alarm in record["alarms"] if alarm["name"] == "hacking"] == [True]
    assert "best" not in record
    assert not (tmp_path / "run" / "best").exists()
