"""`--hours`: a run that ends in time, with a fake clock: simulated phases, real tiny runs, and two processes."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from helpers.tiny_runs import TINY
from helpers.warm_process import finish

from lora_grpo.config import endless_steps, replace
from lora_grpo.config.schema import Invocation, RunConfig
from lora_grpo.data import load_data
from lora_grpo.errors import RunError
from lora_grpo.evaluation import sample_rows
from lora_grpo.files import lock
from lora_grpo.monitoring import TimeBudget, Validation
from lora_grpo.pipeline import train_and_evaluate
from lora_grpo.runs import Run, claim_run, open_run, read_run
from lora_grpo.training import FastGRPOTrainer

FORKS = Path(__file__).parents[1] / "helpers" / "rank_forks.py"
RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k_lora.py"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Simulated:
    """A run whose phases only move a clock."""

    def __init__(self, folder, hours, record=None, clock=None):
        changes = {"hours": hours, "train": {"max_steps": endless_steps(hours)}}
        config = replace(RunConfig(output_dir=str(folder)), changes)
        self.clock = clock or Clock()
        self.run = Run.__new__(Run)
        self.run.clock = self.clock
        self.run.update = lambda **entries: self.run.record.update(entries)
        self.run.__init__(config, record or {"evaluation_seconds": {}})

    def start(self, seconds, evaluation):
        """Take the seconds that a process needs to start, and evaluate the base if that has not been done."""
        self.budget = TimeBudget(self.run)
        self.clock.now += seconds
        if "base" not in self.run.record["evaluation_seconds"]:
            self.clock.now += evaluation
            self.run.record["evaluation_seconds"]["base"] = evaluation
        self.budget.check_evaluation()

    def train(self, step_seconds, validation_seconds=0.0):
        """Train until the budget ends the run, with a validation pass every 20 steps. Return the last step."""
        self.validate(validation_seconds)
        self.budget.begin_training()
        for step in range(1, self.run.config.train.max_steps + 1):
            self.clock.now += step_seconds()
            validates = validation_seconds > 0 and step % 20 == 0
            is_last = self.budget.is_last(step, 1, validates=validates)
            if validates or is_last:
                self.validate(validation_seconds)
            if is_last:
                break
        return step

    def validate(self, seconds):
        if seconds > 0:
            with self.budget.validating():
                self.clock.now += seconds

    def end(self, evaluation):
        """Evaluate the adapter, and return the seconds of the whole run."""
        self.clock.now += evaluation
        return self.clock.now


@pytest.mark.parametrize("hours", [0.05, 0.1, 0.2, 8])
@pytest.mark.parametrize("slower", [1.0, 0.6, 1.5], ids=["even", "faster", "slower"])
def test_a_run_uses_its_hours_and_no_more(tmp_path, hours, slower):
    """Steps get slower or faster from the first to the last, and the final evaluation with them."""
    budget = 3600 * hours
    run = Simulated(tmp_path, hours)
    run.start(seconds=0.06 * budget, evaluation=0.1 * budget)
    began = run.clock.now
    first_step_seconds = max(1.5, budget / 300)

    def step_seconds():
        fraction_trained = (run.clock.now - began) / (0.7 * budget)
        return first_step_seconds * slower**fraction_trained

    last_step = run.train(step_seconds, validation_seconds=0.8 * first_step_seconds)
    seconds = run.end(evaluation=0.1 * budget * slower)
    assert 0.87 * budget < seconds <= budget
    assert run.run.out_of_time_at == last_step


def advised_hours(error):
    return float(re.search(r"--resume --hours ([\d.]+)", str(error))[1])


def resume(folder, run, hours):
    """Return the simulated run with more hours, in a new process."""
    record = json.loads(json.dumps(run.run.record)) | {"seconds_worked": run.run.seconds_worked}
    return Simulated(folder, hours, record, run.clock)


def test_too_few_hours_are_one_line_that_says_how_many_would_do(tmp_path):
    run = Simulated(tmp_path, 0.05)
    with pytest.raises(RunError) as error:
        run.start(seconds=10, evaluation=100)
    assert str(error.value).startswith("--hours 0.05 is too little")
    assert "\n" not in str(error.value)
    hours = advised_hours(error.value)
    resumed = resume(tmp_path, run, hours)
    resumed.start(seconds=12, evaluation=100)
    assert resumed.train(lambda: 10.0) >= 20
    assert resumed.end(evaluation=100) <= 3600 * hours


# Real runs

MONITORED = {
    "data": {"task": "starter", "train_limit": 200, "eval_limit": 4},
    "monitor": {"rows": 16},
    "eval": {"num_samples": 1, "k": (1,)},
}
HOURS = 0.07  # 252 s, of which each evaluation takes 40
IN_TIME = {"hours": HOURS, "train": {"max_steps": endless_steps(HOURS)}}


@pytest.fixture(scope="module")
def clock():
    """A clock that only rollouts (10 s), validation passes (3 s) and batches of an evaluation (20 s) move."""
    clock = Clock()

    def taking(seconds, function):
        def timed(*args, **kwargs):
            clock.now += seconds
            return function(*args, **kwargs)

        return timed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FastGRPOTrainer, "_generate", taking(10.0, FastGRPOTrainer._generate))
        patched.setattr(Validation, "sample", taking(3.0, Validation.sample))
        patched.setattr(sample_rows, "grade", taking(20.0, sample_rows.grade))
        patched.setattr(Run, "clock", staticmethod(clock))
        yield clock


def run_recipe(folder, invocation=None, **changes):
    """Train and evaluate, as a recipe does."""
    config = replace(replace(replace(RunConfig(output_dir=str(folder)), TINY), MONITORED), changes)
    data = load_data(config)
    claim_run(config, invocation or Invocation())
    run = open_run(config, invocation or Invocation(), "test", data.record)
    try:
        train_and_evaluate(run, data)
    finally:
        lock.held.pop().release()
    return run


def rewards(run):
    return [json.loads(line)["reward"] for line in run.metrics.read_text().splitlines()]


def weights(run):
    return (run.adapter / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def unbroken(clock, tmp_path_factory):
    """A run, its seconds, and what it printed."""
    began = clock.now
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        run = run_recipe(tmp_path_factory.mktemp("hours") / "unbroken", **IN_TIME)
    return run, clock.now - began, printed.getvalue()


def test_a_run_ends_in_time(unbroken):
    run, seconds, printed = unbroken
    assert 0.8 * 3600 * HOURS < seconds <= 3600 * HOURS
    assert run.record["status"] == "complete"
    steps = run.out_of_time_at
    assert len(rewards(run)) == steps == run.record["trained_steps"]
    assert "pass@1" in printed
    assert f"GRPO {steps}/{steps}" in printed
    assert f"{steps} in 0.07 h" in (run.folder / "report" / "report.html").read_text()
    assert (run.validation / f"step-{steps:05d}.jsonl").exists(), "the last step competes for the best adapter"
    assert read_run(run.folder).status == "complete"  # run.json has the right types


@pytest.mark.slow
def test_a_killed_run_keeps_its_budget_and_its_steps(unbroken, clock, tmp_path):
    run, _, _ = unbroken
    began = clock.now
    append_metrics = Run.append_metrics

    def kill_after_step_5(self, metrics):
        append_metrics(self, metrics)
        if metrics["step"] == 5:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Run, "append_metrics", kill_after_step_5)
        run_recipe(tmp_path / "killed", **IN_TIME)
    seconds_between = 10_000
    clock.now += seconds_between
    resumed = run_recipe(tmp_path / "killed", Invocation(resume=True), **IN_TIME)
    assert 0.8 * 3600 * HOURS < clock.now - began - seconds_between <= 3600 * HOURS
    assert resumed.record["status"] == "complete"
    # The step after the checkpoint was lost, and its time is used.
    assert resumed.out_of_time_at == run.out_of_time_at - 1
    assert rewards(resumed) == rewards(run)[:-1]


@pytest.mark.slow
def test_a_run_in_time_trains_as_one_of_as_many_steps(unbroken, clock, tmp_path):
    run, _, _ = unbroken
    of_steps = run_recipe(tmp_path / "of_steps", train={"max_steps": run.out_of_time_at})
    assert rewards(of_steps) == rewards(run)
    assert weights(of_steps) == weights(run)


RECIPE_WITH_SLOW_ROLLOUTS = """
import runpy, sys
from lora_grpo import distributed
from lora_grpo.runs import Run
from lora_grpo.monitoring import StepMetrics

class Clock:
    now = 0.0

add_rollouts = StepMetrics.add_rollouts

def slow(self, token_ids, logprobs):
    Clock.now += 10.0 * (1 + distributed.rank())  # the clock of rank 1 would end the run earlier
    add_rollouts(self, token_ids, logprobs)

StepMetrics.add_rollouts = slow
Run.clock = staticmethod(lambda: Clock.now)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_two_processes_end_after_the_same_step(warm, tmp_path):
    (tmp_path / "slow_rollouts.py").write_text(RECIPE_WITH_SLOW_ROLLOUTS)
    for split, size in (("train", 8), ("eval", 4)):
        rows = [json.dumps({"question": f"What is {n} + {size}?", "answer": str(n + size)}) for n in range(size)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    flags = (
        "--model.engine peft --lora.rank 4 --sampling.num-generations 4 --sampling.max-completion-tokens 16 "
        "--train.prompts-per-step 2 --train.micro-batch-size 2 --eval.num-samples 0 --hours 0.025 "
        "--data.train train.jsonl --data.eval eval.jsonl --output-dir run"
    )
    done = finish(warm.start(FORKS, 2, tmp_path / "slow_rollouts.py", RECIPE, *flags.split(), cwd=tmp_path))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "complete"
    assert record["out_of_time"] == {"step": 8, "hours": 0.025}
    assert "greedy" in done.stdout
