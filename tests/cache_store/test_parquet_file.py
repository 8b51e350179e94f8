from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.frame import literal_frames
from cache_store.parquet_file import Column, RowGroupFile

COMPRESSORS = (None, zstandard.ZstdCompressor(level=1).compress, literal_frames().compress)


def write(columns: list[Column], rows: list[list[Any]], facts: dict[str, str]) -> bytes:
    fields = [pa.field(c.name, pa.large_string() if c.text else pa.large_binary(), nullable=False) for c in columns]
    sink = io.BytesIO()
    file = RowGroupFile(sink, columns, pa.schema(fields, metadata=facts))
    for row in rows:
        file.write_row(row)
    file.write_footer()
    return sink.getvalue()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_arrow_reads_any_values(data: Any) -> None:
    # More than 14 columns or rows take Thrift's long form of a list.
    count = data.draw(st.integers(1, 17), label="columns")
    columns = [
        Column(f"c{n}", data.draw(st.sampled_from(COMPRESSORS)), text=data.draw(st.booleans())) for n in range(count)
    ]
    facts = data.draw(st.dictionaries(st.text(min_size=1), st.text(), min_size=1, max_size=3))
    value = st.binary(max_size=300)
    rows = [
        [data.draw(st.text(max_size=40)).encode() if c.text else data.draw(value) for c in columns]
        for _ in range(data.draw(st.integers(0, 16), label="rows"))
    ]
    content = write(columns, rows, facts)
    file = pq.ParquetFile(io.BytesIO(content))
    assert {k.decode(): v.decode() for k, v in file.schema_arrow.metadata.items()} == facts
    assert file.metadata.num_rows == file.metadata.num_row_groups == len(rows)
    table = file.read()
    wanted = [pa.large_string() if column.text else pa.large_binary() for column in columns]
    assert [field.type for field in table.schema] == wanted
    for number, column in enumerate(columns):
        found = table.column(number).to_pylist()
        assert [v.encode() if column.text else v for v in found] == [row[number] for row in rows]


def test_the_footer_describes_the_pages(tmp_path: Path) -> None:
    columns = [Column("plain", None), Column("packed", COMPRESSORS[1])]
    content = write(columns, [[b"x" * 100, b"y" * 5000], [b"", b"z"]], {"a": "b"})
    metadata = pq.read_metadata(io.BytesIO(content))
    end = 4
    for row in range(2):
        group = metadata.row_group(row)
        stored = 0
        for number in range(2):
            chunk = group.column(number)
            assert chunk.data_page_offset == end
            assert chunk.compression == ("UNCOMPRESSED", "ZSTD")[number]
            assert (chunk.is_stats_set, chunk.has_dictionary_page) == (False, False)
            end += chunk.total_compressed_size
            stored += chunk.total_uncompressed_size
        assert group.total_byte_size == stored
    assert metadata.row_group(0).column(1).total_uncompressed_size > 5000
    assert metadata.row_group(0).column(1).total_compressed_size < 200
    path = tmp_path / "s.parquet"
    path.write_bytes(content)
    sizes = duckdb.sql(f"SELECT octet_length(plain), octet_length(packed) FROM '{path}'").fetchall()
    assert sizes == [(100, 5000), (0, 1)]


def test_a_row_needs_every_column() -> None:
    with pytest.raises(ValueError, match="zip"):
        write([Column("a", None), Column("b", None)], [[b"x"]], {})


@given(st.binary(max_size=2000))
def test_frames_are_ordinary_and_state_their_size(data: bytes) -> None:
    frame = literal_frames().compress(data)
    assert zstandard.frame_content_size(frame) == len(data)
    assert pa.Codec("zstd").decompress(frame, len(data), asbytes=True) == data
