from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import CacheError
from cache_store.fields import TensorError
from cache_store.manifest import Manifest, SampleRecord, ShardRecord, ShardSummary

COUNTS = st.integers(0, 2**53)
HEX = st.text("0123456789abcdef", min_size=8, max_size=8)


@st.composite
def sample_records(draw: st.DrawFn) -> SampleRecord:
    edges = sorted(draw(st.sets(st.integers(0, 50), max_size=8)))
    edges = edges[: len(edges) // 2 * 2]
    return SampleRecord(
        sample_id=draw(st.text(min_size=1)),
        offset=draw(COUNTS),
        length=draw(COUNTS),
        tokens=draw(st.integers(edges[-1] if edges else 0, 60)),
        supervised_spans=tuple(zip(edges[::2], edges[1::2], strict=True)),
        checksum=draw(HEX),
        finish=draw(st.none() | st.text()),
        domain=draw(st.none() | st.text()),
    )


ERRORS = st.lists(
    st.builds(TensorError, tensor=st.text(), rows=COUNTS, outliers=COUNTS, mean=st.floats(0, 1), max=st.floats(0, 1)),
    max_size=3,
).map(tuple)


@st.composite
def shard_records(draw: st.DrawFn) -> ShardRecord:
    samples = tuple(draw(st.lists(sample_records(), max_size=4)))
    texts = {name: draw(st.text()) for name in ("name", "format", "codec", "last_codec", "fingerprint")}
    return ShardRecord(
        **texts,
        num_samples=len(samples),
        num_tokens=sum(sample.tokens for sample in samples),
        num_bytes=draw(COUNTS),
        footer_bytes=draw(COUNTS),
        checksum=draw(HEX),
        calibration=draw(st.none() | st.text()),
        errors=draw(ERRORS),
        samples=samples,
    )


@given(shard_records())
def test_record_round_trip(record: ShardRecord) -> None:
    assert ShardRecord.from_json(record.to_json()) == record


@given(
    counts=st.lists(COUNTS, min_size=6, max_size=6),
    rejects=st.dictionaries(st.text(), st.dictionaries(st.text(), COUNTS, max_size=3), max_size=3),
    texts=st.lists(st.text(), min_size=3, max_size=3),
    used=st.lists(COUNTS, max_size=3),
    errors=ERRORS,
)
def test_manifest_round_trip(
    counts: list[int],
    rejects: dict[str, dict[str, int]],
    texts: list[str],
    used: list[int],
    errors: tuple[TensorError, ...],
) -> None:
    names = ("num_samples", "num_tokens", "num_supervised", "num_bytes", "duplicates", "rejected")
    shard = {"name": "s", "format": "parquet", "codec": "raw", "last_codec": "raw"}
    shard |= {"num_samples": 1, "num_bytes": 2, "footer_bytes": 1}
    manifest = Manifest(
        **dict(zip(names, counts, strict=True)),
        rejects=rejects,
        calibration=None,
        errors=errors,
        fingerprint=texts[0],
        index=texts[1],
        index_checksum=texts[2],
        shards=tuple(ShardSummary(**shard, used=count, checksum="00000000") for count in used),
    )
    assert Manifest.from_json(manifest.to_json()) == manifest


ERROR = {"tensor": "last", "rows": 3, "outliers": 1, "mean": 0.01, "max": 0.02}


def record_json(**sample_changes: Any) -> dict[str, Any]:
    sample = {"sample_id": "a", "offset": 4, "length": 9, "tokens": 5, "checksum": "0", "finish": None, "domain": None}
    sample |= {"supervised_spans": [[1, 3], [4, 5]], **sample_changes}
    record = {"name": "n", "format": "parquet", "codec": "raw", "fingerprint": "f", "checksum": "0"}
    record |= {"num_samples": 1, "num_tokens": 5, "num_bytes": 20, "footer_bytes": 3}
    record |= {"last_codec": "i8cr", "calibration": None, "errors": [ERROR]}
    return {"format_version": 2, **record, "samples": [sample]}


def test_the_hand_written_record_is_valid() -> None:
    record = ShardRecord.from_json(json.dumps(record_json()))
    assert record.samples[0].supervised == 3
    assert record.errors[0].max == 0.02


def test_version_1_knew_one_codec_no_domain_and_no_loss() -> None:
    data = {k: v for k, v in record_json().items() if k not in ("last_codec", "calibration", "errors")}
    del data["samples"][0]["domain"]
    record = ShardRecord.from_json(json.dumps({**data, "format_version": 1}))
    assert (record.last_codec, record.calibration, record.errors) == ("raw", None, ())
    assert record.samples[0].domain is None
    with pytest.raises(CacheError, match="lacks fields"):
        ShardRecord.from_json(json.dumps({**data, "format_version": 2, "errors": []}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**record_json(), "num_samples": 2}, "totals say 2 samples"),
        ({**record_json(), "num_tokens": 6}, "6 tokens"),
        ({**record_json(), "num_bytes": -1}, "num_bytes is -1"),
        ({**record_json(), "num_bytes": "20"}, "num_bytes is '20'"),
        ({**record_json(), "extra": 0}, r"unknown fields \['extra'\]"),
        ({**record_json(), "samples": {}}, "samples is dict"),
        ({**record_json(), "samples": [3]}, "where SampleRecord was wanted"),
        ({k: v for k, v in record_json().items() if k != "codec"}, r"lacks fields \['codec'\]"),
        ({**record_json(), "format_version": 0}, "format_version 0"),
        (record_json(supervised_spans=[[3, 1]]), "do not ascend"),
        (record_json(supervised_spans=[[1, 3], [3, 4]]), "do not ascend"),
        (record_json(supervised_spans=[[4, 6]]), "within 5 tokens"),
        (record_json(supervised_spans=[[1]]), "wanted a list"),
        (record_json(tokens=True), "tokens is True"),
        ({**record_json(), "errors": None}, "errors is NoneType"),
        ({**record_json(), "errors": [{**ERROR, "mean": 1}]}, "mean is 1"),
        ({**record_json(), "errors": [{**ERROR, "max": -0.5}]}, "max is -0.5"),
    ],
)
def test_wrong_records_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message) as caught:
        ShardRecord.from_json(json.dumps(data), "commits/x.json")
    assert "commits/x.json" in str(caught.value)
