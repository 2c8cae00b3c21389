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


def test_a_folder_that_is_being_made_is_locked_by_a_file_beside_it(tmp_path):
    output = tmp_path / "made" / "for" / "output"
    with lock.holding_new(output):
        with pytest.raises(UserError, match=f"another process is using {output}"), lock.holding_new(output):
            pass
        with lock.holding_new(output.with_name("another")):
            pass
        assert [path.name for path in output.parent.iterdir()] == [".output.lock"]
        output.mkdir()
    assert list(output.parent.iterdir()) == [output]
    with lock.holding_new(output), pytest.raises(UserError), lock.holding_new(output):
        pass
    assert list(output.parent.iterdir()) == [output]


def test_a_folder_that_was_not_made_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), lock.holding_new(tmp_path / "made" / "for" / "output"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_claim_of_a_claimed_folder_is_refused(tmp_path):
    with lock.holding(tmp_path), pytest.raises(UserError, match=f"another process is using {tmp_path}"):
        lock.claim(tmp_path)
