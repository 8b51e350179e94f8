from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import codecs
from cache_store.reader import CacheReader
from cache_store.schema import CODECS
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec


def test_every_codec_has_its_sizes_speeds_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "ROUNDS", 1)
    monkeypatch.setattr(codecs, "CALIBRATION", 3)
    storage = open_storage(str(tmp_path))
    build_cache(storage, make_spec(codec="raw", hidden_size=256), 6, tokens=40)
    rows = {row["codec"]: row for row in codecs.measure(CacheReader(storage))}
    assert set(rows) == {"zstd1 raw", *(f"{name} {kind}" for name in CODECS for kind in ("level 1", "shard"))}
    assert rows["raw shard"]["of raw"] == 1.0
    assert 0.6 < rows["bss1 shard"]["of raw"] < 0.8
    assert rows["f8r shard"]["of raw"] < rows["i8cr shard"]["of raw"] < rows["bss1 shard"]["of raw"]
    assert rows["bss1 shard"]["row error, largest"] == 0.0
    assert 0 < rows["i8cr shard"]["row error, mean"] < rows["i8cr shard"]["row error, largest"] <= 0.01
    assert all(row["decode GB/s"] > 0 for row in rows.values())
