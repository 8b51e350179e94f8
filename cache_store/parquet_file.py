"""Writes Parquet files of one-row row groups, page by page: binary columns, one PLAIN value in one page each.

A Parquet library would do, but none lets its caller choose how a page is compressed, and byte planes want frames of
their own kind (`frame.literal_frames`): read 1.4 times as fast as those of zstd level 1, and written faster still
(`python -m benchmarks.codecs build/bench/raw`). What is here is the part of the format that such files need: page
headers and the footer in Thrift's compact encoding (comments use the names of Apache Parquet 2.6, parquet.thrift).
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

MAGIC = b"PAR1"
CREATED_BY = b"dspark-trainer"
MAX_PAGE_BYTES = (1 << 31) - 1
Compress = Callable[[bytes], bytes]

_BYTE_ARRAY, _REQUIRED, _UTF8, _PLAIN, _RLE, _DATA_PAGE = 6, 0, 0, 0, 3, 0
_UNCOMPRESSED, _ZSTD = 0, 6
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12  # Thrift's types
_STOP = b"\0"


@dataclass(frozen=True, slots=True)
class Column:
    """A required binary or string column; without `compress` its pages are stored as they are."""

    name: str
    compress: Compress | None
    text: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    offset: int
    uncompressed: int
    """Of page header and page, as if it were not compressed."""
    stored: int


class RowGroupFile:
    """A Parquet file under construction. schema: of the same columns, kept for Arrow, with the file's metadata."""

    def __init__(self, sink: BinaryIO, columns: Sequence[Column], schema: pa.Schema) -> None:
        self._sink, self._columns, self._schema = sink, tuple(columns), schema
        self._groups: list[list[_Chunk]] = []
        sink.write(MAGIC)

    def write_row(self, values: Sequence[Any]) -> None:
        """Append one row group of one row: a buffer for each column, each less than 2 GiB."""
        chunks = []
        for column, value in zip(self._columns, values, strict=True):
            view = memoryview(value).cast("B")
            length = struct.pack("<I", len(view))
            page: tuple[Any, ...] = (length, view)
            size = stored = len(length) + len(view)
            if column.compress is not None:
                frame = column.compress(b"".join(page))
                page, stored = (frame,), len(frame)
            header, offset = _page_header(size, stored), self._sink.tell()
            for part in (header, *page):
                self._sink.write(part)
            chunks.append(_Chunk(offset, len(header) + size, len(header) + stored))
        self._groups.append(chunks)

    def write_footer(self) -> None:
        """Write the file's metadata; nothing may follow."""
        footer = self._file_metadata()
        self._sink.write(footer + struct.pack("<I", len(footer)) + MAGIC)

    def _file_metadata(self) -> bytes:
        rows = len(self._groups)
        return _struct(
            (1, _I32, _int(2)),  # version
            (2, _LIST, _list(_STRUCT, [self._root(), *map(_leaf, self._columns)])),  # schema
            (3, _I64, _int(rows)),  # num_rows
            (4, _LIST, _list(_STRUCT, [self._row_group(chunks) for chunks in self._groups])),  # row_groups
            (5, _LIST, _list(_STRUCT, [_key_value(*pair) for pair in self._pairs()])),  # key_value_metadata
            (6, _BINARY, _binary(CREATED_BY)),  # created_by
        )

    def _root(self) -> bytes:
        return _struct(
            (3, _I32, _int(_REQUIRED)), (4, _BINARY, _binary(b"schema")), (5, _I32, _int(len(self._columns)))
        )

    def _pairs(self) -> list[tuple[bytes, bytes]]:
        facts = dict(self._schema.metadata or {})
        # Without it, Arrow would read 32-bit offsets where the schema has 64-bit ones.
        return [*facts.items(), (b"ARROW:schema", base64.b64encode(self._schema.serialize()))]

    def _row_group(self, chunks: list[_Chunk]) -> bytes:
        columns = [_column_chunk(column, chunk) for column, chunk in zip(self._columns, chunks, strict=True)]
        return _struct(
            (1, _LIST, _list(_STRUCT, columns)),  # columns
            (2, _I64, _int(sum(chunk.uncompressed for chunk in chunks))),  # total_byte_size
            (3, _I64, _int(1)),  # num_rows
            (5, _I64, _int(chunks[0].offset)),  # file_offset
            (6, _I64, _int(sum(chunk.stored for chunk in chunks))),  # total_compressed_size
        )


def _page_header(size: int, stored: int) -> bytes:
    data_page = _struct(
        (1, _I32, _int(1)),  # num_values
        (2, _I32, _int(_PLAIN)),  # encoding
        (3, _I32, _int(_RLE)),  # definition_level_encoding: there are none in a required column
        (4, _I32, _int(_RLE)),  # repetition_level_encoding
    )
    return _struct(
        (1, _I32, _int(_DATA_PAGE)),
        (2, _I32, _int(size)),  # uncompressed_page_size
        (3, _I32, _int(stored)),  # compressed_page_size
        (5, _STRUCT, data_page),  # data_page_header
    )


def _leaf(column: Column) -> bytes:
    fields = [(1, _I32, _int(_BYTE_ARRAY)), (3, _I32, _int(_REQUIRED)), (4, _BINARY, _binary(column.name.encode()))]
    if column.text:  # converted_type UTF8, logicalType STRING
        fields += [(6, _I32, _int(_UTF8)), (10, _STRUCT, _struct((1, _STRUCT, _struct())))]
    return _struct(*fields)


def _column_chunk(column: Column, chunk: _Chunk) -> bytes:
    metadata = _struct(
        (1, _I32, _int(_BYTE_ARRAY)),  # type
        (2, _LIST, _list(_I32, [_int(_RLE), _int(_PLAIN)])),  # encodings
        (3, _LIST, _list(_BINARY, [_binary(column.name.encode())])),  # path_in_schema
        (4, _I32, _int(_UNCOMPRESSED if column.compress is None else _ZSTD)),  # codec
        (5, _I64, _int(1)),  # num_values
        (6, _I64, _int(chunk.uncompressed)),  # total_uncompressed_size
        (7, _I64, _int(chunk.stored)),  # total_compressed_size
        (9, _I64, _int(chunk.offset)),  # data_page_offset
    )
    return _struct((2, _I64, _int(0)), (3, _STRUCT, metadata))  # file_offset, meta_data


def _key_value(key: bytes, value: bytes) -> bytes:
    return _struct((1, _BINARY, _binary(key)), (2, _BINARY, _binary(value)))


# --- Thrift's compact encoding ---------------------------------------------------------------------------------------


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    """Fields (id, type, encoded value) in ascending order of ids that differ by 15 at most."""
    content, last = b"", 0
    for number, kind, value in fields:
        content += bytes([(number - last) << 4 | kind]) + value
        last = number
    return content + _STOP


def _list(kind: int, items: Sequence[bytes]) -> bytes:
    size = len(items)
    head = bytes([size << 4 | kind]) if size < 15 else bytes([0xF0 | kind]) + _varint(size)
    return head + b"".join(items)


def _binary(value: bytes) -> bytes:
    return _varint(len(value)) + value


def _int(value: int) -> bytes:
    """Zigzag: all our numbers are positive."""
    return _varint(value << 1)


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)
