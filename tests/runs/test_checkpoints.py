import pytest

from lora_grpo.errors import RunError
from lora_grpo.files.atomic import MANIFEST, new_folder
from lora_grpo.runs.checkpoints import Checkpoint, newest_complete


@pytest.fixture
def folder(tmp_path):
    """A folder with checkpoints of steps 2, 9 and 10, each with two files."""
    for step in (10, 2, 9):
        with new_folder(tmp_path / f"checkpoint-{step}") as staging:
            (staging / "adapter.bin").write_text(f"adapter {step}")
            (staging / "state.json").write_text(f"state {step}")
    return tmp_path


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: (path / "adapter.bin").write_text("adapter 11"), "adapter.bin has changed since it was written"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: (path / MANIFEST).write_text("{"), f"no readable {MANIFEST}"),
    ],
)
def test_a_harmed_checkpoint_is_passed_over_said_and_deleted(folder, capsys, harm, reason):
    newest = folder / "checkpoint-10"
    harm(newest)
    assert newest_complete(folder) == Checkpoint(9, folder / "checkpoint-9")
    assert capsys.readouterr().err == f"skipped damaged {newest}: {reason}\n"
    assert not newest.exists()
    assert newest_complete(folder) == Checkpoint(9, folder / "checkpoint-9")
    assert capsys.readouterr().err == ""


def test_all_of_them_harmed(folder, capsys):
    for path in folder.iterdir():
        (path / MANIFEST).unlink()
    with pytest.raises(RunError, match="--overwrite") as refused:
        newest_complete(folder)
    assert str(folder / "checkpoint-10") in str(refused.value)
    assert capsys.readouterr().err == "" and len([*folder.iterdir()]) == 3


def test_what_is_no_checkpoint_is_left_alone(folder):
    others = [folder / ".partial", folder / "checkpoint-best", folder / "checkpoint-"]
    for other in others:
        other.mkdir()
    assert newest_complete(folder) == Checkpoint(10, folder / "checkpoint-10")
    assert all(other.is_dir() for other in others)
