"""Classes in the three forms of TRL's documentation for `environment_factory` run unchanged.

The forms: a counter with a reward of its own state, a game whose object keeps a score and raises an exception after the
end, and a client that is created in `__init__` and used by coroutines.
"""

import pytest
from transformers.utils import get_json_schema
from trl import chat_template_utils

from lora_grpo import starter
from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.models import base_model, stop_tokens
from lora_grpo.rollouts import grade, play_all
from lora_grpo.sampling import Sampler, SamplingParams
from lora_grpo.tasks import get_task
from lora_grpo.tasks.environment import Session

LOAD = """
def load(split):
    first, last = (0, 8) if split == "train" else (8, 12)
    return [{"question": f"Begin game {n}.", "secret": ("crane", "slate", "pride")[n % 3]} for n in range(first, last)]
"""
COUNTER = '''
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
'''
GAME = '''
class WordEnv:
    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, secret: str, **kwargs) -> str:
        self.secret, self.tries = secret, 0
        self.reward, self.done = 0.0, False
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
        self.reward = sum(a == b for a, b in zip(guess, self.secret)) / 5
        return "".join("G" if a == b else "-" for a, b in zip(guess, self.secret))

    def get_reward(self) -> float:
        return self.reward
'''
CLIENT = '''
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
'''
FORMS = {
    "IncrementEnv": (COUNTER, [("increment", {"step": 2}), ("increment", {"step": 4})], ["2", "6"], 1.0),
    "WordEnv": (
        GAME,
        [("guess", {"guess": "crate"}), ("guess", {"guess": "crane"}), ("guess", {"guess": "crane"})],
        ["GGG-G", "GGGGG", "error: ValueError: Game over."],
        1.0,
    ),
    "EchoToolEnv": (CLIENT, [("echo", {"message": "hello"})], ["{'echo': 'hello', 'length': 5}"], 0.5),
}


@pytest.fixture(params=FORMS)
def form(request, tmp_path):
    """Return the path of a task file with a class of TRL's form, and a conversation with it."""
    code, *conversation = FORMS[request.param]
    path = tmp_path / "my_task.py"
    path.write_text(f"{LOAD}\n{code}\nEnvironment = {request.param}\n")
    return str(path), *conversation


def test_a_class_written_for_trl_runs_unchanged(form):
    path, calls, results, reward = form
    environment = get_task(path).environment
    schemas = [get_json_schema(getattr(environment.python_class(), calls[0][0]))]
    assert environment.schemas == schemas
    session = Session(environment, {"question": "Begin.", "secret": "crane"})
    for (name, arguments), result in zip(calls, results, strict=True):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        (answer,) = session.answer({"role": "assistant", "content": "", "tool_calls": [call]})
        assert answer == {"role": "tool", "name": name, "content": result}
    assert session.answer({"role": "assistant", "content": "Done."}) == []
    assert session.verdict("reply").value == reward


@pytest.fixture(scope="module")
def sampler():
    settings = ModelConfig(name=str(starter.model_path()), bits=16)
    tokenizer = base_model.load_tokenizer(settings)
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    eos = stop_tokens.eos_token_ids(settings, tokenizer, "starter")
    return Sampler(base_model.load_base(settings).eval(), tokenizer, eos)


def test_a_model_plays_with_it(form, sampler):
    path, calls, *_ = form
    rows = load_data(replace(RunConfig(), {"data": {"task": path}})).train
    groups = play_all(sampler, rows, SamplingParams(1, 1.0, 1.0, 64), range(len(rows)))
    episodes = [episode for group in groups for episode in group]
    assert len(episodes) == 8 and all(episode.ended_by for episode in episodes)
    assert all(0 <= verdict.value <= 1 for verdict in grade(path, episodes))
    assert f'"name": "{calls[0][0]}"' in sampler.tokenizer.decode(episodes[0].prompt_ids)
