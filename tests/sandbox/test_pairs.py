"""Pairs of programs: one tries to leave or send a bit, and another, later or at the same time, tries to read it.

The pairs are in `attacks/pairs.py`, with `write(bit, n)` and `read(n)`; `n` is a number that is used only once. The
comments below the first one say how a pair runs:

    # live      both run at the same time, in two workers; otherwise, the reader runs later, in each of two workers
    # noisy     the reader guesses the bit; otherwise, it returns an observation
    # open      the channel cannot be closed, so the pair shows that these tests would notice a bit

A pair carries a bit if no observation is the same for both bits, or if at least 18 of 20 guesses are right or wrong (a
coin does that in 0.04% of the cases).
"""

import os
import re
import runpy
from pathlib import Path

import pytest
from helpers.tiers import TIERS, skip_unless_available

from lora_grpo.sandbox import Program, Settings
from lora_grpo.sandbox.pool import Pool

TABLE = runpy.run_path(str(Path(__file__).parent / "attacks" / "pairs.py"))
PAIRS = {name: text if "def write(" in text else text + TABLE["STILL_RUNS"] for name, text in TABLE["PAIRS"].items()}
SETTINGS = Settings(workers=2, timeout_seconds=3, memory_mb=256)
BITS = (0, 1, 1, 0)
NOISY_BITS = (0, 1, 1, 0, 1, 0, 0, 1, 0, 1) * 2
EXPECTED = re.compile(
    "assert False, seen  # |PermissionError: |FileNotFoundError: |OSError: |it made a system call|still running"
)
"""How readers may end: with a value, or refused by the sandbox. Any other exception is an error in the pair."""
NUMBERS = iter(range(os.getpid() % 500, 1 << 30))


@pytest.fixture(scope="module", params=TIERS)
def pool(request):
    skip_unless_available(request.param)
    pool = Pool(SETTINGS, request.param)
    pool.run([Program("def f(): return 1", "assert f() == 1", ("f",))] * 2)  # starts both workers
    yield pool
    pool.close()


def observations(pool, source, bits):
    """Return what the readers report after each bit. The test's message holds the value that `read` returns."""
    live = "\n# live\n" in source
    observed = []
    for bit in bits:
        n = next(NUMBERS)
        writer = Program(source, f"write({bit}, {n})\nassert True", ("write",))
        reader = Program(source, f"seen = read({n})\nassert False, seen", ("read",))
        if live:
            wrote, *seen = pool.run([writer, reader])
        else:
            (wrote,) = pool.run([writer])
            # Workers take turns, so the first reader runs in the other worker and the second one in the writer's.
            seen = [pool.run([reader])[0] for _ in range(2)]
        assert wrote.status not in ("failed", "invalid"), wrote
        assert all(EXPECTED.match(verdict.message) for verdict in seen), seen
        observed.append(tuple(verdict.message for verdict in seen))
    return observed


def carries(source, bits, observed):
    """Return whether the observations tell the bits apart."""
    if "\n# noisy\n" in source:
        guesses = [messages[0].rpartition("# ")[2] == "1" for messages in observed]
        num_right = sum(guess == bool(bit) for guess, bit in zip(guesses, bits, strict=True))
        return max(num_right, len(bits) - num_right) >= 18
    for messages_of_a_reader in zip(*observed, strict=True):
        seen_after: dict[int, set[str]] = {0: set(), 1: set()}
        for message, bit in zip(messages_of_a_reader, bits, strict=True):
            seen_after[bit].add(message)
        if seen_after[0].isdisjoint(seen_after[1]):
            return True
    return False


@pytest.mark.parametrize("source", PAIRS.values(), ids=PAIRS)
def test_a_pair_of_programs_carries_no_bit_unless_it_is_open(pool, source):
    bits = NOISY_BITS if "\n# noisy\n" in source else BITS
    is_open = "\n# open\n" in source
    # On a busy machine, a program may start too late to read an open channel. Guesses are not right by chance twice.
    for _ in range(5 if is_open else 2):
        observed = observations(pool, source, bits)
        if carries(source, bits, observed) == is_open:
            break
    assert carries(source, bits, observed) == is_open, observed


GUESSER = """
import time
START = time.time()
PERIOD, SLOT = 0.48, 0.03
guess = int(START % PERIOD / SLOT)
calls = 0

def f(x):
    global calls
    following = guess ^ (1 << calls)
    while not 0 <= time.time() % PERIOD - following * SLOT - 0.004 < SLOT / 2:
        time.sleep(0.0005)
    calls += 1
    return bool(guess >> (calls - 1) & 1)
"""
"""Guesses four truth values. Each answer is given at a moment that tells the next program of the worker what to guess
if the tests end with it. It works if tests end at the first wrong answer: then, about half of the programs pass."""


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_programs_that_pass_guesses_on_do_not_find_the_answers(tier):
    """12 programs for each of up to four answers: the start of the first program is right by chance in 1 of 8 cases."""
    skip_unless_available(tier)
    passes = []
    for answers in ("TFFT", "FTTF", "TTFF", "FFFT"):
        pool = Pool(Settings(workers=1, timeout_seconds=3), tier)
        test = "\n".join(f"assert f({index}) is {answer == 'T'}" for index, answer in enumerate(answers))
        verdicts = pool.run([Program(GUESSER, test, ("f",), name=str(number)) for number in range(12)])
        pool.close()
        assert {verdict.status for verdict in verdicts} <= {"passed", "failed"}
        passes.append(sum(verdict.passed for verdict in verdicts))
        if not passes[-1]:
            break
    assert 0 in passes, passes
