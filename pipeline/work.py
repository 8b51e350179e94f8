"""Pieces of work as a Ray Data source: each piece becomes one block, made by one function in one task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from cache_store.errors import CacheError
from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from ray.data import Dataset

Piece = TypeVar("Piece")
_ROW_BYTES = 4096  # a guess that only steers Ray Data's memory budget


class WorkSource(Datasource, Generic[Piece]):
    """`make(piece)` returns the block of a piece as an Arrow table; pieces are read one task each."""

    def __init__(self, pieces: Sequence[Sequence[Piece]], make: Callable[[Sequence[Piece]], pa.Table]) -> None:
        super().__init__()
        self._pieces, self._make = pieces, make

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all blocks, roughly."""
        return _ROW_BYTES * sum(len(piece) for piece in self._pieces)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """One read task per piece, whatever parallelism is asked for."""
        return [
            ReadTask(
                partial(_blocks, self._make, piece),
                BlockMetadata(num_rows=len(piece), size_bytes=_ROW_BYTES * len(piece), exec_stats=None),
            )
            for piece in self._pieces
        ]


def _blocks(make: Callable[[Sequence[Piece]], pa.Table], piece: Sequence[Piece]) -> Iterable[pa.Table]:
    return [make(piece)]


def read_pieces(
    pieces: Sequence[Sequence[Piece]], make: Callable[[Sequence[Piece]], pa.Table], *, concurrency: int
) -> Dataset:
    """A lazy Dataset with exactly one block per piece; at most `concurrency` pieces are being made at a time."""
    import ray

    count = len(pieces)
    return ray.data.read_datasource(
        WorkSource(pieces, make),
        concurrency=min(concurrency, count),
        override_num_blocks=count,  # else Ray splits the blocks of a small job into crumbs
    )


def split(items: Sequence[Piece], size: int) -> list[Sequence[Piece]]:
    """Consecutive pieces of at most `size` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def own_error(error: BaseException) -> CacheError | PipelineError | None:
    """The typed error of ours that a failed Ray task carries, if there is one: trying again will not help it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, CacheError | PipelineError):
            return current
        current = getattr(current, "cause", None) or current.__cause__
    return None
