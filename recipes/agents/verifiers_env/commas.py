"""An environment in the form of the Environments Hub: a module with `load_environment`."""

import itertools
import random

import verifiers as vf

WORDS = (
    "amber bridge button candle castle cedar clock falcon forest garden hammer island "
    "kite lamp lemon market orange pencil rabbit river silver stone tiger window"
)
EXAMPLE = [  # of words that no row has
    {"role": "user", "content": "Put commas between the words: apple house train"},
    {"role": "assistant", "content": "apple, house, train"},
]


def load_environment(num_train_rows=600, num_eval_rows=200):
    """Return an environment that asks for commas between three words."""
    from datasets import Dataset

    rows = make_rows(num_train_rows + num_eval_rows)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[:num_train_rows]),
        eval_dataset=Dataset.from_list(rows[num_train_rows:]),
        few_shot=EXAMPLE,
        rubric=vf.Rubric(funcs=[right_words]),
    )


def make_rows(num_rows):
    """Return rows with different questions, and their answers."""
    generator = random.Random(0)
    answers = {}
    while len(answers) < num_rows:
        words = generator.sample(WORDS.split(), 3)
        answers[f"Put commas between the words: {' '.join(words)}"] = ", ".join(words)
    return [{"question": question, "answer": answer} for question, answer in answers.items()]


def right_words(completion, answer):
    """Return the fraction of words that are right, at their place, and between commas."""
    words = completion[-1]["content"].split(", ")
    matches = [word == right_word for word, right_word in itertools.zip_longest(words, answer.split(", "))]
    return sum(matches) / len(matches)
