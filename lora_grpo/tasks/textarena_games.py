"""Single-player games of TextArena, such as `--task textarena:GuessTheNumber-v0`, from the `tasks` extra.

A row is a seed, which determines the game. The model reads what the game says, without the copies of earlier turns that
TextArena's wrappers add, and answers with a move. The reward is the game's own when the game is over, and at least 0;
many games pay for a part of the way. A game that is not over pays 0. A conversation passes with the full reward, 1.

Source: https://github.com/LeonGuertler/TextArena, version 0.7.4.
"""

import contextlib
import functools
import io
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from lora_grpo.errors import UserError, suggestion
from lora_grpo.grading import Row
from lora_grpo.tasks.task_file import TaskFile, of_module

GAMES = (
    *("2048-v0", "Blackjack-v0", "FifteenPuzzle-v0", "FrozenLake-v0", "GuessTheNumber-v0", "LightsOut-v0"),
    *("Mastermind-v0", "Minesweeper-v0", "Secretary-v0"),
)
"""Each with its variants, such as `FrozenLake-v0-hardcore`.

The other games for one player cannot be used: Hangman, WordLadder, WordSearch and Wordle download words; GuessWho and
TwentyQuestions ask a model on the internet; Klondike and UltimateTexasHoldem are not valid Python 3.11; Countdown,
Cryptarithm, PegJump and TowerOfHanoi are the same for each seed; Crosswords and LogicPuzzle play several moves of an
answer in the order of a set, which differs between processes; Bandit pays more for a worse choice; Slitherlink and
ThreeCardMonte have a text as the reward of a wrong move; RushHour, Set, Sokoban and Sudoku take up to seconds to start.
"""
_SEEDS = {"train": range(1000), "eval": range(1_000_000, 1_000_200)}


class Environment:
    """One game."""

    def reset(self, game: str, seed: int, **row: Any) -> str:
        import textarena

        self.game, self.state = game, random.Random(seed).getstate()
        with self._alone():
            self.env = textarena.make(game)
            self.env.reset(num_players=1, seed=seed)
        self.inner, self.own = self.env, textarena.ObservationType.PLAYER_ACTION
        while isinstance(self.inner, textarena.Wrapper):
            self.inner = self.inner.env
        return self._news()

    def reply(self, text: str) -> str | None:
        with self._alone():
            done, _ = self.env.step(text)
        return None if done else self._news()

    def get_reward(self) -> float:
        rewards, _ = self.env.close()
        return min(1.0, max(0.0, (rewards or {}).get(0, 0.0)))

    def _news(self) -> str:
        """Return what the game has said since the last move."""
        _, messages = self.inner.get_observation()
        return "\n".join(text.strip() for _, text, kind in messages if kind is not self.own)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Give the game a random state of its own, because it uses Python's, and discard what it prints."""
        others = random.getstate()
        random.setstate(self.state)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            self.state = random.getstate()
            random.setstate(others)


@functools.cache
def read(name: str) -> TaskFile:
    """Return the task of a game.

    Raises:
        UserError: TextArena is not installed, or the game is not in `GAMES`.
    """
    game = name.partition(":")[2]
    if not f"{game}-".startswith(tuple(f"{each}-" for each in GAMES)):
        hint = suggestion(game, GAMES, otherwise=f"expected one of {', '.join(GAMES)}")
        raise UserError(f"no single-player game {game!r} that needs nothing else; {hint}")
    try:
        import textarena
    except ImportError as error:
        raise UserError(f"{name} needs TextArena ({error}); run `pip install 'lora-grpo[tasks]'`") from None
    variants = [each for each in textarena.envs.registration.ENV_REGISTRY if each.startswith(GAMES)]
    if game not in variants:
        raise UserError(f"no game {game!r}; {suggestion(game, variants)}")

    def load(split: str) -> list[Row]:
        return [{"id": f"{game}/{split}/{seed}", "game": game, "seed": seed} for seed in _SEEDS[split]]

    module = ModuleType(name)
    first = Environment()
    first.reset(game, 0)
    # An invalid move is not a turn of the game, and each valid one may follow one. Some games have no limit.
    vars(module).update(load=load, Environment=Environment, MAX_TURNS=2 * (first.inner.state.max_turns or 50))
    return of_module(Path(__file__), module)
