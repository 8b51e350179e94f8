"""A cache that version 1 of the store wrote (tests/golden/README.md) stays readable, whole and convertible."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from cache_store.audit import verify_cache
from cache_store.cli import main
from cache_store.convert import Changes, StoredCache, convert
from cache_store.errors import CacheMismatch
from cache_store.ledger import seal
from cache_store.manifest import MANIFEST
from cache_store.reader import CacheReader
from cache_store.schema import FORMAT_VERSION
from cache_store.storage import Storage, open_storage
from cache_store.writer import create_cache
from tests.cache_store.samples import make_sample, make_spec
from tests.golden_data import GOLDEN

IDS = ["s0000", "s0001", "s0002"]


@pytest.fixture
def old(tmp_path: Path) -> Storage:
    return open_storage(str(shutil.copytree(GOLDEN / "cache_version_1", tmp_path / "old")))


def check(reader: CacheReader) -> None:
    assert reader.ids == IDS
    for number, name in enumerate(IDS):
        wanted, found = make_sample(reader.spec, number, tokens=6), reader.read_id(name)
        assert np.array_equal(found.hidden_states, wanted.hidden_states)
        assert np.array_equal(found.input_ids, wanted.input_ids)
        assert found.metadata == wanted.metadata


def test_it_reads_and_verifies(old: Storage) -> None:
    reader = CacheReader(old)
    assert (reader.spec.format_version, reader.spec.last_codec) == (1, "bss1")
    check(reader)
    assert verify_cache(old).findings == ()


def test_it_is_sealed_anew_under_its_own_fingerprint(old: Storage) -> None:
    before = CacheReader(old).manifest
    old.delete(MANIFEST)
    manifest = seal(old, expected_ids=[*IDS, "gone"])
    assert before is not None
    assert (manifest.fingerprint, manifest.num_bytes) == (before.fingerprint, before.num_bytes)
    check(CacheReader(old))


def test_every_command_that_only_looks_knows_it(old: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "head", "stats", "verify", "gc", "sample", "estimate"):
        assert main([command, old.url]) == 0, capsys.readouterr().err
    assert main(["diff", old.url, old.url]) == 0


def test_a_build_of_today_does_not_go_on_with_it(old: Storage) -> None:
    with pytest.raises(CacheMismatch, match=f"format_version: cache has 1, this run wants {FORMAT_VERSION}"):
        create_cache(old, make_spec(hidden_size=4, shard_bytes=1200))


@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_it_converts(old: Storage, tmp_path: Path, form: str) -> None:
    target = open_storage(str(tmp_path / "new"))
    manifest = convert(StoredCache(old), target, Changes(format=form))
    assert manifest.rejects == {"extract": {"short": 1}}
    reader = CacheReader(target)
    assert reader.spec.format_version == FORMAT_VERSION
    check(reader)
