"""FORMAT.md's own reader, which knows nothing of this package, on shards of both kinds and every codec."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

import cache_store
from cache_store import codec
from cache_store.calibration import CALIBRATION
from cache_store.reader import CacheReader
from cache_store.schema import CODECS, LAST_CODECS, CacheSpec
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec

TEXT = (Path(cache_store.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
COUNT = 4


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 1
    assert "cache_store" not in blocks[0]
    namespace: dict[str, Any] = {}
    exec(compile(blocks[0], "FORMAT.md", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("form", ["parquet", "tar"])
@pytest.mark.parametrize("tag", CODECS)
@pytest.mark.parametrize("last_tag", LAST_CODECS)
def test_the_worked_example_reads_every_kind(
    by_hand: dict[str, Any], tmp_path: Path, form: str, tag: str, last_tag: str
) -> None:
    storage = open_storage(str(tmp_path))
    build_cache(storage, make_spec(format=form, codec=tag, last_codec=last_tag), COUNT)
    reader = CacheReader(storage)
    scales = json.loads((tmp_path / CALIBRATION).read_text()) if reader.spec.calibrated else {}
    for number in range(COUNT):
        sample, path = reader.read(number), tmp_path / reader.shard_of(number)
        if form == "tar":
            facts, read = by_hand["from_tar"](path, sample.sample_id)
        else:
            facts, read = by_hand["from_parquet"](path, number)
        assert (facts["codec"], facts["last_codec"]) == (tag, last_tag)
        shape = facts["shape"]
        found = by_hand["states"](tag, read("cap_hi"), read("cap_lo"), shape, scales.get("captured"))
        assert np.array_equal(found, codec.to_float(sample.hidden_states))
        rows = np.flatnonzero(sample.loss_mask[1:])
        shape = [1, len(rows), shape[2]]
        found = by_hand["states"](last_tag, read("last_hi"), read("last_lo"), shape, scales.get("last"))
        assert np.array_equal(found[0], codec.to_float(sample.last_hidden_state[rows]))


def test_duckdb_reads_a_shard(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    samples = build_cache(storage, make_spec(), COUNT)
    query = (
        "SELECT sample_id, json_extract_string(metadata, '$.domain'), octet_length(input_ids) // 4, cap_hi, cap_lo "
        f"FROM '{tmp_path}/shards/*.parquet' ORDER BY sample_id"
    )
    rows = duckdb.sql(query).fetchall()
    assert len(rows) == COUNT
    for (sample_id, domain, tokens, high, low), sample in zip(rows, samples, strict=True):
        assert (sample_id, domain, tokens) == (sample.sample_id, "math", len(sample.input_ids))
        bits = np.frombuffer(high, "u1").astype("u2") << 8 | np.frombuffer(low, "u1")
        assert np.array_equal(bits.reshape(sample.hidden_states.shape), sample.hidden_states)
    facts = duckdb.sql(f"SELECT key, value FROM parquet_kv_metadata('{tmp_path}/shards/*.parquet')").fetchall()
    assert (b"dspark.codec", b"bss1") in facts


def test_every_field_of_the_settings_is_described() -> None:
    section = TEXT.split("## cache.json")[1].split("\n## ")[0]
    for name in CacheSpec.__dataclass_fields__:
        assert f"`{name}`" in section
    for name in (*CODECS, *LAST_CODECS):
        assert f"| `{name}` |" in TEXT
