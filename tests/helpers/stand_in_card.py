"""tools/card.py with sides that take no time, hang, or crash, in place of real runs.

python stand_in_card.py ARGUMENTS OF card.py
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import card
from on_card import sides

from lora_grpo.cli import run_command


def quick(session, seconds):
    with (session.output / "measured").open("a") as file:
        file.write("quick\n")
    return {"status": "ran", "reason": None, "step_time": 1.5}


def crash(session, seconds):
    os._exit(7)


def hang(session, seconds):
    (session.output / "hanging").touch()
    time.sleep(3600)


def slow_command(session, seconds):
    with (session.output / "slow").open("a") as file:
        file.write("slow\n")
    return sides.run_command(session, "steps", "slow command", ["sleep", "3600"], seconds)


def failed_command(session, seconds):
    program = "import sys; print('error: CUDA out of memory'); sys.exit(1)"
    return sides.run_command(session, "steps", "failed command", [sys.executable, "-c", program], seconds)


PARTS = {
    "peaks": (sides.Side("quick", 60, quick), sides.Side("crash", 60, crash), sides.Side("after", 60, quick)),
    "small_cards": (sides.Side("hang", 5, hang),),
    "steps": (
        sides.Side("slow command", 1, slow_command),
        sides.Side("failed command", 60, failed_command),
        sides.Side("absent", 60, quick, ("a_package_that_nobody_has",)),
    ),
}

if __name__ == "__main__":
    sides.PARTS.clear()
    sides.PARTS.update(PARTS)
    card.PROGRAM = __file__
    card._MARGIN_SECONDS = 15  # a busy machine imports packages for some seconds
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
    sys.exit(run_command(card.main))
