from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cache_store import parquet_shard
from cache_store.errors import CacheError, SampleRejected
from cache_store.fields import FieldCodec, FieldCodecs
from cache_store.manifest import SampleRecord
from cache_store.parquet_shard import (
    ParquetShardWriter,
    RangeWindow,
    parse_footer,
    read_row,
    shard_schema,
)
from cache_store.schema import CacheSpec, TargetSample
from tests.cache_store.samples import make_sample, make_spec


def exact_codecs(spec: CacheSpec) -> FieldCodecs:
    return FieldCodecs(FieldCodec(spec.codec), FieldCodec(spec.last_codec))


def write_shard(path: Path, spec: CacheSpec, samples: list[TargetSample]) -> tuple[int, int, tuple[SampleRecord, ...]]:
    writer = ParquetShardWriter(path, spec, exact_codecs(spec))
    for sample in samples:
        writer.add(sample)
    num_bytes, footer_bytes, _, records = writer.finish()
    return num_bytes, footer_bytes, records


def test_any_parquet_reader_gives_the_states_back(tmp_path: Path) -> None:
    # Nothing of this project: two columns, interleaved by hand, as FORMAT.md says.
    spec = make_spec()
    samples = [make_sample(spec, number) for number in range(3)]
    write_shard(tmp_path / "s.parquet", spec, samples)
    file = pq.ParquetFile(tmp_path / "s.parquet")
    assert file.schema_arrow.metadata[b"dspark.dtype"] == b"bfloat16"
    for number, sample in enumerate(samples):
        row = file.read_row_group(number)
        tokens = len(sample.input_ids)
        assert row["sample_id"][0].as_py() == sample.sample_id
        assert np.frombuffer(row["input_ids"][0].as_py(), "<i4").tolist() == sample.input_ids.tolist()
        assert list(row["loss_mask"][0].as_py()) == sample.loss_mask.tolist()
        for prefix, wanted in (
            ("cap", sample.hidden_states),
            ("last", sample.last_hidden_state[:-1][sample.loss_mask[1:]]),
        ):
            high, low = (np.frombuffer(row[f"{prefix}_{part}"][0].as_py(), "u1") for part in ("hi", "lo"))
            bits = (high.astype("u2") << 8 | low).reshape(-1, spec.hidden_size)
            assert np.array_equal(bits, wanted.reshape(-1, spec.hidden_size))
        assert wanted.shape[0] < tokens


def test_raw_codec_is_plain_bf16(tmp_path: Path) -> None:
    spec = make_spec(codec="raw")
    sample = make_sample(spec, 0)
    write_shard(tmp_path / "s.parquet", spec, [sample])
    row = pq.ParquetFile(tmp_path / "s.parquet").read_row_group(0)
    assert row["cap_hi"][0].as_py() == b""
    assert row["cap_lo"][0].as_py() == sample.hidden_states.astype("<u2").tobytes()


def test_layout_is_one_row_group_per_sample_without_extras(tmp_path: Path) -> None:
    spec = make_spec()
    samples = [make_sample(spec, number) for number in range(4)]
    num_bytes, _, records = write_shard(tmp_path / "s.parquet", spec, samples)
    metadata = pq.read_metadata(tmp_path / "s.parquet")
    assert metadata.num_row_groups == metadata.num_rows == 4
    end = 4
    for row, record in enumerate(records):
        assert record.offset == end, "samples lie one after another, without gaps"
        end = record.offset + record.length
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(row).column(number)
            stored_plain = chunk.path_in_schema in ("cap_lo", "last_lo")
            assert chunk.compression == ("UNCOMPRESSED" if stored_plain else "ZSTD")
            assert not chunk.has_dictionary_page
            assert not chunk.is_stats_set
    assert end <= num_bytes


def test_bytes_stay_close_to_the_payload(tmp_path: Path) -> None:
    spec = make_spec(codec="raw", hidden_size=512, last_hidden="all")
    samples = [make_sample(spec, number, tokens=100) for number in range(3)]
    num_bytes, _, _ = write_shard(tmp_path / "s.parquet", spec, samples)
    payload = sum(sample.hidden_states.nbytes + sample.last_hidden_state.nbytes for sample in samples)
    assert num_bytes <= 1.02 * payload


@pytest.mark.parametrize("counts", [(1,), (5, 5), (5, 9)])
def test_schema_never_depends_on_the_samples(tmp_path: Path, counts: tuple[int, ...]) -> None:
    spec = make_spec()
    write_shard(tmp_path / "s.parquet", spec, [make_sample(spec, n, tokens=t) for n, t in enumerate(counts)])
    found = pq.read_schema(tmp_path / "s.parquet")
    assert found.equals(shard_schema(spec), check_metadata=True)
    narrow = (pa.types.is_binary, pa.types.is_string, pa.types.is_list)
    assert not any(check(field.type) for field in found for check in narrow), "32-bit offsets overflow at 2 GiB"


def test_plane_beyond_a_page_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    monkeypatch.setattr(parquet_shard, "MAX_PLANE_BYTES", 1000)
    writer = ParquetShardWriter(tmp_path / "s.parquet", spec, exact_codecs(spec))
    writer.add(make_sample(spec, 0, tokens=1000 // 32))
    with pytest.raises(SampleRejected, match="pages end at 2 GiB"):
        writer.add(make_sample(spec, 1, tokens=1000 // 32 + 1))
    assert len(writer.finish()[3]) == 1


@settings(max_examples=30, deadline=None)
@given(data=st.data(), codec=st.sampled_from(["bss1", "raw"]), last_hidden=st.sampled_from(["needed", "all"]))
def test_a_row_is_decoded_from_its_range_and_the_footer(
    tmp_path_factory: pytest.TempPathFactory, data: Any, codec: str, last_hidden: str
) -> None:
    spec = make_spec(codec=codec, last_hidden=last_hidden, hidden_size=3)
    samples = []
    for number in range(data.draw(st.integers(1, 4))):
        tokens = data.draw(st.integers(1, 9))
        states = data.draw(hnp.arrays(np.uint16, (2, tokens, 3)))
        mask = data.draw(hnp.arrays(bool, tokens))
        samples.append(make_sample(spec, number, tokens=tokens, hidden_states=states, loss_mask=mask))
    path = tmp_path_factory.mktemp("shard") / "s.parquet"
    _, footer_bytes, records = write_shard(path, spec, samples)
    content = path.read_bytes()
    footer = parse_footer(content[-footer_bytes:])
    for row, (sample, record) in enumerate(zip(samples, records, strict=True)):
        stored = read_row(footer, row, content[record.offset : record.offset + record.length])
        assert stored.sample_id == sample.sample_id
        assert stored.metadata == sample.metadata
        assert np.array_equal(stored.input_ids, sample.input_ids)
        assert np.array_equal(stored.loss_mask, sample.loss_mask)
        restored = np.zeros(record.tokens, bool)
        for start, end in record.supervised_spans:
            restored[start:end] = True
        assert np.array_equal(restored, sample.loss_mask)


def test_a_range_of_another_row_is_refused(tmp_path: Path) -> None:
    spec = make_spec()
    samples = [make_sample(spec, 0, tokens=5), make_sample(spec, 1, tokens=9)]
    _, footer_bytes, records = write_shard(tmp_path / "s.parquet", spec, samples)
    content = (tmp_path / "s.parquet").read_bytes()
    footer = parse_footer(content[-footer_bytes:])
    with pytest.raises(CacheError, match="row 0 has"):
        read_row(footer, 0, content[records[1].offset : records[1].offset + records[1].length])
    with pytest.raises(CacheError, match="cannot be decoded"):
        read_row(footer, 0, b"\0" * records[0].length)


def test_damaged_footer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="damaged Parquet footer"):
        parse_footer(b"rubbish" * 10)
    with pytest.raises(CacheError, match="wanted a Parquet footer"):
        parquet_shard.footer_length(b"12345678")


def test_window_has_only_its_bytes() -> None:
    window = RangeWindow(b"abcdef", 100)
    assert window.seek(102) == 102
    assert bytes(window.read(3)) == b"cde"
    assert bytes(window.read()) == b"f"
    assert window.seek(0, 2) == 106
    window.seek(3)
    assert window.read(2) == b""
