import re
import sys

import pytest

from lora_grpo import console, progress
from lora_grpo.progress import Progress, waiting


@pytest.fixture
def shown(capsys):
    """Return a function that shows each number done and returns the lines on stderr."""

    def show(total, done, title="GRPO"):
        progress = Progress(total, title)
        for number in done:
            progress.show(number, f"note {number}")
        progress.close()
        stdout, stderr = capsys.readouterr()
        assert stdout == ""
        return stderr.splitlines()

    return show


def counts(lines):
    return [int(re.search(r"(\d+)/", line)[1]) for line in lines]


def test_a_long_run_has_about_ten_plain_lines(shown):
    lines = shown(200, range(1, 201))
    assert counts(lines) == [1, *range(20, 201, 20)]
    assert "\r" not in "".join(lines)
    assert "\x1b" not in "".join(lines)


def test_a_line_has_the_title_the_count_the_note_and_the_time_left(shown):
    first, *_, middle, last = shown(4, range(1, 5), "evaluating base")
    assert first == "evaluating base 1/4  note 1"
    assert re.fullmatch(r"evaluating base 3/4  note 3, 0 s left", middle)
    assert last == "evaluating base 4/4  note 4"


def test_a_step_shows_the_reward(capsys):
    Progress(1).step(1, {"reward": 1.234, "reward_std": 0.5})
    assert capsys.readouterr().err == "GRPO 1/1  reward 1.23 ± 0.50\n"


def test_the_last_held_out_reward_stays_beside_it(capsys):
    progress, logs = Progress(2), {"reward": 1.0, "reward_std": 0.5}
    progress.step(1, {**logs, "validation/reward": 0.75})
    progress.step(2, logs)
    assert [line.count("validation 0.75") for line in capsys.readouterr().err.splitlines()] == [1, 1]


def put_on_terminal(monkeypatch):
    """Let stderr be a terminal that can overwrite a line. Not a fixture, because pytest then replaces the stream."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(("variable", "value"), [("JPY_PARENT_PID", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_a_notebook_and_a_simple_terminal_get_plain_lines(shown, monkeypatch, variable, value):
    put_on_terminal(monkeypatch)
    monkeypatch.setenv(variable, value)
    lines = shown(3, [1, 2, 3])
    if value == "xterm":
        assert "\x1b" in "".join(lines)
    else:
        assert "\x1b" not in "".join(lines) and counts(lines) == [1, 2, 3]


def test_a_terminal_has_a_bar(shown, monkeypatch):
    put_on_terminal(monkeypatch)
    frames = "\r".join(shown(4, [0, 1, 4])).split("\r")
    bars = [re.match(r"\[(#*)(\.*)\] GRPO", frame).groups() for frame in frames if frame.startswith("[")]
    assert [len(filled) for filled, _ in bars] == [0, 5, 20]
    assert {len(filled) + len(rest) for filled, rest in bars} == {20}


def test_a_note_replaces_the_line_of_a_terminal(monkeypatch, capsys):
    put_on_terminal(monkeypatch)
    progress = Progress(4)
    progress.show(1, "a long note of a step")
    console.note("short")
    progress.show(2, "a long note of a step")
    progress.close()
    progress.close()
    frames = capsys.readouterr().err.split("\r")
    assert frames[0].endswith("\x1b[K") and frames[1].startswith("\x1b[Kshort\n[") and frames[2:] == ["\n"]


def test_what_is_done_soon_is_not_told(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS_WITHOUT_NOTE", 600)
    with waiting("vLLM starts"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_takes_long_is_told(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(console, "overwrites_lines", lambda: is_terminal)
    monkeypatch.setattr(progress, "_SECONDS_WITHOUT_NOTE", 0)
    with waiting("vLLM starts"):
        err = ""
        while "vLLM" not in err:
            err += capsys.readouterr().err
    err += capsys.readouterr().err
    assert err.count("vLLM starts") >= 1 and err.endswith("\n")
    assert ("\x1b" in err) is is_terminal
    if not is_terminal:
        assert err.count("\n") == 1


def test_a_listener_of_ones_own_gets_one_note_also_on_a_terminal(monkeypatch):
    monkeypatch.setattr(console, "overwrites_lines", lambda: True)
    monkeypatch.setattr(progress, "_SECONDS_WITHOUT_NOTE", 0)
    messages = []
    with console.listening(messages.append), waiting("vLLM starts"):
        while not messages:
            pass
    assert [(message.kind, message.text) for message in messages] == [("note", "vLLM starts; this takes a while")]
