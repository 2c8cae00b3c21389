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

from lora_grpo.commands import install_command
from lora_grpo.errors import UserError, suggestion
from lora_grpo.grading import Row
from lora_grpo.tasks.task_file import TaskFile, task_of_module

GAMES = (
    "2048-v0",
    "Blackjack-v0",
    "FifteenPuzzle-v0",
    "FrozenLake-v0",
    "GuessTheNumber-v0",
    "LightsOut-v0",
    "Mastermind-v0",
    "Minesweeper-v0",
    "Secretary-v0",
)
"""Each with its variants, such as `FrozenLake-v0-hardcore`.

The other games for one player cannot be used: Hangman, WordLadder, WordSearch and Wordle download words; GuessWho and
TwentyQuestions ask a model on the internet; Klondike and UltimateTexasHoldem are not valid Python 3.11; Countdown,
Cryptarithm, PegJump and TowerOfHanoi are the same for each seed; Crosswords and LogicPuzzle play several moves of an
answer in the order of a set, which differs between processes; Bandit pays more for a worse choice; Slitherlink and
ThreeCardMonte have a text as the reward of a wrong move; RushHour, Set, Sokoban and Sudoku take up to seconds to start.
"""
_SEEDS = {"train": range(1000), "eval": range(1_000_000, 1_000_200)}
_TURNS_WITHOUT_LIMIT = 50
"""Turns of a game that has no limit of its own."""


class Environment:
    """One game."""

    def reset(self, game: str, seed: int, **row: Any) -> str:
        import textarena

        self.random_state = random.Random(seed).getstate()
        with self._separate_randomness():
            self.env = textarena.make(game)
            self.env.reset(num_players=1, seed=seed)
        self.unwrapped = self.env
        while isinstance(self.unwrapped, textarena.Wrapper):
            self.unwrapped = self.unwrapped.env
        self.move_kind = textarena.ObservationType.PLAYER_ACTION
        return self._new_messages()

    def reply(self, text: str) -> str | None:
        with self._separate_randomness():
            is_over, _ = self.env.step(text)
        return None if is_over else self._new_messages()

    def get_reward(self) -> float:
        rewards, _ = self.env.close()
        reward = (rewards or {}).get(0, 0.0)
        return min(1.0, max(0.0, reward))

    def _new_messages(self) -> str:
        """Return what the game has said since the last move, without the move itself."""
        _, messages = self.unwrapped.get_observation()
        return "\n".join(text.strip() for _, text, kind in messages if kind is not self.move_kind)

    @contextlib.contextmanager
    def _separate_randomness(self) -> Iterator[None]:
        """Give the game a random state of its own, because it uses Python's, and discard what it prints."""
        state_of_others = random.getstate()
        random.setstate(self.random_state)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            self.random_state = random.getstate()
            random.setstate(state_of_others)


@functools.cache
def make_task(name: str) -> TaskFile:
    """Return the task of a game: a module in the form of a task file.

    Raises:
        UserError: TextArena is not installed, or the game is not in `GAMES`.
    """
    game = name.partition(":")[2]
    is_known = any(game == known_game or game.startswith(f"{known_game}-") for known_game in GAMES)
    if not is_known:
        hint = suggestion(game, GAMES, otherwise=f"expected one of {', '.join(GAMES)}")
        raise UserError(f"no single-player game {game!r} that needs nothing else; {hint}")
    try:
        import textarena
    except ImportError as error:
        fix = f"run `{install_command('lora-grpo[tasks]')}`"
        raise UserError(f"{name} needs TextArena ({error}); {fix}") from None
    variants = [variant for variant in textarena.envs.registration.ENV_REGISTRY if variant.startswith(GAMES)]
    if game not in variants:
        raise UserError(f"no game {game!r}; {suggestion(game, variants)}")

    def load(split: str) -> list[Row]:
        return [{"id": f"{game}/{split}/{seed}", "game": game, "seed": seed} for seed in _SEEDS[split]]

    # Invalid moves are not turns of the game. There is room for one before each valid move.
    first_game = Environment()
    first_game.reset(game, 0)
    max_turns = 2 * (first_game.unwrapped.state.max_turns or _TURNS_WITHOUT_LIMIT)
    module = ModuleType(name)
    vars(module).update(load=load, Environment=Environment, MAX_TURNS=max_turns)
    return task_of_module(Path(__file__), module)
