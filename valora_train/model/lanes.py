"""Computes parts of a batch side by side, each on one CPU core.

A small model has many small products, which several threads hardly compute faster than one. With
a part of the batch for each thread, two cores take little more than half the time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Lanes:
    """Threads that compute on one core each; results do not depend on which is the fastest.

    Args:
        count: Number of threads; with 1, everything is computed in the thread that asks.

    Attributes:
        count: Number of threads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # Each thread of torch has a number of threads of its own, which the first one inherits.
        self._pool = ThreadPoolExecutor(count, "lane", partial(torch.set_num_threads, 1))

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Call functions, with gradients if the caller has them.

        Args:
            calls: The functions; none may change what another one reads.

        Returns:
            Their results, in order.
        """
        if self.count == 1 or len(calls) == 1:
            return [call() for call in calls]
        before = torch.get_num_threads()
        gradients = torch.is_grad_enabled()

        def computed(call: Callable[[], T]) -> T:
            with torch.set_grad_enabled(gradients):  # each thread has a mode of its own
                return call()

        torch.set_num_threads(1)  # MKL has one number for all threads
        try:
            return list(self._pool.map(computed, calls))
        finally:
            torch.set_num_threads(before)
