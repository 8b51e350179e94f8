"""A bound in bytes on the batches that loader processes hold ready.

The sizes of all batches are known in advance to every process, so one shared counter is enough: how many batches the
consumer is done with.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque

POLL_S = 5.0
"""How often a waiting process looks whether its parent is still there."""


class PrefetchGate:
    """Lets a loader process begin its next batch once all unfinished batches up to it fit into `limit` bytes.

    The batch that the consumer waits for is always let in, so a single batch may exceed the limit. Made in the
    consumer's process and inherited by the loader's.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._condition = multiprocessing.Condition()
        self._done = multiprocessing.Value("q", -1, lock=False)
        self._closed = multiprocessing.Value("b", 0, lock=False)
        self._parent = os.getpid()
        # Of this process: sizes of the batches after those that the consumer was done with when it last looked.
        self._sizes: deque[int] = deque()
        self._first = 0

    def admit(self, size: int, *, wait: bool) -> bool:
        """Note the next batch of the stream; with `wait` (it is this process's own), block until it may begin.

        False: the consumer has gone, nobody wants the batch.
        """
        self._sizes.append(size)
        if not wait:
            return True
        number = self._first + len(self._sizes) - 1
        with self._condition:
            while not self._closed.value and not self._fits(number):
                if not self._condition.wait(POLL_S) and os.getppid() != self._parent:
                    return False
            return not self._closed.value

    def released(self) -> None:
        """The consumer is done with the batches that it has received so far, and wants the next."""
        with self._condition:
            self._done.value += 1
            self._condition.notify_all()

    def close(self) -> None:
        """The consumer wants no more."""
        with self._condition:
            self._closed.value = 1
            self._condition.notify_all()

    def _fits(self, number: int) -> bool:
        done = max(int(self._done.value), 0)
        while self._first < min(done, number):
            self._sizes.popleft()
            self._first += 1
        return number <= done or sum(self._sizes) <= self._limit
