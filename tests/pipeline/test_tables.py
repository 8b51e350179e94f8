from __future__ import annotations

import io

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cache_store.storage import open_storage
from pipeline.tables import list_tables, open_object, read_table, write_table


def test_tables_by_column_and_row(tmp_path: object) -> None:
    storage = open_storage(str(tmp_path))
    table = pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    write_table(storage, "t/one.parquet", table)
    storage.put("t/other.json", b"{}")
    assert read_table(storage, "t/one.parquet") == table
    assert read_table(storage, "t/one.parquet", columns=["b"], rows=[2, 0]).to_pydict() == {"b": ["z", "x"]}
    assert list_tables(storage, "t/") == ["t/one.parquet"]
    assert list_tables(storage, "none/") == []


@given(st.binary(max_size=300), st.lists(st.tuples(st.integers(0, 350), st.integers(0, 80)), max_size=6))
def test_ranged_reads_equal_a_plain_file(data: bytes, reads: list[tuple[int, int]]) -> None:
    storage = open_storage("memory://tables-test")
    storage.put("object", data)
    plain = io.BytesIO(data)
    with open_object(storage, "object", len(data)) as stream:
        for offset, length in reads:
            stream.seek(offset)
            plain.seek(offset)
            assert stream.read(length) == plain.read(length)
