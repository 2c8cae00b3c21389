import gzip
import resource
import subprocess
import sys

import pytest

from lora_grpo.errors import UserError
from lora_grpo.files import json_files


def test_values_come_with_their_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"a": "x\u2028y"}\r\n\n[1]'.encode())
    assert list(json_files.read_lines(path, "rows")) == [(f"{path}:1", {"a": "x\u2028y"}), (f"{path}:3", [1])]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", None, "No such file or directory; expected rows"),
        ("a.jsonl", b"\n \n", "no rows; expected rows"),
        ("a.jsonl", b'{"a": 1}\n{"a":\n', r"a\.jsonl:2: not JSON; expected one object per line, got '\{\"a\":'"),
        ("a.jsonl", 100_000 * b"[", r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b'"\xff"', r"a\.jsonl:1: byte 0xff is not UTF-8"),
        ("a.jsonl.gz", b'{"a": 1}', "Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}' * 99, mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_ends_in_one_line(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        list(json_files.read_lines(path, "rows"))
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_a_line_that_is_still_written_is_left_out_and_a_damaged_one_named(tmp_path):
    path = tmp_path / "a.jsonl"
    assert json_files.read_finished_lines(path) == []
    path.write_text('{"a": 1}\n{"a": "x"}\n{"a": ')
    assert json_files.read_finished_lines(path) == [{"a": 1}, {"a": "x"}]
    for required, number in (({"a": int}, 2), ({"a": (int, str), "b": int}, 1)):
        with pytest.raises(UserError, match=rf"a\.jsonl:{number}: expected an object with a"):
            json_files.read_finished_lines(path, **required)
    for line in ("3", '{"a": '):
        path.write_text(f'{{"a": 1}}\n{line}\n')
        with pytest.raises(UserError, match=r"a\.jsonl:2: expected an object, got .*; delete the line"):
            json_files.read_finished_lines(path)


def test_rows_that_do_not_fit_on_the_disk_leave_the_file_unchanged(tmp_path):
    """A limit on the size of a file ends in a short write, as on a full disk. Python ignores SIGXFSZ."""
    path = tmp_path / "a.jsonl"
    row = "x" * 297  # 300 bytes with quotes and the newline
    json_files.append_lines(path, [row])
    code = (
        "import pathlib, sys; from lora_grpo.files import json_files; "
        "json_files.append_lines(pathlib.Path(sys.argv[1]), 10 * [sys.argv[2]])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, path, row], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)),
    )  # fmt: skip
    assert "DiskFullError" in ended.stderr and "cannot be written: File too large" in ended.stderr
    assert path.read_text() == f'"{row}"\n'
