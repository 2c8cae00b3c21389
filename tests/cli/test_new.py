"""`lora-grpo new`: what it writes passes its own tests and the audit, trains, and is never written over."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from helpers.script_metadata import script_metadata

from lora_grpo.cli import verbs
from lora_grpo.cli.new import _source_of_installation

ROOT = Path(__file__).resolve().parents[2]
SMALL_RUN = (
    *("--preset", "starter", "--train.max-steps", "1", "--train.prompts-per-step", "2"),
    *("--train.micro-batch-size", "4"),
    *("--sampling.max-completion-tokens", "8", "--sampling.num-generations", "2", "--monitor.rows", "0"),
    *("--data.eval-limit", "2", "--eval.num-samples", "1", "--eval.k", "1"),
)


@pytest.fixture
def task(tmp_path, monkeypatch):
    """The folder of a new task."""
    monkeypatch.chdir(tmp_path)
    assert verbs.run_front_door(["new", "plums"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["plums"]
    return tmp_path / "plums"


def run(*command, cwd):
    """Run a Python file or module, and return what it said."""
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def test_its_own_tests_pass_and_fail_with_a_wrong_check(task):
    ended = run("test_plums.py", cwd=task)
    assert re.search(r"Ran [5-9] tests", ended.stderr)
    path = task / "plums.py"
    right = 'return ANSWER.findall(completion) == [row["answer"]]'
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, 'return row["answer"] in completion'))
    ended = subprocess.run([sys.executable, "test_plums.py"], cwd=task, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "test_wrong_completions_do_not_pass" in ended.stderr


def test_it_passes_the_audit_and_trains_in_place(task):
    audit = run("-m", "lora_grpo", "train", "plums.py", "--preset", "starter", "--audit", cwd=task)
    assert "passed" in audit.stdout + audit.stderr
    run("plums.py", *SMALL_RUN, cwd=task)
    record = json.loads((task / "outputs" / "plums" / "run.json").read_text())
    assert (record["recipe"], record["status"]) == ("plums", "complete")


def test_it_reads_rows_from_a_file(task):
    row = {"question": "What is 9 plus 4?", "solution": "9+4=13", "answer": "13"}
    (task / "test.jsonl").write_text(json.dumps(row) + "\n")
    ended = run("plums.py", "--preset", "starter", "--data.eval", "test.jsonl", "--dry-run", cwd=task)
    assert ", 1 evaluation rows;" in ended.stdout


def test_the_files_look_as_ours_do(task):
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", ROOT / "pyproject.toml", task]
    for command in (["check"], ["format", "--check"]):
        ended = subprocess.run([*ruff, *command, *config], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout
    readme = (task / "README.md").read_text()
    assert max(map(len, readme.splitlines())) <= 120
    assert "{{" not in readme and "\n\n\n" not in readme


def test_the_header_names_where_this_package_is_installed_from(task):
    for name in ("plums.py", "test_plums.py"):
        header = script_metadata(task / name)
        assert header["dependencies"] == ["lora-grpo"]
        assert header["tool"]["uv"]["sources"] == {"lora-grpo": {"path": str(ROOT), "editable": True}}


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [
        (None, None),
        ({"url": "file:///a%20b/kit", "dir_info": {}}, {"path": "/a b/kit", "editable": True}),
        (
            {"url": "https://host/kit.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            {"git": "https://host/kit.git", "rev": "abc"},
        ),
        ({"url": "https://host/kit.whl", "archive_info": {}}, {"url": "https://host/kit.whl"}),
        ({"url": "file:///a%20b/kit.whl", "archive_info": {}}, {"path": "/a b/kit.whl"}),
    ],
)
def test_the_source_is_what_the_installer_recorded(direct_url, source, tmp_path, monkeypatch):
    folder = tmp_path / "lora_grpo-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: lora-grpo\nVersion: 1\n")
    if direct_url:
        (folder / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.version("lora-grpo") == "1"
    assert _source_of_installation() == source


@pytest.mark.parametrize("name", ["a-b", "1a", "", "class", "json", "torch", "../up", "mine/", "größe"])
def test_a_name_that_cannot_be_a_module_of_its_own_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert verbs.run_front_door(["new", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_folder", [True, False])
def test_nothing_is_written_over(is_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine"
    if is_folder:
        path.mkdir()
        (path / "mine.py").write_text("work of a week")
    else:
        path.write_text("work of a week")
    assert verbs.run_front_door(["new", "mine"]) == 2
    assert "mine exists" in capsys.readouterr().err
    assert (path / "mine.py" if is_folder else path).read_text() == "work of a week"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_one_line(monkeypatch, capsys):
    monkeypatch.chdir("/proc")  # where nobody can make a folder
    assert verbs.run_front_door(["new", "mine"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: /proc/mine cannot be written: ")


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to("nowhere")  # it does not exist, and no folder can replace it
    assert verbs.run_front_door(["new", "mine"]) == 2
    assert "mine cannot be written: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
