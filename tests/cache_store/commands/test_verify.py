from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache_store.cli import main
from cache_store.ledger import Ledger
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec


def test_no_bar_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 2)
    assert main(["verify", storage.url]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    assert found.out.startswith("sound: 1 shards, 2 samples")


def test_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 2)
    storage.put("shards/part-dead.parquet", b"left over")
    assert main(["verify", storage.url]) == 3
    assert f"cache_store gc {storage.url} --delete" in capsys.readouterr().out
    record = Ledger(storage).records()[0]
    content = bytearray(storage.read(record.name))
    content[record.samples[1].offset + record.samples[1].length - 2] ^= 1
    storage.put(record.name, bytes(content))
    assert main(["verify", storage.url]) == 1
    assert f"cache_store repair {storage.url}" in capsys.readouterr().out
    assert main(["verify", storage.url, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert record.samples[1].sample_id in {finding["sample_id"] for finding in findings}
