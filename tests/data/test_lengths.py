"""Rows that do not fit the context are dropped."""

import pytest

from lora_grpo.config import replace
from lora_grpo.config.schema import ModelConfig, RunConfig, SamplingConfig, TrainConfig
from lora_grpo.data import Data, fit_data
from lora_grpo.errors import UserError
from lora_grpo.prompts.chat import render


class Words:
    """A tokenizer without a chat template: one token per word, whose id is its length."""

    chat_template = None
    pad_token_id = 0

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [len(word) for word in text.split()]}


def context(sequence, completion, prompts_per_step=1):
    """Return a configuration with these limits in tokens."""
    return RunConfig(
        model=ModelConfig(max_sequence_tokens=sequence),
        sampling=SamplingConfig(max_completion_tokens=completion),
        train=TrainConfig(prompts_per_step=prompts_per_step),
    )


def rows_of_words(*lengths):
    """Return rows with rendered prompts of these lengths in words."""
    num_words_of_template = len(render(Words(), [{"role": "user", "content": ""}]).split())
    rows = []
    for length in lengths:
        content = "w " * (length - num_words_of_template)
        rows.append({"prompt": [{"role": "user", "content": content}]})
    return rows


def fitting(rows, config):
    return fit_data(Data(rows, rows_of_words(10), {}), Words(), config).train


def test_a_prompt_fits_where_it_leaves_room_for_the_completion(capsys):
    rows = rows_of_words(10, 11, 12)
    assert fitting(rows, context(21, 10)) == rows[:2]
    assert "dropped 1 of 3 train rows: their prompts have more than 11 tokens" in capsys.readouterr().err
    assert fitting(rows, context(22, 10)) == rows
    assert capsys.readouterr().err == ""


def test_too_few_rows_fit():
    with pytest.raises(UserError, match=r"without 2 of 3 train rows: .* more than 10 tokens .*longest has 15"):
        fitting(rows_of_words(10, 12, 15), context(20, 10, 2))
    rows = rows_of_words(10, 12)
    assert fit_data(Data(rows[:1], rows, {}), Words(), context(20, 10)).eval == rows[:1]
    with pytest.raises(UserError, match="1 of 1 eval rows"):
        fit_data(Data(rows[:1], rows[1:], {}), Words(), context(20, 10))


def test_a_row_fits_if_the_prompt_of_its_teacher_does(tmp_path, capsys):
    """Only for a teacher that reads prompts of its own, and only of the rows that it teaches."""
    path = tmp_path / "my_task.py"
    path.write_text(
        "def load(split): return []\ndef check(completion, row): return True\n"
        "def teacher_prompt(row): return 'w ' * row['words']\n"
    )
    rows = rows_of_words(10, 10, 10)
    for row, words in zip(rows, (4, 5, 20), strict=True):
        row |= {"id": str(words), "task": str(path), "loaded_row": {"words": words}}
    config = replace(context(21, 10), {"data": {"task": str(path)}})
    taught = replace(config, {"teacher": {"name": "self"}})
    assert fitting(rows, config) == rows
    assert fitting(rows, taught) == rows[:2]
    assert "dropped 1 of 3 train rows: the prompts of their teacher have more than 11 tokens" in capsys.readouterr().err
    data = fit_data(Data(rows[:2], rows[2:], {}), Words(), taught)
    assert data.eval == rows[2:]
    num_words_of_template = len(render(Words(), [{"role": "user", "content": ""}]).split())
    assert data.row_lengths.longest_teacher_prompt == num_words_of_template + 5
