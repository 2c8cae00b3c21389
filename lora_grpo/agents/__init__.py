"""Agents: programs that play episodes at the endpoint, each in a process of its own.

    pool = pool_of(task.agent)                       # started once in this process
    playing = pool.start(jobs, policy, limits)
    sampler.serve(policy.queue)                      # until the last episode is over
    results = playing.result()                       # their calls, token for token, and their verdicts

pool.py       the agents of a task: their episodes, their time limits, and the endpoint that they talk to
runners.py    the processes that play episodes: one that forks, or those of a command
processes.py  a process that runs agents, and its end, which leaves nothing running
host.py       the program that runs the function `agent` of a task file, in a child for every episode
registry.py   the pools of this process
"""

from lora_grpo.agents.pool import FAILED, AgentPool, Job, Played, check_failures
from lora_grpo.agents.registry import close_all, count_earlier, keep_logs_in, pool_of
