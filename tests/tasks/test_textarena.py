"""Games of TextArena as tasks."""

import random
import sys

import pytest

from lora_grpo.config import RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.errors import UserError
from lora_grpo.tasks import get_task
from lora_grpo.tasks.environment import Session
from lora_grpo.tasks.textarena_games import GAMES, make_task

GUESS = "textarena:GuessTheNumber-v0"
MOVES = [f"[{move}]" for move in (10, 5, 15, 2, "up", "1 2", "3 4", "1 2 3 4", "1 2 3 4 5 6", "Stand", "accept")]


@pytest.fixture
def textarena():
    import textarena

    return textarena


@pytest.fixture(params=GAMES)
def games(request, textarena):
    """The ids of a game and its variants."""
    names = textarena.envs.registration.ENV_REGISTRY
    return [each for each in names if each.startswith(request.param) and not each.endswith(("-raw", "-train"))]


def session(game, seed):
    return Session(get_task(f"textarena:{game}").environment, {"id": "a", "game": game, "seed": seed})


def say(one, text):
    messages = one.answer({"role": "assistant", "content": text})
    return messages[0]["content"] if messages else None


def transcript(one, moves):
    """Return what the game says to each move until it is over, and its reward."""
    said = [one.opening]
    for move in moves:
        if said[-1] is not None:
            said.append(say(one, move))
    return said, one.verdict("reply").score


@pytest.mark.parametrize("game", ["Wordle-v0", "Klondike-v0", "Chess-v0", "", "GuesTheNumber-v0", "GuessTheNumber-v01"])
def test_other_games_are_refused_before_textarena_is_imported(game, monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UserError, match=r"did you mean|GuessTheNumber-v0, "):
        get_task(f"textarena:{game}")


def test_an_unknown_variant_is_refused(textarena):
    with pytest.raises(UserError, match="did you mean 'GuessTheNumber-v0-hardcore'"):
        get_task("textarena:GuessTheNumber-v0-hard")
    assert get_task("textarena:GuessTheNumber-v0-hardcore").constants.MAX_TURNS == 20


def test_the_package_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    make_task.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'lora-grpo\[tasks\]'"):
        get_task(GUESS)


def test_a_row_is_a_seed(textarena):
    data = load_data(replace(RunConfig(), {"data": {"task": GUESS}}))
    assert (len(data.train), len(data.eval)) == (1000, 200)
    assert not {row["seed"] for row in data.train} & {row["seed"] for row in data.eval}
    [asked] = data.train[0]["prompt"]
    assert "between 1 and 20" in asked["content"] and data.train[0]["question"] == asked["content"]


def test_guess_the_number(textarena):
    """A game of 0.7.4: 1 for the number; a second move in a row that is none ends it."""
    numbers = set()
    for seed in range(8):
        one, low, high = session("GuessTheNumber-v0", seed), 1, 20
        while (said := say(one, f"[{(low + high) // 2}]")) is not None:
            assert said in ("The target number is higher.", "The target number is lower.")
            low, high = ((low + high) // 2 + 1, high) if "higher" in said else (low, (low + high) // 2 - 1)
        verdict = one.verdict("reply")
        assert verdict.passed and verdict.score == 1
        numbers.add((low + high) // 2)
    assert len(numbers) > 3
    lost = session("GuessTheNumber-v0", 0)
    assert lost.verdict("budget").score == 0
    assert "not respond" in say(lost, "one") and say(lost, "two") is None
    assert lost.verdict("reply").score == 0


def test_a_seed_is_one_game(games):
    """The same moves give the same game beside others, whatever Python's generator has drawn, and leave it alone."""
    for game in games:
        for move in MOVES:
            moves = [move, "left", "Hit", move, "right", "continue", "2 1"]
            expected = [transcript(session(game, seed), moves) for seed in range(3)]
            random.seed(99)
            before = random.getstate()
            together = [session(game, seed) for seed in range(3)]
            said = [[one.opening] for one in together]
            for text in moves:
                for one, texts in zip(together, said, strict=True):
                    if texts[-1] is not None:
                        texts.append(say(one, text))
            assert random.getstate() == before
            assert list(zip(said, [one.verdict("reply").score for one in together], strict=True)) == expected, game


def test_seeds_make_different_games(games):
    for game in games:
        found = {repr([transcript(session(game, seed), [move] * 4) for move in MOVES]) for seed in range(12)}
        assert len(found) > 4, game


def test_doing_nothing_is_worth_next_to_nothing(games):
    """2048 pays for its first tile."""
    for game in games:
        for seed in range(6):
            one = session(game, seed)
            while say(one, "") is not None:
                pass
            assert one.verdict("reply").score < (0.1 if game.startswith("2048") else 0.001), game


def test_no_text_breaks_a_game(games):
    words = ["[", "]", "1", "2", "3", "7", " ", ",", "up", "Hit", "accept", "A+", "->", "h", "é\u2042", "-1", "x" * 99]
    for game in games:
        generator, turns = random.Random(game), get_task(f"textarena:{game}").constants.MAX_TURNS
        for seed in range(4):
            one = session(game, seed)
            for _ in range(turns):
                if say(one, "".join(generator.choices(words, k=generator.randrange(8)))) is None:
                    break
            assert 0 <= one.verdict("limit").score <= 1, game
