"""A run whose agents are deterministic is killed and resumed: it has the same bytes as one that was not."""

import contextlib
import json
import random
import shlex
import shutil
import time
from pathlib import Path

import pytest
from helpers.agent_files import HEAD
from helpers.warm_process import finish

pytestmark = pytest.mark.slow

AGENT = """
import asyncio

async def agent(row, base_url):
    client = CLIENT.with_options(base_url=base_url)
    first = await reply(client, asks(f"Name a number near {row['number']}."), max_tokens=8)
    history = [*asks(f"Name a number near {row['number']}."), first.choices[0].message]
    answers = await asyncio.gather(*(reply(client, history + asks(text), max_tokens=8) for text in ("+1", "+2")))
    texts = [answer.choices[0].message.content for answer in answers]
    await reply(client, asks("Compare: " + " ".join(texts)), max_tokens=8)
    return (len(texts[0]) + 2 * len(texts[1])) % 5 / 4
"""
FLAGS = shlex.split(
    "--lora.rank 4 --sampling.num-generations 4 --sampling.max-completion-tokens 160 --train.max-steps 6 "
    "--train.prompts-per-step 2 --train.micro-batch-size 4 --train.checkpoint-steps 2 --train.completions-steps 1 "
    "--eval.num-samples 2 --eval.k 1 2 --data.eval-limit 3"
)
FILES = ("adapter/adapter_model.safetensors", "evaluation/base.samples.jsonl", "evaluation/trained.samples.jsonl")
METRICS = ("step", "loss", "grad_norm", "reward", "reward_std", "entropy", "num_tokens", "agents/calls")


def files(folder):
    """Return what a run has made: the adapter, the samples, the completions, and metrics without times."""
    made = {}
    for name in FILES:
        made[name] = (folder / name).read_bytes()
    for path in (folder / "completions").iterdir():
        made[path.name] = path.read_bytes()
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    made["metrics"] = [{name: step.get(name) for name in METRICS} for step in steps]
    return made


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("resumed") / "numbers.py"
    path.write_text(HEAD + AGENT)
    return path


RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "your_task.py"


@pytest.fixture(scope="module")
def unbroken(warm, task):
    started = time.monotonic()
    finish(warm.start(RECIPE, "--task", task, "--output-dir", task.parent / "unbroken", *FLAGS))
    return files(task.parent / "unbroken"), time.monotonic() - started


@pytest.mark.parametrize("number_of_kills", [2, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_killed_has_the_same_bytes(warm, task, unbroken, number_of_kills):
    expected, seconds = unbroken
    folder = task.parent / f"killed {number_of_kills} times"
    moments = random.Random(0)
    for _ in range(number_of_kills):
        has_begun = (folder / "run.json").exists()
        begin = ["--resume"] if has_begun else FLAGS
        process = warm.start(RECIPE, "--task", task, "--output-dir", folder, *begin)
        time.sleep(moments.uniform(0.2, 0.5) * seconds)
        with contextlib.suppress(ProcessLookupError):  # it has come to its end
            process.kill()
        process.wait()
        if folder.exists() and not (folder / "run.json").exists():
            shutil.rmtree(folder)
    finish(warm.start(RECIPE, "--task", task, "--output-dir", folder, "--resume"))
    assert files(folder) == expected
