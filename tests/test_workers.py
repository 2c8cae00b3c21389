"""Processes that call one function, and are killed when a call takes too long."""

import signal
from pathlib import Path

import pytest

from lora_grpo.errors import RunError
from lora_grpo.workers import TooSlow, Worker


def test_a_worker_reports_exceptions_and_a_process_that_ends():
    worker = Worker("os:_exit", 60.0)
    with pytest.raises(RuntimeError, match="ended"):
        worker(3)
    worker = Worker("os:listdir", 60.0)
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        worker("/no/such/folder")
    assert Path(__file__).name in worker(str(Path(__file__).parent))
    with pytest.raises(TooSlow):
        Worker("time:sleep", 0.2)(600)


def test_a_call_after_one_that_was_interrupted_gets_its_own_answer():
    def interrupt(*_):
        raise KeyboardInterrupt

    worker = Worker("builtins:eval", 60.0)
    assert worker("1") == 1  # the process has started
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            worker("__import__('time').sleep(2) or 2")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert [worker("3"), worker("4")] == [3, 4]


def test_a_worker_imports_no_module_of_this_folder_and_says_if_it_cannot_start(tmp_path, monkeypatch):
    (tmp_path / "fractions.py").write_text("import pathlib; pathlib.Path('imported').touch()")
    monkeypatch.chdir(tmp_path)
    assert (
        Worker("fractions:gcd", 60.0, imports=["math"]) and Worker("math:gcd", 60.0, imports=["fractions"])(4, 6) == 2
    )
    assert not (tmp_path / "imported").exists()
    with pytest.raises(RunError, match="nowhere:f cannot be imported"):
        Worker("nowhere:f", 60.0)()
