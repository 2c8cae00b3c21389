"""The peak of each phase in a record of torch's allocator, and the code that allocated what was held at the peak.

A record is what `torch.cuda.memory._snapshot()` returns: its `device_traces` list each allocation and each release with
its time and its stack, its `segments` the blocks that are still held. From both follows the life of every block, and
from the lives what was held at any moment, also if the record began later or lost its beginning.

No counter is reset for it, so it does not disturb a run that records its own peaks.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

_GIB = 1024**3
_PACKAGES = (
    *("lora_grpo", "unsloth", "unsloth_zoo", "unsloth_compiled_cache", "vllm"),
    *("trl", "peft", "bitsandbytes", "transformers", "accelerate", "on_card"),
)
"""An allocation belongs to the innermost function of these packages on its stack."""
_MAX_HOLDERS = 15


@dataclass(frozen=True)
class Phase:
    """A stretch of time; a phase of each step has as many of them as there are steps."""

    name: str
    begin_us: int
    end_us: int


@dataclass(frozen=True)
class Block:
    """The life of an allocated block."""

    begin_us: float
    end_us: float
    bytes: int
    where: str
    """The function that allocated it."""


def peaks(snapshot: dict[str, Any], phases: Sequence[Phase], device: int = 0) -> list[dict[str, Any]]:
    """Return the highest peak of each phase, in the order of their first appearance.

    Returns:
        One dictionary for each name of a phase: `phase`, `peak_gib`, `begin_gib` (held when it began), `times` and
        `holders`, the functions that allocated most of what was held at the peak, with `where`, `gib` and `blocks`.
    """
    blocks = lives(snapshot, device)
    changes = sorted(_changes(blocks))
    times = [time for time, _ in changes]
    held = numpy.cumsum([0, *(change for _, change in changes)])  # held[n]: after the first n changes

    highest: dict[str, dict[str, Any]] = {}
    for phase in phases:
        first = bisect_left(times, phase.begin_us)
        last = bisect_right(times, phase.end_us)
        position = first + int(numpy.argmax(held[first : last + 1]))
        peak = int(held[position])
        entry = highest.setdefault(phase.name, {"phase": phase.name, "peak": -1, "times": 0})
        entry["times"] += 1
        if peak > entry["peak"]:
            moment = times[position - 1] if position > first else phase.begin_us
            entry |= {"peak": peak, "begin": int(held[first]), "moment": moment}

    results = []
    for entry in highest.values():
        results.append(
            {
                "phase": entry["phase"],
                "times": entry["times"],
                "begin_gib": round(entry["begin"] / _GIB, 3),
                "peak_gib": round(entry["peak"] / _GIB, 3),
                "holders": _holders(blocks, entry["moment"]),
            }
        )
    return results


def lives(snapshot: dict[str, Any], device: int = 0) -> list[Block]:
    """Return the life of every block in a record."""
    blocks: list[Block] = []
    living: dict[int, tuple[float, int, str]] = {}  # address -> begin, bytes, where
    for event in snapshot["device_traces"][device]:
        if event["action"] == "alloc":
            living[event["addr"]] = (event["time_us"], event["size"], _where(event.get("frames", ())))
        elif event["action"] == "free_completed":
            begin, size, where = living.pop(event["addr"], (-math.inf, event["size"], "before the record"))
            blocks.append(Block(begin, event["time_us"], size, where))

    for begin, size, where in living.values():
        blocks.append(Block(begin, math.inf, size, where))
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            is_held = block["state"] != "inactive"
            if is_held and block.get("address", address) not in living:
                where = _where(block.get("frames", ()), otherwise="before the record")
                blocks.append(Block(-math.inf, math.inf, block["size"], where))
            address += block["size"]
    return blocks


def _changes(blocks: Iterable[Block]) -> Iterable[tuple[float, int]]:
    for block in blocks:
        yield block.begin_us, block.bytes
        if block.end_us < math.inf:
            yield block.end_us, -block.bytes


def _holders(blocks: Iterable[Block], moment: float) -> list[dict[str, Any]]:
    """Return the functions whose blocks took most of the memory at a moment."""
    held: dict[str, list[int]] = defaultdict(list)
    for block in blocks:
        if block.begin_us <= moment < block.end_us:
            held[block.where].append(block.bytes)
    by_size = sorted(held.items(), key=lambda item: -sum(item[1]))
    return [
        {"where": where, "gib": round(sum(sizes) / _GIB, 3), "blocks": len(sizes)}
        for where, sizes in itertools.islice(by_size, _MAX_HOLDERS)
    ]


def _where(frames: Sequence[dict[str, Any]], otherwise: str = "no Python code: backward pass or compiled") -> str:
    """Return "package/file.py:line function" of the innermost function of a known package."""
    for frame in frames:  # the innermost is the first
        _, _, in_packages = frame["filename"].rpartition("/site-packages/")  # an environment lies in some folder, too
        parts = in_packages.split("/")
        known = [index for index, part in enumerate(parts) if part in _PACKAGES]
        if known:
            return f"{'/'.join(parts[known[-1] :])}:{frame['line']} {frame['name']}"
    return otherwise
