"""The hot path beside the Parquet library, on the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import CacheError
from cache_store.fields import FieldCodecs
from cache_store.frame import Frame, frame_of
from cache_store.ledger import Ledger
from cache_store.parquet_page import read_row_group
from cache_store.parquet_shard import ParquetLayout, read_row
from cache_store.reader import CacheReader
from cache_store.shard import StoredSample
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec


@pytest.fixture(scope="module", params=["bss1", "raw", "f8r"])
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, CacheReader]:
    storage = open_storage(str(tmp_path_factory.mktemp("pages") / "cache"))
    build_cache(storage, make_spec(codec=request.param), 6)
    reader = CacheReader(storage)
    return storage.read(reader.shards[0].name), reader


def states(stored: StoredSample, codecs: FieldCodecs, tokens: int) -> list[list[int]]:
    hidden, rows = np.zeros((2, tokens, 16), np.uint16), int(stored.loss_mask[1:].sum())
    last = np.zeros((1, rows, 16), np.uint16)
    codecs.captured.decode_into(stored.captured, tokens, hidden)
    codecs.last.decode_into(stored.last, rows, last)
    return [hidden.tolist(), last.tolist()]


def test_equal_to_the_parquet_library(shard: tuple[bytes, CacheReader]) -> None:
    content, reader = shard
    footer = ParquetLayout(content[-reader.shards[0].footer_bytes :]).footer
    for row, sample in enumerate(Ledger(reader.storage).records()[0].samples):
        data = content[sample.offset : sample.offset + sample.length]
        found, wanted = read_row_group(data), read_row(footer, row, data)
        assert found is not None
        assert (found.sample_id, found.metadata) == (wanted.sample_id, wanted.metadata)
        assert found.input_ids.tolist() == wanted.input_ids.tolist()
        assert found.loss_mask.tolist() == wanted.loss_mask.tolist()
        assert states(found, reader.codecs, sample.tokens) == states(wanted, reader.codecs, sample.tokens)


@given(cut=st.integers(0, 10**6), flip=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_damage_gives_none_an_error_or_other_values_of_the_same_size(
    shard: tuple[bytes, CacheReader], cut: int, flip: int, bit: int
) -> None:
    content, reader = shard
    sample = Ledger(reader.storage).records()[0].samples[2]
    data = bytearray(content[sample.offset : sample.offset + sample.length])
    assert read_row_group(bytes(data[: cut % len(data)])) is None
    data[flip % len(data)] ^= 1 << bit
    found = read_row_group(bytes(data))
    if found is not None:
        try:
            states(found, reader.codecs, sample.tokens)
        except CacheError:
            return
        assert found.captured[0].size + found.captured[1].size > 0


def test_other_layouts_are_left_to_the_library(shard: tuple[bytes, CacheReader], tmp_path: Path) -> None:
    content, _ = shard
    assert read_row_group(b"") is None
    assert read_row_group(content) is None
    table = pq.read_table(pa.BufferReader(content)).slice(0, 1)
    for name, options in (
        ("statistics", {"use_dictionary": False, "compression": "zstd"}),
        ("dictionary", {"write_statistics": False, "compression": "zstd"}),
        ("snappy", {"use_dictionary": False, "write_statistics": False, "compression": "snappy"}),
        ("v2", {"use_dictionary": False, "write_statistics": False, "data_page_version": "2.0"}),
    ):
        path = tmp_path / name
        pq.write_table(table, path, **options)
        group = pq.read_metadata(path).row_group(0)
        chunks = [group.column(number) for number in range(group.num_columns)]
        start = min(chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks)
        end = max(chunk.data_page_offset + chunk.total_compressed_size for chunk in chunks)
        assert read_row_group(path.read_bytes()[start:end]) is None, name


def test_frames_say_what_is_wrong() -> None:
    with pytest.raises(CacheError, match="damaged zstd frame"):
        Frame(memoryview(b"no frame at all"), 10).open()
    frame = pa.Codec("zstd").compress(b"0123456789", asbytes=True)
    assert bytes(Frame(memoryview(frame), 10, skip=4).open()) == b"456789"
    with pytest.raises(CacheError, match="zstd frame of 10 bytes, wanted 11"):
        Frame(memoryview(frame), 11).open()
    assert frame_of(memoryview(frame), 10) is not None
    assert frame_of(memoryview(frame), 9) is frame_of(memoryview(b"no frame"), 9) is None
