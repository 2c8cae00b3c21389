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
    if definition not in _pools:
        folder = Path(tempfile.gettempdir())
        if _log_folder:
            folder = _log_folder[0]
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"agent-{definition.path.stem}-{os.getpid()}.log"
        _pools[definition] = AgentPool(definition, log)
    return _pools[definition]


@atexit.register
def close_all() -> None:
    """End all agents of this process."""
    while _pools:
        _, pool = _pools.popitem()
        pool.close()
    _log_folder.clear()
