"""Compare a recipe with two processes, killed and resumed, with an uninterrupted run and with one process."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest
from helpers.warm_process import finish, wait_for

from lora_grpo.tasks import sources
from lora_grpo.tasks.registry import get_task

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


def kept(folder):
    """Return the results of a run that do not contain times."""
    names = ["adapter/adapter_model.safetensors", "adapter/adapter_config.json", "evaluation/report.json"]
    names += ["evaluation/base.samples.jsonl", "evaluation/trained.samples.jsonl"]
    names += sorted(f"completions/{path.name}" for path in (folder / "completions").iterdir())
    timed = ("time", "per_second")
    steps = [{name: step[name] for name in step if not any(part in name for part in timed)} for step in lines(folder)]
    return {"metrics": steps} | {name: (folder / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def start(tmp_path_factory, warm):
    """Return a function that starts the recipe with N processes: `start(N, name, flag, ...)`."""
    folder = tmp_path_factory.mktemp("runs")
    files = []
    for split, size in (("train", 8), ("eval", 4)):
        rows = sources.sample(get_task("starter").load(split), size, 0)
        text = "".join(json.dumps({name: row[name] for name in ("question", "answer")}) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
        files += [f"--data.{split}", folder / f"{split}.jsonl"]

    def start(processes, name, *more):
        ranks = (FORKS, processes) if processes > 1 else ()
        asked = () if "--resume" in more else (*TINY, *files)
        return warm.start(*ranks, RECIPE, "--output-dir", folder / name, *asked, *more)

    start.folder = folder
    return start


@pytest.fixture(scope="module")
def two(start):
    return start.folder / "two", finish(start(2, "two"))


def test_rank_0_alone_writes_and_speaks(two):
    folder, done = two
    assert done.stdout.count(" samples of ") == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("GRPO")] == sorted(
        {line for line in done.stderr.splitlines() if line.startswith("GRPO")}
    )
    assert [step["step"] for step in lines(folder)] == [1, 2, 3, 4, 5]
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["processes"]) == ("complete", 2)
    assert sorted(path.name for path in (folder / "evaluation").iterdir()) == [
        "base.samples.jsonl", "report.json", "report.md", "rows.jsonl", "trained.samples.jsonl",
    ]  # fmt: skip
    newest = {path.name for path in (folder / "checkpoints" / "checkpoint-5").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "manifest.json"} <= newest
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-5"]


def test_two_processes_train_as_one_does(two, start):
    folder = start.folder / "one"
    finish(start(1, "one"))
    alike = ("loss", "grad_norm", "reward", "reward_std", "num_tokens", "completions/mean_length", "learning_rate")
    for one, other in zip(lines(folder), lines(two[0]), strict=True):
        assert {name: other[name] for name in alike} == pytest.approx({name: one[name] for name in alike}, **ROUNDING)
    for name in ("base", "trained"):
        samples = f"evaluation/{name}.samples.jsonl"
        assert (two[0] / samples).read_bytes() == (folder / samples).read_bytes()


@pytest.mark.slow
def test_two_processes_that_were_killed_end_in_the_same_bits(two, start):
    folder = start.folder / "killed"
    process = start(2, "killed")
    wait_for(process, lambda: len(lines(folder)) >= 3)
    process.kill()
    assert "resuming from" in finish(start(2, "killed", "--resume")).stderr
    assert kept(folder) == kept(two[0])


def test_a_signal_to_one_process_stops_both_and_one_process_goes_on(two, start):
    folder = start.folder / "stopped"
    process = start(2, "stopped")
    wait_for(process, lambda: len(lines(folder)) >= 1)
    _, second = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    os.kill(second, signal.SIGTERM)
    ended = process.end()
    assert ended.returncode == 128 + signal.SIGTERM
    assert "-m torch.distributed.run --standalone --nproc-per-node 2" in ended.stderr
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    finish(start(1, "stopped", "--resume"))
    for step, other in zip(lines(folder), lines(two[0]), strict=True):
        assert step["reward"] == other["reward"]
        assert step["loss"] == pytest.approx(other["loss"], **ROUNDING)


@pytest.mark.slow
def test_torchrun_starts_what_the_forks_do(two, start, fresh):
    """Start torchrun in a new process, as a user would."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [RECIPE, "--preset", "starter", *TINY]
    for split in ("train", "eval"):
        command += [f"--data.{split}", start.folder / f"{split}.jsonl"]
    folder = start.folder / "launched"
    alike = {**os.environ, "OMP_NUM_THREADS": "1"}  # more threads sum in another order
    finish(fresh.start(*launch, *command, "--output-dir", folder, env=alike))
    assert kept(folder) == kept(two[0])
