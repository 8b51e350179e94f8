"""Memory that a loader process lends to its consumer, batch after batch, instead of giving away new memory each time.

A new shared tensor per batch costs more than decoding it: the kernel clears every page, and the tensor is copied there.
A slot is an anonymous memory file (Linux). Its first byte says whether the consumer still holds it; the consumer clears
that byte when the last tensor over it is gone. No name exists anywhere, so nothing stays behind, whoever dies.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np

HEADER = 64
"""Bytes before the data."""
MAX_SLOTS = 32
"""A consumer that keeps more batches than this gets the others in memory of their own."""
SPARE = 1.5
"""A slot serves batches down to its size divided by this; smaller ones get a smaller slot."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory that is lent: what the consumer needs to map it."""

    path: str
    num_bytes: int
    """With the header."""

    def map(self) -> np.ndarray:
        """The data, uint8, in the consumer's process; the slot is free again once nothing refers to it."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, self.num_bytes)
        finally:
            os.close(descriptor)
        data = np.frombuffer(memory, np.uint8, offset=HEADER)
        weakref.finalize(data, _give_back, memory).atexit = False
        return data


def _give_back(memory: mmap.mmap) -> None:
    memory[0] = 0


class SlotPool:
    """The slots of one loader process; where the system has no memory files, none."""

    def __init__(self) -> None:
        self._slots: dict[int, mmap.mmap] = {}  # by file descriptor

    def take(self, num_bytes: int) -> tuple[Slot, np.ndarray] | None:
        """A free slot and its data, uint8 [num_bytes]; None when too many are lent."""
        wanted = num_bytes + HEADER
        free = [(len(memory), descriptor) for descriptor, memory in self._slots.items() if not memory[0]]
        fitting = [size for size in free if wanted <= size[0] <= SPARE * wanted]
        if fitting:
            _, descriptor = min(fitting)
        else:
            for _, unsuited in free:
                self._drop(unsuited)
            if len(self._slots) >= MAX_SLOTS or not hasattr(os, "memfd_create"):
                return None
            descriptor = os.memfd_create("cache_store")
            os.ftruncate(descriptor, wanted)
            self._slots[descriptor] = mmap.mmap(descriptor, wanted)
        memory = self._slots[descriptor]
        memory[0] = 1
        slot = Slot(f"/proc/{os.getpid()}/fd/{descriptor}", len(memory))
        return slot, np.frombuffer(memory, np.uint8, count=num_bytes, offset=HEADER)

    def _drop(self, descriptor: int) -> None:
        del self._slots[descriptor]  # unmapped once no array refers to it
        os.close(descriptor)
