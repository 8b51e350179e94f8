"""One Parquet shard: one row is one sample is one row group, so a sample is one contiguous byte range.

The planes of a sample are binary columns; the pages of the `hi` planes are zstd frames, as Parquet has them, the `lo`
planes are stored as they are. 64-bit binary offsets, no dictionary, no statistics (FORMAT.md, "Parquet shards").
Legend: T tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from cache_store.errors import CacheError, SampleRejected
from cache_store.fields import FieldCodecs, TensorError, merge_errors
from cache_store.frame import literal_frames
from cache_store.manifest import SampleRecord
from cache_store.parquet_file import Column, RowGroupFile
from cache_store.parquet_page import COLUMNS, COMPRESSED, read_row_group
from cache_store.schema import CacheSpec, TargetSample
from cache_store.shard import (
    PLANES,
    CopiedFields,
    EncodedSample,
    StoredSample,
    checksum,
    encode_sample,
    metadata_text,
)

MAX_PLANE_BYTES = (1 << 31) - (1 << 16)
"""A Parquet page holds less than 2 GiB, and a plane is one page."""


def shard_schema(spec: CacheSpec) -> pa.Schema:
    """Columns of a shard; the schema's metadata says how to turn the planes back into arrays."""
    columns = [pa.field(name, pa.large_string(), nullable=False) for name in ("sample_id", "metadata")]
    columns += [pa.field(name, pa.large_binary(), nullable=False) for name in ("input_ids", "loss_mask", *PLANES)]
    facts = {
        "dspark.format_version": str(spec.format_version),
        "dspark.codec": spec.codec,
        "dspark.dtype": "bfloat16",
        "dspark.layer_ids": json.dumps(list(spec.layer_ids)),
        "dspark.hidden_size": str(spec.hidden_size),
        "dspark.last_hidden": spec.last_hidden,
    }
    if spec.format_version > 1:
        facts["dspark.last_codec"] = spec.last_codec
    return pa.schema(columns, metadata=facts)


def _columns() -> list[Column]:
    """How the pages of each column are compressed."""
    text, plane = zstandard.ZstdCompressor(level=1), literal_frames()
    return [
        Column(
            name,
            None if name not in COMPRESSED else plane.compress if name in PLANES else text.compress,
            text=name in ("sample_id", "metadata"),
        )
        for name in COLUMNS
    ]


class ParquetShardWriter:
    """Writes samples into one local file; nobody may read it before `finish`."""

    def __init__(self, path: Path, spec: CacheSpec, codecs: FieldCodecs) -> None:
        self.path, self.spec, self.codecs = path, spec, codecs
        self.ids: list[str] = []
        self._rows: list[EncodedSample] = []
        self._sink = path.open("wb")
        self._file = RowGroupFile(self._sink, _columns(), shard_schema(spec))

    def add(self, sample: TargetSample, copied: CopiedFields | None = None) -> None:
        """Append one sample, already validated. Raises SampleRejected for one that no page can hold."""
        row = encode_sample(self.spec, self.codecs, sample, copied)
        if (largest := max(plane.size for plane in row.planes)) > MAX_PLANE_BYTES:
            raise SampleRejected(sample.sample_id, f"plane of {largest} bytes, Parquet pages end at 2 GiB")
        texts = (row.sample_id.encode(), metadata_text(row.metadata).encode())
        self._file.write_row([*texts, row.input_ids, row.loss_mask, *row.planes])
        self.ids.append(row.sample_id)
        self._rows.append(row.without_planes())

    def tell(self) -> int:
        """Bytes written so far."""
        return self._sink.tell()

    def errors(self) -> tuple[TensorError, ...]:
        """What the codecs measured, one entry per tensor."""
        return merge_errors(error for row in self._rows for error in row.errors)

    def finish(self) -> tuple[int, int, str, tuple[SampleRecord, ...]]:
        """Close, read the file back and check it: (bytes, footer bytes, crc32c, one record per row)."""
        self._file.write_footer()
        self._sink.close()
        with pa.memory_map(str(self.path)) as source:
            content = source.read_buffer()
            metadata = pq.read_metadata(pa.BufferReader(content))
            if metadata.num_rows != len(self.ids) or metadata.num_row_groups != len(self.ids):
                raise CacheError(f"{self.path}: {metadata.num_rows} rows on disk, {len(self.ids)} were written")
            view = memoryview(content)
            records = []
            for number, row in enumerate(self._rows):
                offset, length = row_group_range(metadata, number)
                records.append(row.record(offset, view[offset : offset + length]))
            return len(view), footer_length(view[-8:]), checksum(view), tuple(records)

    def abandon(self) -> None:
        """Drop the unfinished file."""
        with contextlib.suppress(OSError):  # a full disk: the last buffer cannot be written, and need not be
            self._sink.close()
        self.path.unlink(missing_ok=True)


class ParquetLayout:
    """Reads rows of a shard by its footer. Raises CacheError when the footer is damaged."""

    def __init__(self, footer: bytes) -> None:
        if footer_length(footer[-8:]) != len(footer):
            raise CacheError(f"footer of {footer_length(footer[-8:])} bytes, record says {len(footer)}")
        self.footer = parse_footer(footer)

    def text_range(self, row: int, where: tuple[int, int], tokens: int) -> tuple[int, int]:
        """(offset, length) of a row's columns before the planes."""
        return text_range(self.footer, row)

    def read(self, row: int, offset: int, data: bytes | memoryview, *, states: bool = True) -> StoredSample:
        """Decode one row from its byte range (without states: its text range). Raises CacheError."""
        found = read_row_group(data) if states else None
        return found if found is not None else read_row(self.footer, row, data, states=states)

    def problems(self, spec: CacheSpec, content: memoryview, ranges: list[tuple[int, int]]) -> list[tuple[str, str]]:
        """(kind, detail) of columns, facts, counts and ranges that are not those of the settings and the record."""
        if not self.footer.schema.to_arrow_schema().equals(shard_schema(spec), check_metadata=True):
            return [("wrong-layout", "columns or their facts differ from the settings in cache.json")]
        rows, groups = self.footer.num_rows, self.footer.num_row_groups
        if rows != len(ranges) or groups != len(ranges):
            return [("wrong-counts", f"{rows} rows, record says {len(ranges)} samples")]
        places = [row_group_range(self.footer, row) for row in range(rows)]
        return [
            ("wrong-layout", f"row {row} lies at {found}, record says {wanted}")
            for row, (found, wanted) in enumerate(zip(places, ranges, strict=True))
            if found != wanted
        ]


def row_group_range(metadata: pq.FileMetaData, row: int) -> tuple[int, int]:
    """(offset, length) of the one byte range that holds a row group's column chunks."""
    group = metadata.row_group(row)
    chunks = [group.column(i) for i in range(group.num_columns)]
    start = min(chunk.data_page_offset for chunk in chunks)
    end = max(chunk.data_page_offset + chunk.total_compressed_size for chunk in chunks)
    return start, end - start


def text_range(metadata: pq.FileMetaData, row: int) -> tuple[int, int]:
    """(offset, length) of a row's columns before the planes: id, metadata, tokens and mask."""
    offset, length = row_group_range(metadata, row)
    group = metadata.row_group(row)
    planes = [group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema in PLANES]
    return offset, min([chunk.data_page_offset - offset for chunk in planes], default=length)


def footer_length(tail: Any) -> int:
    """Bytes of the footer with its tail, from a Parquet file's last 8 bytes. Raises CacheError for another file."""
    length, magic = struct.unpack("<I4s", bytes(tail))
    if magic != b"PAR1":
        raise CacheError(f"found {magic!r} at the end of the file, wanted a Parquet footer")
    return length + 8


def parse_footer(footer: bytes) -> pq.FileMetaData:
    """Parquet metadata from a footer alone (with its tail). Raises CacheError when it is damaged."""
    try:
        return pq.read_metadata(io.BytesIO(b"PAR1" + footer))
    except (pa.ArrowException, OSError) as error:
        raise CacheError(f"damaged Parquet footer: {error}") from error


class RangeWindow(io.RawIOBase):
    """A file that has only the bytes [offset, offset + len(data)); enough for Parquet to read one row group."""

    def __init__(self, data: bytes | memoryview, offset: int) -> None:
        self._data, self._offset, self._position = memoryview(data), offset, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Position in the whole file."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move within the whole file, whose end is the window's."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._offset + len(self._data)}
        self._position = base[whence] + offset
        return self._position

    def read(self, size: int | None = -1) -> Any:
        """Bytes of the window, without a copy; none outside it."""
        start = self._position - self._offset
        if start < 0 or start > len(self._data):
            return b""
        end = len(self._data) if size is None or size < 0 else min(start + size, len(self._data))
        self._position += end - start
        return self._data[start:end]


def read_row(footer: pq.FileMetaData, row: int, data: bytes | memoryview, *, states: bool = True) -> StoredSample:
    """Decode one row group from its byte range (without states: its text range, no planes). Raises CacheError."""
    offset, length = (row_group_range if states else text_range)(footer, row)
    if length != len(data):
        raise CacheError(f"row {row} has {length} bytes by the footer, found {len(data)}")
    columns = None if states else ["sample_id", "metadata", "input_ids", "loss_mask"]
    try:
        file = pq.ParquetFile(pa.PythonFile(RangeWindow(data, offset), mode="r"), metadata=footer, pre_buffer=False)
        table = file.read_row_group(row, columns=columns, use_threads=False)
        metadata = json.loads(table["metadata"][0].as_py())
        input_ids = _bytes_of(table, "input_ids").view("<i4")
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise CacheError(f"row {row} cannot be decoded: {error}") from error
    planes = [_bytes_of(table, name) if states else np.empty(0, np.uint8) for name in PLANES]
    return StoredSample(
        sample_id=table["sample_id"][0].as_py(),
        input_ids=input_ids,
        loss_mask=_bytes_of(table, "loss_mask") != 0,
        metadata=metadata,
        captured=(planes[0], planes[1]),
        last=(planes[2], planes[3]),
    )


def _bytes_of(table: pa.Table, name: str) -> np.ndarray:
    """The only value of a binary column as uint8, without a copy (the array keeps the buffer alive)."""
    value = table[name].chunk(0)[0].as_buffer()
    return np.frombuffer(value, dtype=np.uint8)
