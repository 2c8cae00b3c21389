"""Ranks as processes: they wait, agree, speak once and end together."""

import os
import signal
import textwrap
from pathlib import Path

import pytest
from helpers.warm_process import wait_for

from lora_grpo import distributed
from lora_grpo.config import RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.files.lock import holding
from lora_grpo.settings import check

FORKS = Path(__file__).parent / "helpers" / "rank_forks.py"


def script_of(body):
    """Return a command that runs a body in each rank. `write` leaves a text of the rank in a folder."""
    return f"""
import sys, time, torch
from pathlib import Path
from lora_grpo import console, distributed
from lora_grpo.cli import run_command
from lora_grpo.errors import RunError, UserError
from lora_grpo.training.stop_signal import StopOnSignal

folder = Path(sys.argv[1])

def write(text):
    (folder / f"text.{{distributed.rank()}}").write_text(str(text))

def main():
{textwrap.indent(textwrap.dedent(body), "    ")}

if __name__ == "__main__":
    sys.exit(run_command(main))
"""


@pytest.fixture
def start(warm, tmp_path):
    """Return a function that starts a body in several ranks."""

    def start_ranks(body, processes=2):
        script = tmp_path / "script.py"
        script.write_text(script_of(body))
        return warm.start(FORKS, processes, script, tmp_path)

    return start_ranks


def written(folder):
    """Return the texts that the ranks have written, in order."""
    return [path.read_text() for path in sorted(folder.glob("text.*"))]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ranks_agree(start, tmp_path):
    body = """
        distributed.join()
        value = distributed.once(lambda: {"of": distributed.rank(), "path": folder})
        doubled = distributed.join_shares([2 * item for item in distributed.own_share(range(5))])
        write([distributed.gather(10 * distributed.rank()), value, doubled])
        console.result("spoke")
        print("aside", file=sys.stderr)
    """
    ended = start(body, processes=3).end()
    assert ended.returncode == 0, ended.stderr
    assert written(tmp_path) == [f"[[0, 10, 20], {{'of': 0, 'path': {tmp_path!r}}}, [0, 2, 4, 6, 8]]"] * 3
    assert ended.stdout == "spoke\n"
    assert ended.stderr.count("aside") == 1


def test_what_rank_0_makes_is_made_when_the_others_are_there_and_before_they_go_on(start, tmp_path):
    body = """
        def make():
            others_are_there = (folder / "late").exists()
            (folder / "made").touch()
            return others_are_there

        distributed.join()
        if distributed.rank() == 1:
            time.sleep(0.5)
            (folder / "late").touch()
        others_were_there = distributed.once(make)
        write((others_were_there, (folder / "made").exists()))
    """
    ended = start(body).end()
    assert ended.returncode == 0, ended.stderr
    assert written(tmp_path) == ["(True, True)"] * 2


@pytest.mark.parametrize(
    ("body", "exit_code", "error"),
    [
        ("raise UserError('all are wrong')", 2, "all are wrong"),
        ("distributed.join()\nraise RunError('all are wrong')", 1, "all are wrong"),
        ("distributed.join()\nif distributed.rank() == 1: raise RunError('rank 1')", 1, "rank 1"),
        ("distributed.join()\nif distributed.rank() == 0: raise UserError('rank 0 is')", 2, "rank 0 is"),
        ("if distributed.rank() == 1: raise UserError('early')\ndistributed.join()", 2, "early"),
    ],
    ids=["all, before they meet", "all", "rank 1", "rank 0", "rank 1, before they meet"],
)
def test_an_error_is_told_once_and_ends_every_rank(start, tmp_path, body, exit_code, error):
    ended = start(f"{body}\ndistributed.barrier()\nwrite('went on')").end()
    assert (ended.returncode, ended.stderr) == (exit_code, f"error: {error}\n")
    assert written(tmp_path) == []


def test_a_rank_that_waits_hears_a_signal(start, tmp_path):
    body = """
        distributed.join()
        write("joined")
        if distributed.rank() == 0:
            distributed.barrier()
        time.sleep(600)
    """
    process = start(body)
    wait_for(process, lambda: written(tmp_path) == ["joined"] * 2)
    main_rank, _ = children(process.pid)
    os.kill(main_rank, signal.SIGTERM)
    ended = process.end()
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stderr == "terminated\n"


STEPS = """
class Control:
    should_save = should_training_stop = False

class State:
    global_step = 0

distributed.join()
state = State()
control = Control()
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
    ended = process.end()
    assert ended.returncode == 0, ended.stderr
    first, second = written(tmp_path)
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
