"""Pieces of work as a Ray Data source: each piece becomes one block, made by one function in one task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import pyarrow as pa
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

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
