"""The index of a sealed cache: one row per sample, sorted by id, so that positions do not depend on who wrote what.

It is small (about 100 bytes per sample) and columnar, so a cache of two million samples opens in seconds; the loss
mask comes from it, without touching a shard.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache_store.errors import CacheError
from cache_store.manifest import INDEXES, ShardRecord

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.large_string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),  # number of the shard in the manifest's list
        pa.field("row", pa.int32(), nullable=False),  # row group in the shard
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("spans", pa.large_binary(), nullable=False),  # int32 pairs [start, end), little-endian
        pa.field("checksum", pa.uint32(), nullable=False),  # crc32c of the range
        pa.field("finish", pa.large_string()),
        pa.field("domain", pa.large_string()),
    ]
)


def build(records: Sequence[ShardRecord]) -> pa.Table:
    """Index of the records' samples; of an id that stands several times, the first one in the records' order."""
    chosen: dict[str, tuple[int, int]] = {}
    for number, record in enumerate(records):
        for row, sample in enumerate(record.samples):
            chosen.setdefault(sample.sample_id, (number, row))
    rows = [(sample_id, *chosen[sample_id]) for sample_id in sorted(chosen)]
    samples = [records[number].samples[row] for _, number, row in rows]
    values: dict[str, list[Any]] = {
        "sample_id": [sample_id for sample_id, _, _ in rows],
        "shard": [number for _, number, _ in rows],
        "row": [row for _, _, row in rows],
        "offset": [sample.offset for sample in samples],
        "length": [sample.length for sample in samples],
        "tokens": [sample.tokens for sample in samples],
        "supervised": [sample.supervised for sample in samples],
        "spans": [np.asarray(sample.supervised_spans, dtype="<i4").tobytes() for sample in samples],
        "checksum": [int(sample.checksum, 16) for sample in samples],
        "finish": [sample.finish for sample in samples],
        "domain": [sample.domain for sample in samples],
    }
    return pa.Table.from_pydict(values, schema=SCHEMA)


def to_bytes(table: pa.Table) -> bytes:
    """The index as a Parquet file; the same table gives the same bytes."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, write_statistics=False)
    return sink.getvalue()


def read_table(content: bytes) -> pa.Table:
    """A small Parquet file, read by this thread alone.

    Arrow's own threads would still let go of `content` while the interpreter ends, which now and then aborts a process
    that had done its work: "terminate called without an active exception".
    """
    return pq.ParquetFile(pa.BufferReader(content), pre_buffer=False).read(use_threads=False)


def from_bytes(content: bytes, where: str) -> pa.Table:
    """Read `to_bytes`'s file. Raises CacheError when it is damaged or has other columns."""
    try:
        table = read_table(content)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CacheError(f"{where}: damaged index: {error}") from error
    if table.schema.names == SCHEMA.names[:-1]:  # format version 1
        table = table.append_column(SCHEMA.field("domain"), pa.nulls(len(table), pa.large_string()))
    if table.schema.remove_metadata() != SCHEMA:
        raise CacheError(f"{where}: columns {table.schema.names}, wanted {SCHEMA.names}")
    return table.combine_chunks()


def object_name(content: bytes) -> str:
    """Name by content: a reader that opened an older manifest keeps its own index."""
    return f"{INDEXES}{hashlib.sha256(content).hexdigest()[:16]}.parquet"


def column(table: pa.Table, name: str) -> np.ndarray:
    """A number column, [n]."""
    return table[name].to_numpy()


def column_list(table: pa.Table, name: str) -> list[Any]:
    """A text column as Python values."""
    return table[name].to_pylist()


def spans_at(table: pa.Table, position: int) -> np.ndarray:
    """[start, end) of every supervised run of a sample, int32 [k, 2]."""
    value = table["spans"][position].as_py()
    return np.frombuffer(value, dtype="<i4").reshape(-1, 2)


def counts(table: pa.Table, name: str) -> dict[str, int]:
    """Samples per value of a text column, most first ('unknown' where the build gave none)."""
    found = pc.value_counts(pc.fill_null(table[name], "unknown").combine_chunks()).to_pylist()
    return {item["values"]: item["counts"] for item in sorted(found, key=lambda item: -item["counts"])}
