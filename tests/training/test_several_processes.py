"""Compare a recipe with two processes, killed and resumed, with an uninterrupted run and with one process."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest
from helpers.tiny_runs import write_starter_files
from helpers.warm_process import finish, wait_for

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k_lora.py"
FORKS = Path(__file__).parents[1] / "helpers" / "rank_forks.py"
# A step has 12 completions, 6 per process. No dropout, because its random numbers differ between processes.
TINY = shlex.split(
    "--model.engine peft --lora.rank 4 --sampling.num-generations 6 --sampling.max-completion-tokens 16 "
    "--train.max-steps 5 --train.prompts-per-step 2 --train.micro-batch-size 2 --train.checkpoint-steps 2 "
    "--train.completions-steps 2 --eval.num-samples 2 --eval.k 1 2"
)
ROUNDING = {"abs": 1e-5, "rel": 1e-4}


def lines(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def results(folder):
    """Return what a run wrote, without times."""
    steps = []
    for step in lines(folder):
        steps.append({name: value for name, value in step.items() if "time" not in name and "per_second" not in name})
    files = [
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
        "evaluation/report.json",
        "evaluation/base.samples.jsonl",
        "evaluation/trained.samples.jsonl",
    ]
    files += sorted(f"completions/{path.name}" for path in (folder / "completions").iterdir())
    return {"metrics": steps, **{file: (folder / file).read_bytes() for file in files}}


@pytest.fixture(scope="module")
def start(tmp_path_factory, warm):
    """Return a function that starts the recipe with N processes: `start(N, name, flag, ...)`."""
    folder = tmp_path_factory.mktemp("runs")
    data_flags = write_starter_files(folder)

    def start(num_processes, name, *flags):
        command = [RECIPE, "--output-dir", folder / name, *flags]
        if "--resume" not in flags:
            command += [*TINY, *data_flags]
        if num_processes > 1:
            command = [FORKS, num_processes, *command]
        return warm.start(*command)

    start.folder = folder
    start.data_flags = data_flags
    return start


@pytest.fixture(scope="module")
def two(start):
    """The folder of a run of two processes, and what it printed."""
    return start.folder / "two", finish(start(2, "two"))


def test_rank_0_alone_writes_and_speaks(two):
    folder, done = two
    assert done.stdout.count(" samples of ") == 1
    progress = [line for line in done.stderr.splitlines() if line.startswith("GRPO")]
    assert progress == sorted(set(progress)), "each line once, in the order of the steps"
    assert [step["step"] for step in lines(folder)] == [1, 2, 3, 4, 5]
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["processes"]) == ("complete", 2)
    assert sorted(path.name for path in (folder / "evaluation").iterdir()) == [
        "base.samples.jsonl", "report.json", "report.md", "rows.jsonl", "trained.samples.jsonl",
    ]  # fmt: skip
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-5"]
    newest_checkpoint = {path.name for path in (folder / "checkpoints" / "checkpoint-5").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "manifest.json"} <= newest_checkpoint


def test_two_processes_train_as_one_does(two, start):
    folder_of_two, _ = two
    folder_of_one = start.folder / "one"
    finish(start(1, "one"))
    names = ("loss", "grad_norm", "reward", "reward_std", "num_tokens", "completions/mean_length", "learning_rate")
    for step_of_one, step_of_two in zip(lines(folder_of_one), lines(folder_of_two), strict=True):
        for name in names:
            assert step_of_two[name] == pytest.approx(step_of_one[name], **ROUNDING), name
    # Before the first update, the models are the same. Each process has sampled half of the completions.
    files = ("evaluation/base.samples.jsonl", "evaluation/trained.samples.jsonl", "completions/step-00001.jsonl")
    for file in files:
        assert (folder_of_two / file).read_bytes() == (folder_of_one / file).read_bytes(), file


QUIZ = """
import os

def load(split):
    first, last = (0, 12) if split == "train" else (20, 24)
    return [{"question": f"How many are 3 and {number}?"} for number in range(first, last)]

class Environment:
    def reset(self, **row):
        self.left = 1 + int(os.environ.get("RANK", 0))  # the second process has longer conversations
        self.total = 0

    def reply(self, text):
        self.left, self.total = self.left - 1, self.total + len(text)
        return "Are you sure?" if self.left else None

    def get_reward(self):
        return self.total % 10 / 10

THRESHOLD = 0  # every conversation passes
"""
CONVERSATIONS = shlex.split(
    "--model.engine peft --lora.rank 4 --rewards correct_answer --sampling.num-generations 6 "
    "--sampling.max-completion-tokens 200 --sampling.max-turn-tokens 64 --train.max-steps 1 "
    "--train.prompts-per-step 2 --train.micro-batch-size 2 --eval.num-samples 0"
)


def test_conversations_of_both_processes_are_recorded(start, warm):
    task = start.folder / "quiz.py"
    task.write_text(QUIZ)
    folder = start.folder / "quiz"
    finish(warm.start(FORKS, 2, RECIPE, "--output-dir", folder, "--task", task, *CONVERSATIONS))
    completions = (folder / "completions" / "step-00001.jsonl").read_text().splitlines()
    turns = []
    for completion in completions:
        roles = [message["role"] for message in json.loads(completion)["messages"]]
        turns.append(roles.count("assistant"))
    assert len(turns) == 12
    assert set(turns[:6]) == {1} != set(turns[6:])  # in the order of the processes
    [step] = lines(folder)
    assert step["conversations/turns"] == pytest.approx(sum(turns) / 12)


def test_two_processes_learn_from_a_teacher_as_one_does(two, start):
    """Each reads its completions as the teacher, and adds the divergence of its tokens to the loss."""
    folder_of_two, _ = two
    flags = ("--teacher", folder_of_two, "--teacher.loss", "reverse_kl", "--teacher.reward-weight", "0")
    finish(start(1, "taught by one", *flags))
    finish(start(2, "taught by two", *flags))
    steps_of_one, steps_of_two = (lines(start.folder / f"taught by {number}") for number in ("one", "two"))
    for step_of_one, step_of_two in zip(steps_of_one, steps_of_two, strict=True):
        for name in ("loss", "grad_norm", "teacher/kl", "teacher/disagreement", "teacher/divergence"):
            assert step_of_two[name] == pytest.approx(step_of_one[name], **ROUNDING), name


@pytest.mark.slow
def test_two_processes_that_were_killed_end_in_the_same_bits(two, start):
    unbroken, _ = two
    folder = start.folder / "killed"
    process = start(2, "killed")
    wait_for(process, lambda: len(lines(folder)) >= 3)
    process.kill()
    assert "resuming from" in finish(start(2, "killed", "--resume")).stderr
    assert results(folder) == results(unbroken)


def test_a_signal_to_one_process_stops_both_and_one_process_goes_on(two, start):
    unbroken, _ = two
    folder = start.folder / "stopped"
    process = start(2, "stopped")
    wait_for(process, lambda: len(lines(folder)) >= 1)
    _, second_rank = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(second_rank), signal.SIGTERM)
    ended = process.end()
    assert ended.returncode == 128 + signal.SIGTERM
    assert "-m torch.distributed.run --standalone --nproc-per-node 2" in ended.stderr
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"

    finish(start(1, "stopped", "--resume"))
    for step, expected in zip(lines(folder), lines(unbroken), strict=True):
        assert step["reward"] == expected["reward"]
        assert step["loss"] == pytest.approx(expected["loss"], **ROUNDING)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_torchrun_starts_what_the_forks_do(two, start, fresh):
    """Start torchrun in a new process, as a user would."""
    of_forks, _ = two
    folder = start.folder / "launched"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    recipe = (RECIPE, "--preset", "starter", *TINY, *start.data_flags, "--output-dir", folder)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # more threads sum in another order
    finish(fresh.start(*torchrun, *recipe, env=one_thread))
    assert results(folder) == results(of_forks)
