from __future__ import annotations

import numpy as np
import pytest

from cache_store import index
from cache_store.errors import CacheError
from cache_store.manifest import SampleRecord, ShardRecord


def record(name: str, sample_ids: list[str], finish: str | None = "stop") -> ShardRecord:
    samples = tuple(
        SampleRecord(
            sample_id=sample_id,
            offset=10 * row,
            length=10,
            tokens=8,
            supervised_spans=((2, 4), (5, 8)),
            checksum="ffffffff",
            finish=finish,
            domain="math",
        )
        for row, sample_id in enumerate(sample_ids)
    )
    facts = {"format": "parquet", "codec": "raw", "last_codec": "raw", "fingerprint": "f", "checksum": "0"}
    sizes = {"num_bytes": 9, "footer_bytes": 1, "num_samples": len(samples), "num_tokens": 8 * len(samples)}
    return ShardRecord(name=name, **facts, **sizes, calibration=None, errors=(), samples=samples)


def test_rows_are_sorted_and_the_first_record_wins() -> None:
    table = index.build([record("a", ["m", "z"], finish=None), record("b", ["z", "b", "m"])])
    assert index.column_list(table, "sample_id") == ["b", "m", "z"]
    assert index.column(table, "shard").tolist() == [1, 0, 0]
    assert index.column(table, "row").tolist() == [1, 0, 1]
    assert index.column(table, "supervised").tolist() == [5, 5, 5]
    assert index.column(table, "checksum").tolist() == [0xFFFFFFFF] * 3
    assert index.spans_at(table, 0).tolist() == [[2, 4], [5, 8]]
    assert index.counts(table, "finish") == {"unknown": 2, "stop": 1}


@pytest.mark.parametrize("records", [[], [record("a", ["x"])], [record("a", ["x"]), record("b", ["y", "x"])]])
def test_file_round_trip_is_exact_and_repeatable(records: list[ShardRecord]) -> None:
    table = index.build(records)
    content = index.to_bytes(table)
    assert content == index.to_bytes(index.build(records))
    found = index.from_bytes(content, "index")
    assert found.equals(table)
    assert found.schema.remove_metadata() == index.SCHEMA
    assert index.object_name(content).startswith("index/")


def test_damaged_or_foreign_index_is_refused() -> None:
    content = index.to_bytes(index.build([record("a", ["x"])]))
    with pytest.raises(CacheError, match="damaged index"):
        index.from_bytes(content[:-20], "index/x")
    other = index.to_bytes(index.build([]).select(["sample_id"]))
    with pytest.raises(CacheError, match=r"columns \['sample_id'\], wanted"):
        index.from_bytes(other, "index/x")


def test_a_million_samples_stay_columns() -> None:
    # 32-bit offsets would end at 2 GiB of ids or spans.
    assert {str(field.type) for field in index.SCHEMA} <= {
        "large_string",
        "large_binary",
        "int32",
        "int64",
        "uint32",
    }
    assert np.dtype(index.column(index.build([]), "offset").dtype) == np.int64
