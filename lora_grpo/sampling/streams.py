"""Completions in the order in which they finish: concurrent requests to a server, and groups that are complete."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")


def by_prompt(finished: Iterable[tuple[int, T]], group_size: int) -> Iterator[tuple[int, list[T]]]:
    """Yield (index of a prompt, its completions in order) when all completions of the prompt are finished.

    Args:
        finished: (index, completion) in any order. The completions of prompt b are b·G to b·G + G - 1.
        group_size: G.
    """
    incomplete_groups: dict[int, dict[int, T]] = {}
    for index, completion in finished:
        prompt_index = index // group_size
        group = incomplete_groups.setdefault(prompt_index, {})
        group[index] = completion
        if len(group) == group_size:
            yield prompt_index, [group[member] for member in sorted(group)]
            del incomplete_groups[prompt_index]


def in_threads(complete: Callable[[int], T], count: int, threads: int) -> Iterator[tuple[int, T]]:
    """Yield (index, `complete(index)`) of each index below `count` when it is finished.

    If the generator is closed early, calls that have not begun are canceled.
    """
    pool = ThreadPoolExecutor(threads)
    try:
        index_of = {pool.submit(complete, index): index for index in range(count)}
        for future in as_completed(index_of):
            yield index_of[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)
