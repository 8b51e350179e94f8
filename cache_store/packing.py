"""Rows of an optimizer step: one sample each, or several packed into a token budget; a pure function of the step.

The whole global batch is packed, and ranks take rows of it, so neither the rows nor the samples of a step depend on the
number of ranks. Legend: G samples of a global batch.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cache_store.errors import CacheError
from cache_store.order import rank_slice, step_samples


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Distribute documents over rows of at most `budget` tokens: best fit, longest first (ties by number).

    Returns the documents of each row, ascending; rows ascend by their first document. Raises CacheError for a document
    over the budget.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for document in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = int(lengths[document])
        if length > budget:
            raise CacheError(f"a document of {length} tokens does not fit a row of {budget}")
        place = bisect.bisect_left(room, (length, -1))
        if place == len(room):
            left, row = budget, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(document)
        bisect.insort(room, (left - length, row))
    return sorted(sorted(row) for row in rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How global batches are made and shared, and which of them a stream yields."""

    seed: int
    global_batch_size: int
    """Samples per optimizer step over all ranks."""
    micro_batch_size: int
    """Rows of a micro-batch."""
    max_length: int
    """Longer samples are cut on the right."""
    pack_tokens: int | None = None
    """Token budget of a row that holds several samples; None: one sample per row, padded."""
    rank: int = 0
    world_size: int = 1
    start_step: int = 0
    """First optimizer step to yield: a resumed run continues at its step."""
    num_steps: int
    """Optimizer steps of the whole run: the stream yields start_step .. num_steps - 1."""

    def __post_init__(self) -> None:
        least = {"global_batch_size": 1, "micro_batch_size": 1, "max_length": 2, "start_step": 0}
        wrong = [
            f"{name} is {getattr(self, name)}, wanted at least {bound}"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if not 0 <= self.rank < self.world_size:
            wrong.append(f"rank {self.rank} is not one of {self.world_size} ranks")
        if self.pack_tokens is not None and self.pack_tokens < self.max_length:
            wrong.append(f"pack_tokens is {self.pack_tokens}, wanted at least max_length {self.max_length}")
        if wrong:
            raise CacheError("stream: " + "; ".join(wrong))


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one rank reads for one optimizer step."""

    epochs: np.ndarray
    """int64 [G], of the whole global batch, as the two below."""
    positions: np.ndarray
    """int64 [G]: positions in the epoch's samples."""
    lengths: np.ndarray
    """int64 [G]: tokens, after the cut."""
    rows: list[list[int]]
    """This rank's rows: places in the arrays above."""
    micro_batches: int
    """Micro-batches of this step, the same on every rank."""

    @property
    def places(self) -> list[int]:
        """This rank's samples, row by row."""
        return [place for row in self.rows for place in row]


def share_of_step(
    config: StreamConfig, samples: int, tokens: Callable[[np.ndarray, np.ndarray], np.ndarray], step: int
) -> StepShare:
    """A rank's share of a step; `samples` per epoch, `tokens(epochs, positions)` gives lengths (`SampleSet.tokens`).

    Every rank takes the same number of rows, give or take one.
    """
    epochs, positions = step_samples(config.seed, samples, config.global_batch_size, step)
    lengths = np.minimum(tokens(epochs, positions), config.max_length)
    if config.pack_tokens is None:
        rows = [[place] for place in range(config.global_batch_size)]
    else:
        rows = pack(lengths.tolist(), config.pack_tokens)
    mine = rank_slice(len(rows), config.rank, config.world_size)
    largest_share = -(-len(rows) // config.world_size)
    micro_batches = -(-largest_share // config.micro_batch_size)
    return StepShare(epochs, positions, lengths, rows[mine.start : mine.stop], micro_batches)
