"""Whose samples a folder holds, and when it answers at once."""

import json

import pytest

from lora_grpo.errors import UserError
from lora_grpo.evaluation.evaluation_folder import answer, begin, differences, facts, finish, settle, stamp

ASKED = {"options": {"k": (1, 4)}, "files": {}}
ONE, OTHER = {"temperature": 1.0, "seed": 0}, {"temperature": 0.5, "seed": 0}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "evaluation"
    made.mkdir()
    return made


def fill(folder, identity, text, noted=None):
    begin(folder, "samples.jsonl", identity, noted or {"engine": "a"})
    with (folder / "samples.jsonl").open("a") as file:
        file.write(text)


def test_a_finished_evaluation_answers_what_was_asked_and_nothing_else(folder):
    fill(folder, ONE, "1\n")
    assert answer(folder, ASKED) is None
    finish(folder, ASKED, {"pass@1": 0.5}, "page")
    assert answer(folder, ASKED) == {"pass@1": 0.5}
    assert answer(folder, {**ASKED, "files": {"a": [1, 2]}}) is None
    (folder / "samples.jsonl").unlink()
    assert answer(folder, ASKED) is None


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_report_that_cannot_be_read_is_no_answer(text, folder):
    fill(folder, ONE, "1\n")
    finish(folder, ASKED, {"pass@1": 0.5}, "page")
    (folder / "report.json").write_text(text)
    assert answer(folder, ASKED) is None


def test_what_has_begun_anew_is_no_answer(folder):
    fill(folder, ONE, "1\n")
    finish(folder, ASKED, {"pass@1": 0.5}, "page")
    fill(folder, OTHER, "2\n")
    assert answer(folder, ASKED) is None


def test_the_same_is_gone_on_with_and_another_moves_aside(folder, capsys):
    fill(folder, ONE, "1\n")
    fill(folder, ONE, "2\n")
    assert (folder / "samples.jsonl").read_text() == "1\n2\n"
    finish(folder, ASKED, {"pass@1": 0.5}, "page")
    assert capsys.readouterr().err == ""
    fill(folder, OTHER, "3\n")
    assert "temperature was 1.0 and is 0.5: samples.jsonl starts anew" in capsys.readouterr().err
    assert (folder / "samples.jsonl").read_text() == "3\n"
    (aside,) = (folder / "previous").iterdir()
    assert {path.name for path in aside.iterdir()} == {"samples.jsonl", "report.json", "report.md", "evaluation.json"}
    assert facts(aside, "samples.jsonl", ONE) == {"engine": "a"}
    assert not (folder / "report.json").exists()
    # Asked for again, it comes back where it was, and the other one moves aside.
    fill(folder, ONE, "")
    assert (folder / "samples.jsonl").read_text() == "1\n2\n"
    assert len(list((folder / "previous").iterdir())) == 1
    fill(folder, OTHER, "4\n")
    assert (folder / "samples.jsonl").read_text() == "3\n4\n"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(40))
def test_a_kill_between_any_two_steps_loses_and_mixes_nothing(moment, folder, monkeypatch):
    """Each of begin's and finish's steps is the last one in turn; then either evaluation is asked again."""
    import pathlib
    import shutil

    from lora_grpo.files import atomic

    fill(folder, ONE, "1\n")
    finish(folder, {"asked": 1}, {"of": 1}, "page")
    fill(folder, OTHER, "2\n")
    finish(folder, {"asked": 2}, {"of": 2}, "page")
    count = [0]

    def deadly(function):
        def step(*arguments, **options):
            count[0] += 1
            if count[0] == moment:
                raise Killed
            return function(*arguments, **options)

        return step

    with monkeypatch.context() as patch:
        for name in ("replace", "touch", "mkdir"):
            patch.setattr(pathlib.Path, name, deadly(getattr(pathlib.Path, name)))
        patch.setattr(atomic, "write_json", deadly(atomic.write_json))
        patch.setattr(atomic, "write_text", deadly(atomic.write_text))
        patch.setattr(shutil, "rmtree", deadly(shutil.rmtree))
        try:
            begin(folder, "samples.jsonl", ONE, {"engine": "a"})
            finish(folder, {"asked": 3}, {"of": 3}, "page")
        except Killed:
            pass
        else:
            assert moment == 0 or moment > count[0] >= 8
    for asked, of in ((1, 3), (2, 3), (3, 3)):
        assert answer(folder, {"asked": asked}) in (None, {"of": of if asked == 3 else asked})
    if answer(folder, {"asked": 2}):  # nothing had happened yet
        assert facts(folder, "samples.jsonl", OTHER)
    settle(folder)
    for identity, text in ((OTHER, "2\n"), (ONE, "1\n"), (OTHER, "2\n")):
        begin(folder, "samples.jsonl", identity, {"engine": "a"})
        assert (folder / "samples.jsonl").read_text() == text


def test_two_files_of_a_folder_are_kept_apart(folder):
    fill(folder, ONE, "1\n")
    begin(folder, "compared.samples.jsonl", ONE, {"engine": "a"})
    (folder / "compared.samples.jsonl").write_text("base\n")
    begin(folder, "compared.samples.jsonl", OTHER, {"engine": "a"})
    assert (folder / "samples.jsonl").read_text() == "1\n"
    assert facts(folder, "samples.jsonl", ONE) == {"engine": "a"}
    assert facts(folder, "compared.samples.jsonl", ONE) is None
    assert facts(folder, "compared.samples.jsonl", OTHER) == {"engine": "a"}


def test_another_version_of_an_engine_goes_on_and_says_so(folder, capsys):
    assert begin(folder, "samples.jsonl", ONE, {"engine": "a 1.0"}) == {"engine": "a 1.0"}
    assert begin(folder, "samples.jsonl", ONE, {"engine": "a 1.1"}) == {"engine": "a 1.0"}
    assert 'since samples.jsonl was begun, engine was "a 1.0" and is "a 1.1"' in capsys.readouterr().err


def test_other_files_are_left_alone(folder):
    (folder / "notes.txt").write_text("mine")
    for call in (
        lambda: answer(folder, ASKED),
        lambda: facts(folder, "samples.jsonl", ONE),
        lambda: begin(folder, "samples.jsonl", ONE, {}),
    ):
        with pytest.raises(UserError, match="holds other files and no evaluation of this kit"):
            call()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("text", ["", "[]", '{"lora_grpo_evaluation": 2, "asked": null, "parts": {}}', '{"parts": 1}'])
def test_a_state_that_is_none_is_refused(text, folder):
    (folder / "evaluation.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read; choose another --output-dir"):
        answer(folder, ASKED)


def test_differences_are_named_in_full_where_they_are_short():
    assert differences({"a": 1, "b": "x" * 64, "c": 3}, {"a": 2, "b": "y" * 64, "c": 3}) == [
        "a was 1 and is 2",
        'b was "xxxxxxxxxxxxxxxx... and is "yyyyyyyyyyyyyyyy...',
    ]


def test_a_stamp_changes_with_size_and_time(tmp_path):
    file = tmp_path / "file"
    file.write_text("1")
    before = stamp([file, tmp_path / "absent"])
    assert list(before) == [str(file)] and stamp([file]) == before
    file.write_text("12")
    assert stamp([file]) != before
    assert json.loads(json.dumps(before)) == before
