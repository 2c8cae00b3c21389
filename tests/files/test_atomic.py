import json
import signal
import subprocess
import sys

import pytest

from lora_grpo.files.atomic import MANIFEST, damage, new_folder, write_json


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def published(folder, **files):
    with new_folder(folder) as staging:
        for name, text in files.items():
            (staging / f"{name}.bin").write_text(text)
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_what_is_not_json_leaves_the_old_file(tmp_path, value):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "a.json", {"value": value})
    assert names(tmp_path) == {"a.json"}
    assert json.loads((tmp_path / "a.json").read_text()) == 1


def test_a_new_folder_is_whole(tmp_path):
    with new_folder(tmp_path / "adapter") as staging:
        assert not (tmp_path / "adapter").exists()
        assert staging.parent == tmp_path
        (staging / "a.bin").write_text("a")
        (staging / "sub").mkdir()
        (staging / "sub" / "b.bin").write_text("b")
    everything = {"adapter", f"adapter/{MANIFEST}", "adapter/a.bin", "adapter/sub", "adapter/sub/b.bin"}
    assert names(tmp_path) == everything
    assert damage(tmp_path / "adapter") is None


def test_a_block_that_raises_leaves_the_old_folder_and_one_that_ends_replaces_it_whole(tmp_path):
    published(tmp_path / "adapter", old="old")
    with pytest.raises(RuntimeError), new_folder(tmp_path / "adapter") as staging:
        (staging / "new.bin").write_text("new")
        raise RuntimeError
    assert names(tmp_path) == {"adapter", "adapter/old.bin", f"adapter/{MANIFEST}"}
    assert damage(tmp_path / "adapter") is None
    published(tmp_path / "adapter", new="new")
    assert names(tmp_path) == {"adapter", "adapter/new.bin", f"adapter/{MANIFEST}"}


def test_what_a_killed_process_staged_does_not_get_into_the_next_folder(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from lora_grpo.files.atomic import new_folder\n"
        "with new_folder(Path('adapter')) as staging:\n"
        "    (staging / 'half.bin').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "adapter").exists()
    published(tmp_path / "adapter", whole="whole")
    assert names(tmp_path) == {"adapter", "adapter/whole.bin", f"adapter/{MANIFEST}"}


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (flip, "a.bin has changed since it was written"),
        (lambda path: path.write_bytes(b""), "a.bin has changed since it was written"),
        (lambda path: path.unlink(), "a.bin is missing"),
    ],
)
def test_a_harmed_file_is_named(tmp_path, harm, reason):
    folder = published(tmp_path / "adapter", a="aaaa", b="bbbb")
    harm(folder / "a.bin")
    assert damage(folder) == reason


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"\xff\xfe", b"[]", b"3", b"{}", b'{"sha256": 3}', b'{"sha256": null}']
)
def test_a_manifest_that_is_missing_or_unreadable(tmp_path, content):
    folder = published(tmp_path / "adapter", a="a")
    (folder / MANIFEST).unlink()
    if content is not None:
        (folder / MANIFEST).write_bytes(content)
    assert damage(folder) == f"no readable {MANIFEST}"
