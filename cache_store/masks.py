"""Other loss masks for the same states: derived from the index, or a small table beside the shards.

No shard is read or written. A mask is a list of spans [start, end) per sample, kept as the index keeps them. A cache
that stores the last hidden state only where it is needed can take supervision away, but never add it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache_store import index
from cache_store.errors import CacheError, CacheMismatch, NotFound
from cache_store.schema import CacheSpec
from cache_store.storage import Storage

FOLDER = "masks/"
RULES = ("stored", "last_turn", "first_turn")
"""Masks derived from the index: as built; only a sample's last, or first, supervised run."""
TABLE_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.large_string(), nullable=False),
        pa.field("spans", pa.large_binary(), nullable=False),  # int32 pairs [start, end), little-endian
    ]
)


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of n samples: those of sample i are `pairs[offsets[i]:offsets[i + 1]]`."""

    offsets: np.ndarray
    """int64 [n + 1]."""
    pairs: np.ndarray
    """int32 [m, 2]: start, end."""

    @classmethod
    def from_column(cls, column: pa.ChunkedArray) -> Spans:
        """Read an index's `spans` column."""
        array = column.combine_chunks()
        array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
        if not len(array):
            return cls(np.zeros(1, np.int64), np.zeros((0, 2), np.int32))
        _, offsets_buffer, data = array.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
        raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.zeros(0, np.uint8)
        return cls((offsets - offsets[0]) // 8, raw.view("<i4").reshape(-1, 2))

    def to_column(self) -> pa.Array:
        """As the index holds them."""
        data = np.ascontiguousarray(self.pairs, dtype="<i4")
        buffers = [None, pa.py_buffer(self.offsets * 8), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.large_binary(), len(self.offsets) - 1, buffers)

    def supervised(self) -> np.ndarray:
        """Supervised tokens per sample, int64 [n]."""
        widths = np.concatenate([[0], np.cumsum(self.pairs[:, 1] - self.pairs[:, 0], dtype=np.int64)])
        return widths[self.offsets[1:]] - widths[self.offsets[:-1]]

    def of(self, sample: int) -> list[list[int]]:
        """The spans of one sample, as [start, end)."""
        return self.pairs[self.offsets[sample] : self.offsets[sample + 1]].tolist()

    def one_of_each(self, *, last: bool) -> Spans:
        """Only the last (or first) span of every sample that has one."""
        counts = np.diff(self.offsets)
        chosen = (self.offsets[1:] - 1 if last else self.offsets[:-1])[counts > 0]
        return Spans(np.concatenate([[0], np.cumsum(counts > 0)]).astype(np.int64), self.pairs[chosen])

    def take(self, rows: np.ndarray) -> Spans:
        """The spans of these samples, in their order."""
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts) + np.repeat(self.offsets[:-1][rows], counts)
        return Spans(offsets, self.pairs[places])


def write_masks(storage: Storage, name: str, spans: Mapping[str, Sequence[tuple[int, int]]]) -> str:
    """Store masks under `masks/<name>.parquet` and return the object's name: sample id -> spans, for every sample.

    Raises CacheError for a bad name and AlreadyExists for one that is taken: masks never change under a reader.
    """
    where = _object_name(name)
    values = {
        "sample_id": list(spans),
        "spans": [np.asarray(list(value), dtype="<i4").tobytes() for value in spans.values()],
    }
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pydict(values, schema=TABLE_SCHEMA), sink, compression="zstd")
    storage.put(where, sink.getvalue(), if_absent=True)
    return where


def apply_masks(table: pa.Table, masks: str, spec: CacheSpec, storage: Storage) -> pa.Table:
    """The index with other masks: one of RULES, or the name of a table made by `write_masks`.

    Raises CacheError for a table that lacks samples of the cache or does not fit them, and CacheMismatch for masks
    that supervise tokens whose last hidden state the cache does not store.
    """
    if masks == "stored":
        return table
    stored = Spans.from_column(table["spans"])
    if masks in RULES:
        spans = stored.one_of_each(last=masks == "last_turn")
    else:
        where = storage.path(_object_name(masks))
        spans = _read_table(table, masks, storage)
        _check_spans(spans, index.column(table, "tokens"), table, where)
        if spec.last_hidden == "needed":
            _check_subset(spans, stored, table, where)
    for name, column in (("spans", spans.to_column()), ("supervised", pa.array(spans.supervised(), pa.int32()))):
        number = table.schema.get_field_index(name)
        table = table.set_column(number, table.schema.field(number), column)
    return table


def _object_name(name: str) -> str:
    if not name.replace("-", "").replace("_", "").isalnum() or name in RULES:
        raise CacheError(f"masks {name!r}: wanted one of {', '.join(RULES)}, or a name of letters, digits, - and _")
    return f"{FOLDER}{name}.parquet"


def _read_table(table: pa.Table, masks: str, storage: Storage) -> Spans:
    name = _object_name(masks)
    where = storage.path(name)
    try:
        found = index.read_table(storage.read(name))
    except NotFound as error:
        raise NotFound(f"{where} does not exist; masks is one of {', '.join(RULES)}, or such a table") from error
    except (pa.ArrowException, OSError) as error:
        raise CacheError(f"{where}: damaged mask table: {error}; write it again") from error
    if found.schema.remove_metadata() != TABLE_SCHEMA:
        raise CacheError(f"{where}: columns {found.schema.names}, wanted {TABLE_SCHEMA.names}")
    rows = pc.index_in(table["sample_id"], value_set=found["sample_id"].combine_chunks())
    if rows.null_count:
        lacking = table["sample_id"].filter(pc.is_null(rows))[0].as_py()
        raise CacheError(
            f"{where}: no masks for {rows.null_count} of the cache's {len(table)} samples, {lacking!r} among them; "
            "write masks for every sample (no spans: nothing supervised)"
        )
    return Spans.from_column(found["spans"]).take(rows.to_numpy().astype(np.int64))


def _check_spans(spans: Spans, tokens: np.ndarray, table: pa.Table, where: str) -> None:
    """Ascending, disjoint, not empty, inside the sample."""
    owner = np.repeat(np.arange(len(tokens)), np.diff(spans.offsets))
    start, end = spans.pairs[:, 0].astype(np.int64), spans.pairs[:, 1].astype(np.int64)
    bad = (start < 0) | (start >= end) | (end > tokens[owner])
    bad[1:] |= (owner[1:] == owner[:-1]) & (start[1:] <= end[:-1])
    if bad.any():
        sample = int(owner[np.argmax(bad)])
        raise CacheError(
            f"{where}: sample {table['sample_id'][sample].as_py()!r}: spans must ascend without touching, within its "
            f"{tokens[sample]} tokens"
        )


def _check_subset(spans: Spans, stored: Spans, table: pa.Table, where: str) -> None:
    """Every span inside one that the build supervised: elsewhere the last hidden state is not stored."""
    new_owner, old_owner = (np.repeat(np.arange(len(table)), np.diff(s.offsets)) for s in (spans, stored))
    # One ascending key over all samples: the last stored span that starts at or before a new one.
    new_key, old_key = ((owner << 32) + s.pairs[:, 0] for owner, s in ((new_owner, spans), (old_owner, stored)))
    place = np.searchsorted(old_key, new_key, side="right") - 1
    inside = place >= 0
    inside[inside] = (old_owner[place] == new_owner)[inside] & (spans.pairs[:, 1] <= stored.pairs[place, 1])[inside]
    if not inside.all():
        first = int(np.argmin(inside))
        start, end = spans.pairs[first].tolist()
        raise CacheMismatch(
            f"{where}: sample {table['sample_id'][int(new_owner[first])].as_py()!r}: [{start}, {end}) is not wholly "
            "supervised in the cache, which stores the last hidden state only where it was needed (last_hidden: "
            "needed); build with last_hidden: all to supervise more later"
        )
