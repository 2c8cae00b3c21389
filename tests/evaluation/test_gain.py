"""What a gain is made of: by hand on a few samples, and against the exact truth of known mixtures of answers."""

import functools
import itertools
import random

import pytest
from helpers.graded_samples import samples
from helpers.report_runs import write_run

from lora_grpo.errors import UserError
from lora_grpo.evaluation.cli import evaluate_and_report
from lora_grpo.evaluation.gain import explain
from lora_grpo.evaluation.options import EvaluateOptions
from lora_grpo.evaluation.report import write_report
from lora_grpo.evaluation.results import sampled
from lora_grpo.sampling import SampledTokens
from lora_grpo.tasks import chat, gsm8k

GOLD = 40


@functools.cache
def verdict(text):
    return gsm8k.check(text, {"id": "p", "answer": str(GOLD), "prompt_style": "xml"})


def graded(texts_by_problem, truncated=False):
    """Grade the completions of each problem with the rules of GSM8K; the answer is always 40."""
    return [
        sampled("gsm8k", {"id": f"p{place}"}, draw, SampledTokens([1], [0.0], truncated), verdict(text))
        | {"completion": text}
        for place, texts in enumerate(texts_by_problem)
        for draw, text in enumerate(texts)
    ]


def formatted(number):
    return chat.write_completion("I counted.", str(number))


def unformatted(number):
    """The number is the last one of the text, but no rule other than `flexible` reads it."""
    return f"first {number + 7}, then {number}"


RIGHT, WRONG, HIDDEN = formatted(40), formatted(41), unformatted(40)


def parts_of(gain):
    found = {part.name: part.value for part in (gain.total, *gain.parts)}
    return {**found, "majority": gain.majority and gain.majority.value}


def test_format_is_what_the_base_answers_right_in_another_format():
    gain = explain(graded([[HIDDEN, HIDDEN, RIGHT, RIGHT]]), graded([[RIGHT, RIGHT, RIGHT, HIDDEN]]), seed=0)
    assert parts_of(gain) == {"gain in pass@1": 0.25, "format": 0.25, "sharpening": 0, "rest": 0, "majority": 0}


def test_sharpening_is_the_gain_on_what_other_samples_of_the_base_have():
    """Of 3 problems, the base solves one in 3 of 4 samples, one in 1 of 4, one never; then all are solved."""
    wrongs = [formatted(number) for number in (41, 41, 42, 43)]
    base = graded([[RIGHT, RIGHT, RIGHT, WRONG], [RIGHT, *wrongs[:3]], wrongs])
    gain = explain(base, graded([[RIGHT]] * 3), seed=0)
    # The wrong sample of the first problem has 3 right others. Each wrong one of the second has a right one, which wins
    # the vote of 3 only in a tie: in 1 of 3 against 41 and 42 (twice), and not against 41 and 41.
    found = parts_of(gain)
    assert found["gain in pass@1"] == pytest.approx(2 / 3)
    assert found["format"] == 0
    assert found["sharpening"] == pytest.approx((1 / 4 + 3 / 4) / 3)
    assert found["majority"] == pytest.approx((1 / 4 + 2 / 4 / 3) / 3)
    assert found["rest"] == pytest.approx(1 / 3)
    # With 1 other sample: each wrong one of the second problem sees the right one in 1 of 3.
    assert [(point.k, round(point.value, 6)) for point in gain.rest_by_k] == [
        (1, round((3 / 4 * 2 / 3 + 1) / 3, 6)),
        (2, round((3 / 4 * 1 / 3 + 1) / 3, 6)),
        (3, round(1 / 3, 6)),
    ]


def test_a_lucky_number_of_a_wrong_or_truncated_answer_is_not_a_hidden_answer():
    hedged, contradicted = "<answer>40 or 41</answer> 40", f"{WRONG} no, it is 40"
    assert verdict(hedged).rules["flexible"] and verdict(contradicted).rules["flexible"]
    for base in (graded([[hedged]]), graded([[contradicted]]), graded([[HIDDEN]], truncated=True)):
        assert parts_of(explain(base, graded([[RIGHT]]), seed=0))["format"] == 0


def test_every_sample_has_one_reason():
    base = [*graded([[RIGHT, HIDDEN, WRONG, "no idea"]]), *graded([["first 40, then"]], truncated=True)]
    gain = explain(base, graded([[RIGHT, RIGHT, "<answer>40 or 41</answer>"]]), seed=0)
    headings, rows = gain.reasons_table("base", "trained")
    assert headings == ["% of samples (number)", "base", "trained"]
    assert rows == [
        ("right", "20.0 (1)", "66.7 (2)"),
        ("right, but not in the format", "20.0 (1)", "0.0 (0)"),
        ("no readable answer", "20.0 (1)", "0.0 (0)"),
        ("truncated", "20.0 (1)", "0.0 (0)"),
        ("conflicting answers", "0.0 (0)", "33.3 (1)"),
        ("wrong answer", "20.0 (1)", "0.0 (0)"),
    ]


def test_without_rules_or_other_samples_less_is_separated_and_the_notes_say_so():
    programs = samples("----", ["+-", "--", "--", "--"]), samples("----", ["++", "++", "--", "--"])
    gain = explain(*programs, seed=0)
    assert parts_of(gain) == {"gain in pass@1": 0.375, "sharpening": 0.125, "rest": 0.25, "majority": None}
    assert any("Format is not separated" in note for note in gain.notes)
    gain = explain(samples("+--"), samples("++-"), seed=0)  # greedy only
    assert parts_of(gain) == {"gain in pass@1": pytest.approx(1 / 3), "rest": pytest.approx(1 / 3), "majority": None}
    assert any("Sharpening is not separated" in note for note in gain.notes)


def test_a_model_that_did_not_change_has_gained_nothing():
    same = graded([[RIGHT, WRONG, WRONG, HIDDEN], [WRONG, RIGHT, WRONG, WRONG]])
    gain = explain(same, same, seed=0)
    assert set(parts_of(gain).values()) == {0} and {point.value for point in gain.rest_by_k} == {0}


def test_problems_with_more_samples_than_others_count_with_all_of_them():
    base, trained = graded([[RIGHT, WRONG], [WRONG, WRONG, WRONG, RIGHT]]), graded([[RIGHT], [RIGHT]])
    found = parts_of(explain(base, trained, seed=0))
    # With 1 other sample: the wrong one of the first problem sees the right one; those of the second do in 1 of 3.
    assert found == {"gain in pass@1": 0.625, "format": 0, "sharpening": 0.375, "rest": 0.25, "majority": 0.25}


# Mixtures of answers: (accuracy, share in the format) of each kind of problem in the base, and of the trained model.
# A careless answer is right in one of 6, else one of 5 slips. Format and accuracy are independent.
MIXTURES = {
    "only format": ([(0.9, 0.2), (0.9, 0.7)], (0.9, 1.0)),
    "only carelessness": ([(0.2, 1.0), (0.55, 1.0)], (0.95, 1.0)),
    "both": ([(0.2, 0.6), (0.5, 0.2)], (0.95, 1.0)),
    "nothing": ([(0.3, 0.8), (0.8, 0.6)], None),
}
SLIPS = [GOLD + step for step in (-10, -1, 1, 2, 10)]


def answer(rng, accuracy, in_format):
    number = rng.choice([GOLD, *SLIPS]) if rng.random() > accuracy else GOLD
    return (formatted if rng.random() < in_format else unformatted)(number)


def truth(kinds, trained, k):
    """The exact parts of the gain in expectation, over kinds of problem that are equally frequent."""
    total = dict.fromkeys(("format", "sharpening", "rest", "majority"), 0.0)
    for accuracy, in_format in kinds:
        after, format_after = trained or (accuracy, in_format)
        right, right_after = (share + (1 - share) / 6 for share in (accuracy, after))
        shares = [right, *[(1 - right) / len(SLIPS)] * len(SLIPS)]
        won = 0.0
        for votes in itertools.product(range(len(shares)), repeat=k):
            counts = [votes.count(vote) for vote in range(len(shares))]
            if counts[0] == max(counts):
                chance = 1.0
                for vote in votes:
                    chance *= shares[vote]
                won += chance / counts.count(counts[0])
        none = (1 - right) ** k
        total["format"] += right * (1 - in_format) - right_after * (1 - format_after)
        total["sharpening"] += (1 - none) * (right_after - right)
        total["rest"] += none * (right_after - right)
        total["majority"] += won * (right_after - right)
    return {name: value / len(kinds) for name, value in total.items()}


@pytest.mark.parametrize("same_seeds", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_intervals_hold_the_truth_of_known_mixtures(name, same_seeds):
    """95% intervals of 4 parts, from 16 seeds with 200 problems x 4 samples: 64 intervals for each mixture.

    With the same seeds, as in evaluations, sample j of one model is as lucky as sample j of the other.
    """
    kinds, trained = MIXTURES[name]
    expected = truth(kinds, trained, 3)
    missed = []
    for seed in range(16):
        rng = random.Random(seed)
        problems = [rng.choice(kinds) for _ in range(200)]
        draws = [[rng.random() for _ in range(4)] for _ in problems]

        def sample_all(of_problem, problems=problems, draws=draws, rng=rng):
            sources = [[random.Random(draw) if same_seeds else rng for draw in each] for each in draws]
            return graded(
                [
                    [answer(source, *of_problem(kind)) for source in each]
                    for kind, each in zip(problems, sources, strict=True)
                ]
            )

        before, after = sample_all(lambda kind: kind), sample_all(lambda kind: trained or kind)
        gain = explain(before, after, seed)
        assert sum(part.value for part in gain.parts) == pytest.approx(gain.total.value)
        intervals = {part.name: part.interval for part in gain.parts} | {"majority": gain.majority.interval}
        missed += [part for part, (low, high) in intervals.items() if not low <= expected[part] <= high]
    assert len(missed) <= 9  # 3.2 expected of 64; those of one seed depend on each other


# The command


def test_explain_reads_the_report_of_a_run_and_loads_no_model(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    report = evaluate_and_report(EvaluateOptions(str(run), explain=True))
    printed = capsys.readouterr().out
    assert report.gain.total.value == pytest.approx(0.25)
    for text in ("gain in pass@1", "+25.0", "sharpening", "truncated", "upper bound", "--num-samples 8"):
        assert text in printed, text
    from_file = report.model_copy(update={"protocol": report.protocol.model_copy(update={"sampling": None})})
    assert "--num-samples" not in from_file.markdown() and "upper bound" in from_file.markdown()
    (run / "evaluation/trained.samples.jsonl").unlink()
    assert evaluate_and_report(EvaluateOptions(str(run), explain=True)) == report
    write_report(run / "evaluation", report.model_copy(update={"gain": None}))
    with pytest.raises(UserError, match="older version; pass --num-samples 4"):
        evaluate_and_report(EvaluateOptions(str(run), explain=True))
    (run / "evaluation/report.json").unlink()
    with pytest.raises(UserError, match=r"evaluation has no report\.json; run the recipe with --resume"):
        evaluate_and_report(EvaluateOptions(str(run), explain=True))
