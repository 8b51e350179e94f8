from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache_store.cli import main
from cache_store.reader import CacheReader
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec


def test_first_samples_from_the_index_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 8)
    reader = CacheReader(storage)
    for shard in reader.shards:
        storage.delete(shard.name)
    assert main(["head", storage.url, "--n", "3", "--start", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["sample_id"] for row in rows] == reader.ids[2:5]
    for row in rows:
        position = row["position"]
        assert row["tokens"] == reader.tokens[position]
        assert row["length"] == reader.lengths[position]
        assert sum(end - start for start, end in row["spans"]) == row["supervised"]
        assert (row["domain"], row["finish"]) == ("math", "stop")
    assert main(["head", storage.url, "--n", "99"]) == 0
    shown = capsys.readouterr().out
    assert "8 of 8 samples" in shown
    assert "math" in shown
