"""An evaluation killed five times gives the same bytes as an uninterrupted one, and repeats almost nothing."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lora_grpo.tasks import get_task, sources

SCRIPT = Path(__file__).parents[1] / "helpers" / "counted_evaluate.py"
KILLS = 5
UNIT, ROWS, SAMPLES = 8, 24, 4


def noted(path):
    """Return the sums of the noted counts by name, and the number of lines."""
    lines = path.read_text().splitlines() if path.exists() else []
    words = [line.split() for line in lines]
    sums = {}
    for line in words:
        for name, count in zip(line[::2], line[1::2], strict=True):
            sums[name] = sums.get(name, 0) + int(count)
    return sums, len(lines)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Evaluate programs from the embedded model, and compare them with a file of samples, which are also run."""
    samples = tmp_path_factory.mktemp("samples") / "theirs.jsonl"
    rows = sources.sample(get_task("starter-code").load("eval"), ROWS, 0)
    lines = [
        {"task_id": row["id"], "completion": row["answer"] + "\n" * (number + 1)}
        for row in rows
        for number in range(SAMPLES)
    ]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["starter", "--task", "starter-code", "--limit", ROWS, "--k", "1", SAMPLES, "--compare", samples]


def test_kills_change_nothing_and_little_is_repeated(command, warm, tmp_path):
    def start(name):
        return warm.start(SCRIPT, tmp_path / f"{name}.notes", UNIT, *command, "--output-dir", tmp_path / name)

    unbroken = start("unbroken").end()
    assert unbroken.returncode == 0, unbroken.stderr
    once, events = noted(tmp_path / "unbroken.notes")
    assert once["completions"] == ROWS * SAMPLES
    assert events >= 2 * ROWS * SAMPLES / UNIT

    moments = random.Random(4)
    notes = tmp_path / "killed.notes"
    kills = 0
    while kills < KILLS:
        _, events_before = noted(notes)
        process = start("killed")
        events_until_kill = events_before + moments.randrange(3)
        while noted(notes)[1] < events_until_kill and process.wait(0.02) is None:
            pass
        time.sleep(moments.uniform(0, 0.3))
        if process.wait(0) is not None:
            break  # it finished: it resumed after every kill
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        kills += 1
    assert kills == KILLS
    before, _ = noted(notes)
    num_results = (tmp_path / "killed" / "results.jsonl").read_bytes().count(b"\n")
    assert num_results >= UNIT
    resumed = start("killed").end()
    assert resumed.returncode == 0, resumed.stderr
    # Complete units are not sampled again.
    after, _ = noted(notes)
    num_sampled = after["completions"] - before.get("completions", 0)
    assert num_sampled == ROWS * SAMPLES - num_results // UNIT * UNIT
    files = [path for path in (tmp_path / "unbroken").iterdir() if path.name != ".lock"]
    assert len(files) == 5
    for path in files:
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes(), path.name
    # Each kill repeats at most the unit in progress. The file of samples is graded in one chunk.
    total, _ = noted(notes)
    assert once["completions"] <= total["completions"] <= once["completions"] + kills * UNIT
    assert total["tokens"] <= once["tokens"] + kills * UNIT * 512
    assert once["programs"] <= total["programs"] <= once["programs"] + kills * ROWS * SAMPLES

    done, _ = noted(notes)
    assert start("killed").end().returncode == 0
    assert noted(notes)[0] == done  # finished: nothing is sampled or run
