"""Classes in the three forms of TRL's documentation for `environment_factory` run unchanged.

The forms: a counter with a reward of its own state, a game whose object keeps a score and raises an exception after the
end, and a client that is created in `__init__` and used by coroutines.
"""

from typing import Any, NamedTuple

import pytest
from transformers.utils import get_json_schema
from trl import chat_template_utils

from lora_grpo import starter
from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.models import base_model, stop_tokens
from lora_grpo.rollouts import grade, play_all
from lora_grpo.sampling import Sampler, SamplingParams
from lora_grpo.tasks import Session, get_task


class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: How much to add.

        Returns:
            The value of the counter.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return 1.0 if self.counter == 6 else 0.0


class WordEnv:
    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, secret: str, **kwargs) -> str:
        self.secret = secret
        self.tries = 0
        self.reward = 0.0
        self.done = False
        return "Guess a word of five letters."

    def guess(self, guess: str) -> str:
        """
        Guess the word.

        Args:
            guess: A word of five letters.

        Returns:
            The result, with G for a letter in the right position.
        """
        if self.done:
            raise ValueError("Game over.")
        self.tries += 1
        self.done = guess == self.secret or self.tries == 6
        self.reward = sum(a == b for a, b in zip(guess, self.secret, strict=False)) / 5
        return "".join("G" if a == b else "-" for a, b in zip(guess, self.secret, strict=False))

    def get_reward(self) -> float:
        return self.reward


class Client:
    async def send(self, message):
        return {"echo": message, "length": len(message)}


class EchoToolEnv:
    """An environment with a client."""

    def __init__(self):
        self._client = Client()
        self._best = 0

    async def reset(self, **kwargs) -> None:
        self._best = 0

    async def echo(self, message: str) -> dict:
        """Send a message.

        Args:
            message: The message to send.

        Returns:
            The message and its length.
        """
        result = await self._client.send(message)
        self._best = max(self._best, result["length"])
        return result

    async def get_reward(self) -> float:
        return min(self._best / 10, 1.0)


class Form(NamedTuple):
    """A class in a form of TRL's documentation, and a conversation with it."""

    environment: type
    tool: str
    arguments: list[dict[str, Any]]
    """Of each call of the tool."""
    results: list[str]
    """Of each call, as the model reads it."""
    reward: float


FORMS = [
    Form(IncrementEnv, "increment", [{"step": 2}, {"step": 4}], ["2", "6"], reward=1.0),
    Form(
        WordEnv,
        "guess",
        [{"guess": "crate"}, {"guess": "crane"}, {"guess": "crane"}],
        ["GGG-G", "GGGGG", "error: ValueError: Game over."],
        reward=1.0,
    ),
    Form(EchoToolEnv, "echo", [{"message": "hello"}], ["{'echo': 'hello', 'length': 5}"], reward=0.5),
]
SECRETS = ("crane", "slate", "pride")


@pytest.fixture(params=FORMS, ids=lambda form: form.environment.__name__)
def form(request):
    return request.param


@pytest.fixture
def task(form, known_task):
    """The name of a task with that class."""

    class Games:
        Environment = form.environment

        def load(self, split):
            numbers = range(8) if split == "train" else range(8, 12)
            return [{"question": f"Begin game {number}.", "secret": SECRETS[number % 3]} for number in numbers]

    return known_task(Games)


def test_a_class_written_for_trl_runs_unchanged(form, task):
    environment = get_task(task).environment
    assert environment.schemas == [get_json_schema(getattr(form.environment(), form.tool))]
    session = Session(environment, {"question": "Begin.", "secret": "crane"})
    for arguments, result in zip(form.arguments, form.results, strict=True):
        call = {"type": "function", "function": {"name": form.tool, "arguments": arguments}}
        [answer] = session.answer({"role": "assistant", "content": "", "tool_calls": [call]})
        assert answer == {"role": "tool", "name": form.tool, "content": result}
    assert session.answer({"role": "assistant", "content": "Done."}) == []
    assert session.verdict("reply").value == form.reward


@pytest.fixture(scope="module")
def sampler():
    settings = ModelConfig(name=str(starter.model_path()), bits=16)
    tokenizer = base_model.load_tokenizer(settings)
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    eos = stop_tokens.eos_token_ids(settings, tokenizer, "starter")
    return Sampler(base_model.load_base(settings).eval(), tokenizer, eos)


def test_a_model_plays_with_it(form, task, sampler):
    rows = load_data(replace(RunConfig(), {"data": {"task": task}})).train
    groups = play_all(sampler, rows, SamplingParams(1, 1.0, 1.0, 64), range(len(rows)))
    episodes = [episode for group in groups for episode in group]
    assert len(episodes) == 8 and all(episode.ended_by for episode in episodes)
    assert all(0 <= verdict.value <= 1 for verdict in grade(task, episodes))
    assert f'"name": "{form.tool}"' in sampler.tokenizer.decode(episodes[0].prompt_ids)
