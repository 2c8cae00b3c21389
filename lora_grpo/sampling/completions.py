"""Completions in the order in which they finish, grouped by prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")


def by_prompt(finished: Iterable[tuple[int, T]], group: int) -> Iterator[tuple[int, list[T]]]:
    """Yield (index of a prompt, its completions in order) when all completions of the prompt are finished.

    Args:
        finished: (index, completion) in any order. The completions of prompt b are b·G to b·G + G - 1.
        group: G.
    """
    started: dict[int, dict[int, T]] = {}
    for index, completion in finished:
        whole = started.setdefault(index // group, {})
        whole[index] = completion
        if len(whole) == group:
            yield index // group, [whole[each] for each in sorted(whole)]
            del started[index // group]


def in_threads(complete: Callable[[int], T], count: int, threads: int) -> Iterator[tuple[int, T]]:
    """Yield (index, `complete(index)`) of each index below `count` when it is finished.

    If the generator is closed early, calls that have not begun are canceled.
    """
    with ThreadPoolExecutor(threads) as pool:
        pending = {pool.submit(complete, index): index for index in range(count)}
        try:
            for done in as_completed(pending):
                yield pending[done], done.result()
        finally:
            for each in pending:
                each.cancel()
