"""The lock of a folder: who looks whether it is held does not disturb who claims it, nor another one who looks."""

import fcntl
import threading

import pytest

from lora_grpo.errors import UserError
from lora_grpo.files import lock


def test_a_lock_is_seen_and_nothing_is_written_by_looking(tmp_path):
    assert not lock.is_held(tmp_path)
    assert not lock.is_held(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
    with lock.holding(tmp_path):
        assert lock.is_held(tmp_path)
    assert not lock.is_held(tmp_path)


def test_two_who_look_at_once_see_no_lock(tmp_path):
    with lock.holding(tmp_path):
        pass
    with (tmp_path / ".lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as `is_held` does
        assert not lock.is_held(tmp_path)


def test_a_claim_waits_for_who_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_SECONDS_TO_WAIT", 600)
    with lock.holding(tmp_path):
        pass
    with (tmp_path / ".lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        with lock.holding(tmp_path):
            assert lock.is_held(tmp_path)
        timer.join()


def test_a_claim_of_a_claimed_folder_is_refused(tmp_path):
    with lock.holding(tmp_path), pytest.raises(UserError, match=f"another process is using {tmp_path}"):
        lock.claim(tmp_path)
