"""Parquet tables inside a cache's storage: prompts and responses. Small files, written whole, read by column or row."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from cache_store import index
from cache_store.storage import Storage

_READ_AHEAD = 4 * 2**20


class RangeReader(io.RawIOBase):
    """A stored object as a seekable file: every read is one ranged GET."""

    def __init__(self, storage: Storage, name: str, size: int) -> None:
        super().__init__()
        self._storage, self._name, self._size, self._position = storage, name, size, 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move as in io.RawIOBase."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Offset of the next byte."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current offset; the number of bytes read."""
        length = min(len(buffer), self._size - self._position)
        if length <= 0:
            return 0
        buffer[:length] = self._storage.read_range(self._name, self._position, length)
        self._position += length
        return length


def open_object(storage: Storage, name: str, size: int) -> IO[bytes]:
    """A stored object as a buffered, seekable file."""
    return io.BufferedReader(RangeReader(storage, name, size), buffer_size=_READ_AHEAD)


def write_table(storage: Storage, name: str, table: pa.Table) -> None:
    """Store a table as one Parquet object; readers see all of it or nothing."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    storage.put(name, sink.getvalue())


def read_table(
    storage: Storage, name: str, *, columns: Sequence[str] | None = None, rows: Sequence[int] | None = None
) -> pa.Table:
    """A stored table: all of it, or some columns, or some rows (in the order given)."""
    if columns is None:
        table = index.read_table(storage.read(name))
    else:
        with open_object(storage, name, storage.size(name)) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)  # no threads: index.read_table says why
            table = file.read(columns=list(columns), use_threads=False)
    return table if rows is None else table.take(pa.array(rows, type=pa.int64()))


def list_tables(storage: Storage, prefix: str) -> list[str]:
    """Names of the Parquet objects below `prefix`, ascending."""
    return sorted(info.name for info in storage.list(prefix) if info.name.endswith(".parquet"))
