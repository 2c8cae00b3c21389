"""Ranks as processes: they wait, agree, speak once and end together."""

import os
import signal
from pathlib import Path

import pytest
from helpers.warm_process import wait_for

from lora_grpo import distributed
from lora_grpo.config import RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.files.lock import holding
from lora_grpo.settings import check

FORKS = Path(__file__).parent / "helpers" / "rank_forks.py"
HEAD = """
import sys, time, torch
from pathlib import Path
from lora_grpo import console, distributed
from lora_grpo.cli import run_command
from lora_grpo.errors import RunError, UserError
from lora_grpo.training.stop_signal import StopOnSignal
folder = Path(sys.argv[1])

def write(text):
    (folder / f"said.{distributed.rank()}").write_text(str(text))

"""


@pytest.fixture
def start(warm, tmp_path):
    def start(body, processes=2):
        script = tmp_path / "script.py"
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        script.write_text(f"{HEAD}def main():\n{lines}\nif __name__ == '__main__':\n    sys.exit(run_command(main))\n")
        return warm.start(FORKS, processes, script, tmp_path)

    return start


def said(folder):
    return [path.read_text() for path in sorted(folder.glob("said.*"))]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ranks_agree(start, tmp_path):
    done = start(
        "distributed.join()\n"
        "made = distributed.once(lambda: {'of': distributed.rank(), 'path': folder})\n"
        "doubled = distributed.join_shares([2 * item for item in distributed.own_share(range(5))])\n"
        "write([distributed.gather(10 * distributed.rank()), made, doubled])\n"
        "console.result('spoke')\n"
        "print('aside', file=sys.stderr)",
        processes=3,
    ).end()
    assert done.returncode == 0, done.stderr
    assert said(tmp_path) == [f"[[0, 10, 20], {{'of': 0, 'path': {tmp_path!r}}}, [0, 2, 4, 6, 8]]"] * 3
    assert done.stdout == "spoke\n"
    assert done.stderr.count("aside") == 1


def test_what_rank_0_makes_is_made_when_the_others_are_there_and_before_they_go_on(start, tmp_path):
    done = start(
        "distributed.join()\n"
        "if distributed.rank():\n"
        "    time.sleep(0.5)\n"
        "    (folder / 'late').touch()\n"
        "there = distributed.once(lambda: ((folder / 'late').exists(), (folder / 'made').touch())[0])\n"
        "write((there, (folder / 'made').exists()))"
    ).end()
    assert done.returncode == 0, done.stderr
    assert said(tmp_path) == ["(True, True)"] * 2


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("raise UserError('everyone is wrong')", (2, "error: everyone is wrong\n")),
        ("distributed.join(); raise RunError('everyone is wrong')", (1, "error: everyone is wrong\n")),
        ("distributed.join()\nif distributed.rank(): raise RunError('rank 1')", (1, "error: rank 1\n")),
        ("distributed.join()\nif not distributed.rank(): raise UserError('rank 0 is')", (2, "error: rank 0 is\n")),
        ("if distributed.rank(): raise UserError('early')\ndistributed.join()", (2, "error: early\n")),
    ],
)
def test_an_error_is_said_once_and_ends_every_rank(start, tmp_path, failing, expected):
    done = start(f"{failing}\ndistributed.barrier()\nwrite('went on')").end()
    assert (done.returncode, done.stderr) == expected
    assert said(tmp_path) == []


def test_a_rank_that_waits_hears_a_signal(start, tmp_path):
    process = start(
        "distributed.join()\nwrite('joined')\nif not distributed.rank(): distributed.barrier()\ntime.sleep(600)"
    )
    wait_for(process, lambda: said(tmp_path) == ["joined"] * 2)
    main, _ = children(process.pid)
    os.kill(main, signal.SIGTERM)
    done = process.end()
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == "terminated\n"


STEPS = """
class Control:
    should_save = should_training_stop = False

class State:
    global_step = 0

distributed.join()
state, control = State(), Control()
with StopOnSignal() as stop:
    while not control.should_training_stop:
        (folder / f"step.{distributed.rank()}.{state.global_step}").touch()
        time.sleep(0.3)
        state.global_step += 1
        if stop.signal_number():
            control.should_save = control.should_training_stop = True
write((state.global_step, control.should_save))
"""


@pytest.mark.parametrize("signalled", [[0], [1], [0, 1]])
def test_a_signal_to_any_rank_stops_all_of_them_after_the_same_step(start, tmp_path, signalled):
    process = start(STEPS)
    wait_for(process, lambda: all((tmp_path / f"step.{rank}.1").exists() for rank in (0, 1)))
    pids = children(process.pid)
    for rank in signalled:
        os.kill(pids[rank], signal.SIGTERM)
    done = process.end()
    assert done.returncode == 0, done.stderr
    first, second = said(tmp_path)
    assert first == second
    assert first.endswith("True)")


def test_what_is_not_training_is_one_processs_work(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 were started; start one"), holding(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_unsloth_in_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"--model\.engine peft"):
        check(replace(RunConfig(), {"model": {"engine": "unsloth"}}))


def test_a_world_size_without_a_launcher_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="RANK is not set"):
        distributed.join()
