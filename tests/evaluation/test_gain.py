"""How much of a gain comes from the format: by hand on a few samples, and against known mixtures of answers."""

import functools
import random
from statistics import fmean

import pytest

from lora_grpo.evaluation.gain import split_gain
from lora_grpo.evaluation.results import episode_result
from lora_grpo.grading import numbers
from lora_grpo.prompts import styles
from lora_grpo.rollouts import Episode

GOLD = 40


@functools.cache
def verdict(text):
    return numbers.check(text, {"id": "p", "answer": str(GOLD), "prompt_style": "xml"})


def graded(texts_by_problem, truncated=False):
    """Grade the completions of each problem with the rules of GSM8K; the answer is always 40."""
    results = []
    for number, texts in enumerate(texts_by_problem):
        for index, text in enumerate(texts):
            episode = Episode({"id": f"p{number}", "task": "gsm8k"}, "", [], None, (), budget=9)
            episode.take([1], text, None, truncated)
            results.append(episode_result("gsm8k", index, episode, verdict(text)))
    return results


def formatted(number):
    return styles.write_completion("I counted.", str(number))


def unformatted(number):
    """The number is the last one of the text, but no rule other than `flexible` reads it."""
    return f"first {number + 7}, then {number}"


RIGHT, WRONG, HIDDEN = formatted(40), formatted(41), unformatted(40)


def parts_of(before, after):
    return {part.name: part.value for part in split_gain(before, after, seed=0)}


def test_the_gain_from_the_format_is_what_the_base_answers_right_in_another_format():
    before, after = graded([[HIDDEN, HIDDEN, RIGHT, RIGHT]]), graded([[RIGHT, RIGHT, RIGHT, HIDDEN]])
    assert parts_of(before, after) == {"gain in pass@1": 0.25, "from the format": 0.25, "other": 0}
    assert parts_of(graded([[HIDDEN, WRONG]]), graded([[RIGHT]])) == {
        "gain in pass@1": 1,
        "from the format": 0.5,
        "other": 0.5,
    }
    assert set(parts_of(before, before).values()) == {0}


def test_a_lucky_number_of_a_wrong_or_truncated_answer_is_not_a_hidden_answer():
    hedged, contradicted = "<answer>40 or 41</answer> 40", f"{WRONG} no, it is 40"
    assert verdict(hedged).rules["flexible"] and verdict(contradicted).rules["flexible"]
    for base in (graded([[hedged]]), graded([[contradicted]]), graded([[HIDDEN]], truncated=True)):
        assert parts_of(base, graded([[RIGHT]]))["from the format"] == 0


# (accuracy, share in the format) of each kind of problem in the base, and of the trained model.
MIXTURES = {
    "format": ([(0.9, 0.2), (0.9, 0.7)], (0.9, 1.0)),
    "accuracy": ([(0.2, 1.0), (0.55, 1.0)], (0.95, 1.0)),
    "both": ([(0.2, 0.6), (0.5, 0.2)], (0.95, 1.0)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_the_intervals_hold_the_truth_of_known_mixtures(name):
    """95% intervals of 3 parts, from 16 seeds with 200 problems x 4 samples: 48 intervals for each mixture."""
    kinds, (accuracy_after, format_after) = MIXTURES[name]
    passed_before = fmean(accuracy * in_format for accuracy, in_format in kinds)
    accuracy_before = fmean(accuracy for accuracy, _ in kinds)
    gain = accuracy_after * format_after - passed_before
    from_accuracy = accuracy_after - accuracy_before
    truth = {"gain in pass@1": gain, "from the format": gain - from_accuracy, "other": from_accuracy}

    def answers(rng, accuracy, in_format):
        """Return four answers to a problem."""
        texts = []
        for _ in range(4):
            write = formatted if rng.random() < in_format else unformatted
            number = GOLD if rng.random() < accuracy else GOLD + 1
            texts.append(write(number))
        return texts

    num_missed = 0
    for seed in range(16):
        rng = random.Random(seed)
        before = graded([answers(rng, *rng.choice(kinds)) for _ in range(200)])
        after = graded([answers(rng, accuracy_after, format_after) for _ in range(200)])
        total, *parts = split_gain(before, after, seed)
        assert sum(part.value for part in parts) == pytest.approx(total.value)
        for part in (total, *parts):
            lower, upper = part.interval
            num_missed += not lower <= truth[part.name] <= upper
    assert num_missed <= 8  # 2.4 expected of 48; those of one seed depend on each other
