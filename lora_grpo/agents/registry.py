"""The pools of this process: the agents of a task are started once."""

import atexit
import os
import tempfile
from pathlib import Path

from lora_grpo.agents.pool import AgentPool
from lora_grpo.tasks import AgentDefinition

_pools: dict[AgentDefinition, AgentPool] = {}
_log_folder: list[Path] = []
"""Where the last run wants the logs; empty without a run."""


def keep_logs_in(folder: Path) -> None:
    """Write what agents that start from now on write to standard error into files of a folder."""
    _log_folder[:] = [folder]


def pool_of(definition: AgentDefinition) -> AgentPool:
    """Return the running pool of an agent, or a new one."""
    pool = _pools.get(definition)
    if pool is None or pool.is_closed:  # it is closed after an error
        name = f"agent-{definition.path.stem}"
        if _log_folder:
            log = _log_folder[0] / f"{name}.log"
        else:
            log = Path(tempfile.gettempdir()) / f"{name}-{os.getpid()}.log"
        pool = AgentPool(definition, log)
        _pools[definition] = pool
    return pool


def count_earlier(definition: AgentDefinition, episodes: int) -> None:
    """Count episodes that earlier processes have played without a failure.

    Otherwise, episodes that are played again because they failed would be all that `check_failures` knows of.
    """
    pool_of(definition).counts.episodes += episodes


@atexit.register
def close_all() -> None:
    """End all agents of this process."""
    while _pools:
        _, pool = _pools.popitem()
        pool.close()
    _log_folder.clear()
