"""What a task file says about its agent."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AgentDefinition:
    """The `agent` or `AGENT` of a task file, and its constants."""

    path: Path
    """The task file, for error messages. Its folder is the current one of the agent."""
    command: tuple[str, ...]
    """`AGENT`; () for a function `agent`."""
    processes: int
    """How many processes of `AGENT` run at the same time."""
    episodes_per_process: int
    """How many episodes a process of `AGENT` plays at the same time."""
    seconds_per_call: float
    """How long an agent may work between two answers of the model; 0 for any time."""
    seconds_per_episode: float
    """How long an agent may work in an episode, without the time in which it waits for the model; 0 for any time."""
    max_failed: float
    """The fraction of episodes that may fail before the run ends."""
    threshold: float
    """The minimum score of an episode that passes."""
    prompt_tokens: int
    """Maximum number of tokens of the agent's first prompt."""
