"""Games of TextArena as tasks."""

import random
import sys

import pytest

from lora_grpo.config import RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.errors import UserError
from lora_grpo.tasks import Session, get_task
from lora_grpo.tasks.textarena_games import GAMES, make_task

GUESS = "textarena:GuessTheNumber-v0"
MOVES = [
    "[10]",
    "[5]",
    "[15]",
    "[2]",
    "[up]",
    "[1 2]",
    "[3 4]",
    "[1 2 3 4]",
    "[1 2 3 4 5 6]",
    "[Stand]",
    "[accept]",
]
"""First moves in one game or another."""


@pytest.fixture
def textarena():
    import textarena

    return textarena


@pytest.fixture(params=GAMES)
def games(request, textarena):
    """The names of a game and its variants."""
    names = []
    for name in textarena.envs.registration.ENV_REGISTRY:
        if name.startswith(request.param) and not name.endswith(("-raw", "-train")):
            names.append(name)
    return names


def session(game, seed):
    return Session(get_task(f"textarena:{game}").environment, {"id": "a", "game": game, "seed": seed})


def say(conversation, text):
    """Return what the game replies to a text, None if it is over."""
    messages = conversation.answer({"role": "assistant", "content": text})
    return messages[0]["content"] if messages else None


def transcript(conversation, moves):
    """Return what the game says to each move until it is over, and its reward."""
    replies = [conversation.opening]
    for move in moves:
        if replies[-1] is not None:
            replies.append(say(conversation, move))
    return replies, conversation.verdict("reply").score


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
    with pytest.raises(UserError, match=r"pip install .*'lora-grpo\[tasks\]'"):
        get_task(GUESS)


def test_a_row_is_a_seed(textarena):
    data = load_data(replace(RunConfig(), {"data": {"task": GUESS}}))
    assert (len(data.train), len(data.eval)) == (1000, 200)
    assert not {row["seed"] for row in data.train} & {row["seed"] for row in data.eval}
    [asked] = data.train[0]["prompt"]
    assert "between 1 and 20" in asked["content"] and data.train[0]["question"] == asked["content"]


def win_by_halving(conversation):
    """Find the number in the middle of the interval that is left, and return it."""
    low, high = 1, 20
    while True:
        guess = (low + high) // 2
        reply = say(conversation, f"[{guess}]")
        if reply is None:
            return guess
        if reply == "The target number is higher.":
            low = guess + 1
        else:
            assert reply == "The target number is lower."
            high = guess - 1


def test_the_number_is_worth_1(textarena):
    """A game of textarena 0.7.4."""
    numbers = set()
    for seed in range(8):
        conversation = session("GuessTheNumber-v0", seed)
        numbers.add(win_by_halving(conversation))
        verdict = conversation.verdict("reply")
        assert verdict.passed and verdict.score == 1
    assert len(numbers) > 3


def test_a_second_move_in_a_row_that_is_none_loses_the_game(textarena):
    conversation = session("GuessTheNumber-v0", 0)
    assert conversation.verdict("budget").score == 0
    assert "not respond" in say(conversation, "one")
    assert say(conversation, "two") is None
    assert conversation.verdict("reply").score == 0


def test_a_seed_is_one_game(games):
    """The same moves give the same game beside others, whatever Python's generator has drawn, and leave it alone."""
    for game in games:
        for first_move in MOVES:
            moves = [first_move, "left", "Hit", first_move, "right", "continue", "2 1"]
            expected = [transcript(session(game, seed), moves) for seed in range(3)]
            random.seed(99)
            state_before = random.getstate()
            assert side_by_side([session(game, seed) for seed in range(3)], moves) == expected, game
            assert random.getstate() == state_before


def side_by_side(conversations, moves):
    """Return the transcripts of games that take turns."""
    replies = [[conversation.opening] for conversation in conversations]
    for move in moves:
        for conversation, replies_of_game in zip(conversations, replies, strict=True):
            if replies_of_game[-1] is not None:
                replies_of_game.append(say(conversation, move))
    scores = [conversation.verdict("reply").score for conversation in conversations]
    return list(zip(replies, scores, strict=True))


def test_seeds_make_different_games(games):
    for game in games:
        transcripts_of_seeds = set()
        for seed in range(12):
            transcripts = [transcript(session(game, seed), [move] * 4) for move in MOVES]
            transcripts_of_seeds.add(repr(transcripts))
        assert len(transcripts_of_seeds) > 4, game


def test_doing_nothing_is_worth_next_to_nothing(games):
    for game in games:
        highest = 0.1 if game.startswith("2048") else 0.001  # 2048 pays for its first tile
        for seed in range(6):
            conversation = session(game, seed)
            while say(conversation, "") is not None:
                pass
            assert conversation.verdict("reply").score < highest, game


def test_no_text_breaks_a_game(games):
    words = ["[", "]", "1", "2", "3", "7", " ", ",", "up", "Hit", "accept", "A+", "->", "h", "é\u2042", "-1", "x" * 99]
    for game in games:
        generator = random.Random(game)
        max_turns = get_task(f"textarena:{game}").constants.MAX_TURNS
        for seed in range(4):
            conversation = session(game, seed)
            for _ in range(max_turns):
                text = "".join(generator.choices(words, k=generator.randrange(8)))
                if say(conversation, text) is None:
                    break
            assert 0 <= conversation.verdict("limit").score <= 1, game
