"""GSM8K: its rows, from files and the Hub, and the grades of its 8,792 reference answers."""

import datetime
import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from lora_grpo.errors import UserError
from lora_grpo.tasks import get_task

GSM8K = get_task("gsm8k")
SOLUTION = "Half is 48/2 = <<48/2=24>>24.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"
GOOD = {"question": "a?", "answer": "1"}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_a_file_is_loaded_in_order_with_its_other_columns(tmp_path):
    record = {"question": "a?", "answer": "1", "topic": "sums", "id": "old", "prompt": "x", "completion": "y"}
    source = write(tmp_path / "mine.jsonl", record, {"question": "b?", "answer": SOLUTION})
    row = {"id": "mine/0", "question": "a?", "answer": "1", "topic": "sums", "completion": "y", "loaded_row": record}
    assert GSM8K.load("train", source) == [row, {"id": "mine/1", "question": "b?", "answer": SOLUTION}]


@pytest.fixture
def hub(monkeypatch):
    """Replace the `datasets` package. `calls` records the requests to the Hub."""
    fake = SimpleNamespace(calls=[], records=[GOOD])

    def load_dataset(*args, **kwargs):
        fake.calls.append((args, kwargs))
        if isinstance(fake.records, Exception):
            raise fake.records
        return fake.records

    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def test_the_default_source_is_the_hubs_test_split(hub):
    assert GSM8K.load("eval") == [{"id": "gsm8k/test/0", **GOOD}]
    assert hub.calls == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_columns_of_a_data_set_on_the_hub(hub):
    hub.records = [{"problem": "a?", "answer": 1, "seen": datetime.date(2026, 1, 2)}]
    row = {"id": "someone/sums/test/0", "question": "a?", "problem": "a?", "answer": "1", "seen": "2026-01-02"}
    loaded = {**row, "answer": 1}
    assert GSM8K.load("eval", "someone/sums", {"question": "problem"}) == [{**row, "loaded_row": loaded}]
    assert hub.calls == [(("someone/sums", None), {"split": "test"})]
    with pytest.raises(UserError, match=r"^someone/sums \(test\) row 0: 'question' is missing"):
        GSM8K.load("eval", "someone/sums")
    hub.records = []
    with pytest.raises(UserError, match=r"^someone/sums has no rows"):
        GSM8K.load("eval", "someone/sums")


@pytest.mark.parametrize("source", ["missing.jsonl", "a.csv", "./missing", "~/missing/x"])
def test_a_missing_path_is_never_tried_on_the_hub(hub, source):
    with pytest.raises(UserError, match="No such file"):
        GSM8K.load("eval", source)
    assert hub.calls == []


MARKERS = ("#### {}", "<answer>{}</answer>", "\\boxed{{{}}}", "The answer is {}.", "The answer is {}")


def near_misses(text):
    """Return answers that are nearly the number of a text, sorted."""
    number = int(text.replace(",", ""))
    misses = {f"{number + 1}", f"{number}.001", f"{number - 1}.99", f"{number} and {number + 1}", f"{-number}"}
    misses |= {f"{text}0", f"1{text}", text[:-1], text.lstrip("-")[1:], f"{text} #### {number + 1}"}
    if number == 0:
        misses -= {"0", "00"}
    return sorted(misses)


@pytest.mark.parametrize(("file", "count"), [("train.jsonl", 7473), ("test.jsonl", 1319)])
def test_every_reference_answer_passes_and_every_near_miss_fails(real_data, file, count):
    rows = GSM8K.load("eval", str(real_data / "gsm8k" / file))
    assert len(rows) == count
    for row in rows:
        for style in ("xml", "hashes", "think"):
            styled = {**row, "prompt_style": style}
            verdict = GSM8K.check(GSM8K.gold(styled), styled)
            assert all(verdict.rules.values()) and verdict.read_from == "marker", styled

        solution, _, text = row["answer"].rpartition("\n#### ")
        assert GSM8K.check(f"{solution}\nThe answer is {text}.", row).read_from == "statement"
        assert GSM8K.check(f"{solution}\n**Final answer:** ${text}$", row).passed
        assert not GSM8K.check(f"{solution}\nThe answer is {text}", row).passed
        for miss, marker in zip(near_misses(text), itertools.cycle(MARKERS)):
            assert not GSM8K.check(marker.format(miss), row).passed, (row["id"], miss)
