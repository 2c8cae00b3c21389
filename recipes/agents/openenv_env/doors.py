"""An environment of OpenEnv: a way through rooms, each with three doors and a sign that names the right one."""

import random
import re
import uuid

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.rubrics import Rubric

ROOMS = 2
COLORS = ["red", "blue", "green", "white", "black", "brown", "gray", "pink", "gold", "silver", "orange", "purple"]


class DoorsAction(Action):
    """What the player says."""

    text: str


class DoorsObservation(Observation):
    """What the player sees."""

    text: str


class Passes(Rubric):
    """Rewards each room with the same part of 1, if the player names its right door and no other."""

    def forward(self, action, observation):
        doors = observation.metadata["doors"]
        words = set(re.findall(r"\w+", action.text.lower()))
        named = [color for color in doors if color in words]
        return float(named == [observation.metadata["right"]]) / ROOMS


class DoorsEnvironment(Environment):
    """The rooms of a seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__(rubric=Passes())
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._random = random.Random(seed)
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        self._enter_room()
        return DoorsObservation(text=self._sight)

    def step(self, action, timeout_s=None, **kwargs):
        room = {"doors": self._doors, "right": self._right}
        self._state.step_count += 1
        self._enter_room()
        is_out = self._state.step_count == ROOMS
        observation = DoorsObservation(text="" if is_out else self._sight, done=is_out, metadata=room)
        observation.reward = self._apply_rubric(action, observation)
        return observation

    @property
    def state(self):
        return self._state

    def _enter_room(self):
        self._doors = self._random.sample(COLORS, 3)
        self._right = self._random.choice(self._doors)
        first, second, third = self._doors
        self._sight = (
            f"There are a {first}, a {second} and a {third} door. The sign says {self._right}. Which door do you take?"
        )


class DoorsClient(EnvClient[DoorsAction, DoorsObservation, State]):
    """A player's connection to the server."""

    def _step_payload(self, action):
        return {"text": action.text}

    def _parse_result(self, payload):
        observation = DoorsObservation.model_validate(payload["observation"])
        return StepResult(observation, payload["reward"], payload["done"])

    def _parse_state(self, payload):
        return State.model_validate(payload)
