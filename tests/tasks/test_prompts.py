import pytest

from lora_grpo.errors import UserError
from lora_grpo.tasks import sources
from lora_grpo.tasks.registry import get_task

prompts = get_task("prompts")


@pytest.fixture
def source(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def load(path, limit=None, seed=0):
    return [row["question"] for row in sources.sample(prompts.load("train", path), limit, seed)]


def test_rows_have_no_answer(source):
    path = source("mine.jsonl", '{"prompt": "Hi\\nthere", "other": 3}\n\n{"prompt": "2"}\n')
    assert prompts.load("train", path) == [
        {"id": "prompts/0", "question": "Hi\nthere", "answer": ""},
        {"id": "prompts/1", "question": "2", "answer": ""},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\nnot json\n', "mine.jsonl:2: not JSON; expected one object"),
        ('{"prompt": "a"}\n\n{"promt": "b"}\n', "mine.jsonl:3: 'prompt' is missing"),
        ('{"prompt": 5}\n', "mine.jsonl:1: 'prompt' is 5"),
        ('["a"]\n', "mine.jsonl:1: got list"),
        ("\n \n", "no rows"),
    ],
)
def test_an_error_names_the_file_and_line(source, content, message):
    with pytest.raises(UserError) as error:
        load(source("mine.jsonl", content))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_limit_samples_by_seed_and_keeps_order(source):
    path = source("mine.jsonl", "".join(f'{{"prompt": "{number:02d}"}}\n' for number in range(20)))
    few = load(path, 5, seed=1)
    assert len(set(few)) == 5
    assert few == sorted(few) == load(path, 5, seed=1)
    assert few != load(path, 5, seed=2)
    assert load(path, 20) == load(path, 50) == load(path)


def test_without_a_source_the_starters_problems_are_load():
    rows = sources.sample(prompts.load("eval"), 3, 0)
    assert rows == sources.sample(get_task("starter").load("eval"), 3, 0)


def test_only_an_empty_completion_fails():
    row = {"id": "mine/1", "question": "Hi", "answer": ""}
    assert prompts.check("Hello", row).passed
    empty = prompts.check(" \n", row)
    assert (empty.passed, empty.reason) == (False, "empty")
    assert prompts.check(prompts.gold(row), row).passed
