"""Commands in unusual environments: they print what the terminal can show, and a mistake stays one line.

One environment has all at once: a terminal of ASCII, 60 columns, no HOME, and a working directory without write access.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from helpers.adapters import make_adapter
from helpers.fresh_imports import RECIPES, ROOT
from helpers.report_runs import write_run
from helpers.small_disk import small_disk
from helpers.warm_process import finish

from lora_grpo import starter

SCRIPTS = ROOT / "scripts"
NARROW = {"PYTHONIOENCODING": "ascii", "COLUMNS": "60", "TERM": "dumb"}
FOLDER = "übung ‖ 1"
NOT_WRITABLE = "/proc"
"""No file can be created here, not even by root."""


def environment(**more):
    return {name: value for name, value in os.environ.items() if name != "HOME"} | NARROW | more


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with an adapter, in a folder with a space and letters beyond ASCII."""
    folder = write_run(tmp_path_factory.mktemp("environments") / FOLDER, policy={"base_model": "starter"})
    make_adapter(starter.model_path(), folder / "adapter", r=8, lora_alpha=16)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(starter.model_path() / name, folder / "adapter" / name)
    return folder


@pytest.fixture
def samples(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"question": "1?", "answer": "#### 1"}\n', encoding="utf-8")
    path = tmp_path / "größe.jsonl"
    path.write_text('{"task_id": "gsm8k/test/0", "completion": "‖ #### 1"}\n', encoding="utf-8")
    return [SCRIPTS / "evaluate.py", path, "--task", "gsm8k", "--data", tmp_path / "data.jsonl"]


def scripts(run, samples, output):
    """Every script on the run, with its output in another folder. The report goes to the run itself."""
    return [
        [*samples, "--output-dir", output / "evaluation"],
        [SCRIPTS / "merge.py", run, "--output", output / "merged"],
        [SCRIPTS / "export_gguf.py", starter.model_path(), "--modelfile", "--output", output / "gguf"],
        [SCRIPTS / "report.py", run],
    ]


def one_line(ended):
    return "Traceback" not in ended.stderr and ended.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("recipe", "flag"), [("code_lora", "--dry-run"), ("gsm8k_lora", "--plan"), ("length_lora", "--help-all")]
)
def test_a_recipe_prints_in_ascii(recipe, flag, warm, tmp_path):
    command = [ROOT / "recipes" / f"{recipe}.py", flag, "--preset", "starter", "--output-dir", tmp_path / FOLDER]
    ended = finish(warm.start(*command, cwd=NOT_WRITABLE, env=environment()))
    assert ended.stdout.isascii() and ended.stderr.isascii()
    assert list(tmp_path.iterdir()) == []
    if flag == "--plan":
        assert r"\xfcbung \u2016 1; " in ended.stdout


def test_the_scripts_print_in_ascii(run, samples, tmp_path, warm):
    push = [SCRIPTS / "push.py", run, "me/mine", "--dry-run"]
    started = [
        warm.start(*command, cwd=NOT_WRITABLE, env=environment())
        for command in [*scripts(run, samples, tmp_path / FOLDER), push]
    ]
    for ended in map(finish, started):
        assert ended.stdout.isascii() and ended.stderr.isascii()
        assert r"\xfcbung \u2016 1" in ended.stdout


def test_a_read_only_folder_is_one_line(run, samples, tmp_path, warm):
    with small_disk(tmp_path / "disk", 100) as folder:
        shutil.copytree(run, folder / "run")
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        train = [RECIPES[0], "--preset", "starter", "--output-dir", folder / "new"]
        commands = [train, *scripts(folder / "run", samples, folder)]
        processes = [warm.start(*command, env=environment()) for command in commands]
        for ended in [process.end() for process in processes]:
            assert ended.returncode == 2 and one_line(ended), ended.stderr
            assert "Read-only file system" in ended.stderr


def test_a_disk_too_small_for_a_run_is_refused(tmp_path, warm):
    command = [RECIPES[0], "--preset", "starter", "--output-dir", tmp_path / "disk" / "run"]
    with small_disk(tmp_path / "disk", 4) as folder:
        for ended in (warm.start(*command).end(), warm.start(*command, "--plan").end()):
            assert ended.returncode == 2 and one_line(ended)
            where = rf"error: {folder}(/run)? has 4\.2 MB free and needs 12\.2 MB; free some space"
            assert re.search(where, ended.stderr), ended.stderr
        assert list(folder.iterdir()) == []


BEGINS_A_RUN = """
    from lora_grpo import config, runs
    settings = config.RunConfig(output_dir="run")
    runs.claim_run(settings, config.Invocation())
    run = runs.open_run(settings, config.Invocation(), "x", {})
    run.begin({})
"""


def command_of(*bodies):
    """Return a command that runs these bodies, which are indented, as a command of this package."""
    return f"""
import errno, os, sys
from lora_grpo.cli import run_command

def main():
{"".join(bodies)}

sys.exit(run_command(main))
"""


@pytest.mark.parametrize("before", ["", BEGINS_A_RUN], ids=["", "in a run"])
def test_a_closed_pipe_ends_a_command_quietly(before, tmp_path):
    prints = """
    for number in range(100_000):
        print(f"line {number}", file=sys.stderr)
"""
    shell = '"$0" -c "$1" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}'
    command = ["bash", "-c", shell, sys.executable, command_of(before, prints)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGPIPE, "line 0\n", "")
    if before:
        assert '"status": "interrupted"' in (tmp_path / "run" / "run.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("before", ["", BEGINS_A_RUN], ids=["", "in a run"])
@pytest.mark.parametrize("error_name", ["ENOENT", "EACCES", "EISDIR"])
def test_a_path_that_cannot_be_used_is_one_line(before, error_name, tmp_path):
    raises = f"""
    raise OSError(errno.{error_name}, os.strerror(errno.{error_name}), "the path")
"""
    command = [sys.executable, "-c", command_of(before, raises)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == (1 if before else 2) and one_line(ended)
    reason = os.strerror(getattr(errno, error_name))
    assert f"error: the path: {reason}; pass another path, or change the permissions" in ended.stderr


PRINTS_WHETHER_STATISTICS_ARE_SENT = """
import os
from lora_grpo.cli import run_command

def main():
    from huggingface_hub.constants import HF_HUB_DISABLE_TELEMETRY
    print(os.environ.get("DO_NOT_TRACK"), HF_HUB_DISABLE_TELEMETRY)

run_command(main)
"""


def test_a_command_has_libraries_send_no_usage_statistics():
    """vLLM reads the variable as huggingface_hub does, which sends TRL's."""
    variables = {name: value for name, value in os.environ.items() if "TELEMETRY" not in name}
    variables.pop("DO_NOT_TRACK", None)
    command = [sys.executable, "-c", PRINTS_WHETHER_STATISTICS_ARE_SENT]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert ended.stdout == "1 True\n"
