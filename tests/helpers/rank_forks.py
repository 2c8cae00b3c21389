"""Runs a script as several ranks, in forks of this process: what torchrun does, without its seconds of imports.

As torchrun does, it keeps the store in which the ranks meet, hands SIGTERM on to them, ends them all when one fails,
and itself ends with that one's exit code.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys


def main() -> None:
    import torch

    processes, script = int(sys.argv[1]), sys.argv[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[int] = []
    for rank in range(processes):
        ranks.append(os.fork())
        if not ranks[-1]:
            sys.argv[:] = sys.argv[2:]
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes), OMP_NUM_THREADS="1")
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            torch.set_num_threads(1)  # where torch was imported before, it has read OMP_NUM_THREADS already
            runpy.run_path(script, run_name="__main__")
            return
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def hand_on(number: int, frame: object) -> None:
        for pid in ranks:
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, hand_on)
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            hand_on(signal.SIGTERM, None)
    del store
    sys.exit(failed)


if __name__ == "__main__":
    main()
