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
from lora_grpo.runs import Run, open_run, read_run
from lora_grpo.training import FastGRPOTrainer

FORKS = Path(__file__).parents[1] / "helpers" / "rank_forks.py"
RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k_lora.py"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Simulated:
    """A run whose phases only move a clock."""

    def __init__(self, folder, hours, record=None, clock=None, **changes):
        limit = {"max_steps": endless_steps(hours)} | changes.pop("train", {})
        config = replace(RunConfig(output_dir=str(folder)), {"hours": hours, "train": limit, **changes})
        self.clock = clock or Clock()
        self.run = Run.__new__(Run)
        self.run.clock, self.run.update = self.clock, lambda **entries: self.run.record.update(entries)
        self.run.__init__(config, record or {"evaluation_seconds": {}})

    def start(self, seconds, evaluation):
        """Take the seconds that a process needs to start, and evaluate the base if that has not been done."""
        self.budget = TimeBudget(self.run)
        self.clock.now += seconds
        if "base" not in self.run.record["evaluation_seconds"]:
            self.clock.now += evaluation
            self.run.record["evaluation_seconds"]["base"] = evaluation
        self.budget.check_evaluation()

    def train(self, step_seconds, one_pass=0.0, uses=1, first=1, kill_after=None):
        """Train with steps of `step_seconds(step)` until the budget ends the run, and return the last step."""
        max_steps, step = self.run.config.train.max_steps, first - 1
        if one_pass and not step:
            self.validate(one_pass)
        self.budget.begin_training()
        last = False
        while step < max_steps and step != kill_after and not last:
            step += 1
            self.clock.now += step_seconds(step)
            if step % uses == 0:
                due = one_pass > 0 and step // 20 > (step - uses) // 20
                last = self.budget.is_last(step, uses, validates=due)
                if one_pass and (due or last):
                    self.validate(one_pass)
        return step

    def validate(self, seconds):
        with self.budget.validating():
            self.clock.now += seconds

    def end(self, evaluation):
        self.clock.now += evaluation
        return self.clock.now


@pytest.mark.parametrize("hours", [0.05, 0.1, 0.2, 8])
@pytest.mark.parametrize("slower", [1.0, 0.6, 1.5], ids=["even", "faster", "slower"])
def test_a_run_uses_its_hours_and_no_more(tmp_path, hours, slower):
    """Steps get slower or faster from the first to the last, and the final evaluation with them."""
    budget = 3600 * hours
    run = Simulated(tmp_path, hours)
    run.start(0.06 * budget, 0.1 * budget)
    began, pace = run.clock.now, max(1.5, budget / 300)

    def seconds(step):
        return pace * slower ** ((run.clock.now - began) / (0.7 * budget))

    steps = run.train(seconds, one_pass=0.8 * pace)
    ended = run.end(0.1 * budget * slower)
    assert 0.87 * budget < ended <= budget
    assert run.run.out_of_time_at == steps


def advised(error):
    return float(re.search(r"--resume --hours ([\d.]+)", str(error))[1])


def resumed(folder, run, hours):
    """Return the simulated run with more hours, in a new process."""
    record = json.loads(json.dumps(run.run.record)) | {"seconds_worked": run.run.seconds_worked}
    return Simulated(folder, hours, record, run.clock)


def test_too_few_hours_are_one_line_that_says_how_many_would_do(tmp_path):
    run = Simulated(tmp_path, 0.05)
    with pytest.raises(RunError) as error:
        run.start(10, 100)
    assert str(error.value).startswith("--hours 0.05 is too little") and "\n" not in str(error.value)
    again = resumed(tmp_path, run, advised(error.value))
    again.start(12, 100)
    assert again.train(lambda _: 10.0) >= 20
    assert again.end(100) <= 3600 * again.run.config.hours


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

    def moves(patched, owner, name, seconds):
        original = getattr(owner, name)

        def moved(*args, **kwargs):
            clock.now += seconds
            return original(*args, **kwargs)

        patched.setattr(owner, name, moved)

    with pytest.MonkeyPatch.context() as patched:
        moves(patched, FastGRPOTrainer, "_generate", 10.0)
        moves(patched, Validation, "sample", 3.0)
        moves(patched, sample_rows, "grade", 20.0)
        patched.setattr(Run, "clock", staticmethod(clock))
        yield clock


def run_whole(folder, how=None, **changes):
    config = replace(replace(replace(RunConfig(output_dir=str(folder)), TINY), MONITORED), changes)
    data = load_data(config)
    run = open_run(config, how or Invocation(), "test", data.record)
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
def whole(clock, tmp_path_factory):
    """A run, its seconds, and what it printed."""
    began, said = clock.now, io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        run = run_whole(tmp_path_factory.mktemp("hours") / "whole", **IN_TIME)
    return run, clock.now - began, said.getvalue()


def test_a_run_ends_in_time(whole):
    run, seconds, said = whole
    steps = run.out_of_time_at
    assert 0.8 * 3600 * HOURS < seconds <= 3600 * HOURS
    assert len(rewards(run)) == steps == run.record["trained_steps"] and run.record["status"] == "complete"
    assert "pass@1" in said and f"GRPO {steps}/{steps}" in said
    assert f"{steps} in 0.07 h" in (run.folder / "report" / "report.html").read_text()
    assert (run.validation / f"step-{steps:05d}.jsonl").exists(), "the last step competes for the best adapter"
    assert read_run(run.folder).status == "complete"  # run.json has the right types


@pytest.mark.slow
def test_a_killed_run_keeps_its_budget_and_its_steps(whole, clock, tmp_path):
    run, _, _ = whole
    began, append = clock.now, Run.append_metrics

    def kill(of_run, line):
        append(of_run, line)
        if line["step"] == 5:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Run, "append_metrics", kill)
        run_whole(tmp_path / "killed", **IN_TIME)
    clock.now += 10_000
    resumed = run_whole(tmp_path / "killed", Invocation(resume=True), **IN_TIME)
    assert 0.8 * 3600 * HOURS < clock.now - began - 10_000 <= 3600 * HOURS
    assert resumed.out_of_time_at == run.out_of_time_at - 1, (
        "the step after the checkpoint was lost, and its time is used"
    )
    assert rewards(resumed) == rewards(run)[:-1] and resumed.record["status"] == "complete"
    limited = run_whole(tmp_path / "limited", train={"max_steps": run.out_of_time_at})
    assert rewards(limited) == rewards(run) and weights(limited) == weights(run)


TWO = """
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
    (tmp_path / "two.py").write_text(TWO)
    for split, size in (("train", 8), ("eval", 4)):
        rows = [json.dumps({"question": f"What is {n} + {size}?", "answer": str(n + size)}) for n in range(size)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    flags = "--model.engine peft --lora.rank 4 --sampling.num-generations 4 --sampling.max-completion-tokens 16"
    flags += " --train.prompts-per-step 2 --train.micro-batch-size 2 --eval.num-samples 0 --hours 0.025"
    files = [word for split in ("train", "eval") for word in (f"--data.{split}", tmp_path / f"{split}.jsonl")]
    command = (FORKS, 2, tmp_path / "two.py", RECIPE, *flags.split(), *files, "--output-dir", tmp_path / "run")
    done = finish(warm.start(*command))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "complete" and record["out_of_time"] == {"step": 8, "hours": 0.025}
    assert "greedy" in done.stdout
