from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cache_store.errors import NotFound
from cache_store.gc import collect_garbage
from cache_store.ledger import Ledger
from cache_store.manifest import MANIFEST, SPEC
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, record_name
from tests.cache_store.samples import make_sample, make_spec
from tests.cache_store.survival import check_whole, same_build

SPEC_OF_TEST = make_spec(shard_bytes=6000)
DAY = 24 * 3600


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "cache"))
    same_build(storage, SPEC_OF_TEST, 6)
    return storage


def leave_behind(storage: Storage, name: str, *, age_s: float) -> None:
    storage.put(name, b"left over")
    assert storage.local_root is not None
    then = time.time() - age_s
    os.utime(storage.local_root / name, (then, then))


def test_only_what_is_old_enough_goes_and_only_when_told(storage: Storage) -> None:
    leave_behind(storage, "shards/part-old.parquet", age_s=2 * DAY)
    leave_behind(storage, "shards/part-young.parquet", age_s=60)
    leave_behind(storage, "tmp/part-old.parquet", age_s=2 * DAY)
    leave_behind(storage, "index/old.parquet", age_s=2 * DAY)
    leave_behind(storage, "responses/data.parquet", age_s=2 * DAY)  # the pipeline's own: none of gc's business
    before = {info.name for info in storage.list("")}
    report = collect_garbage(storage)
    assert {(item.kind, item.name) for item in report.garbage} == {
        ("orphan", "shards/part-old.parquet"),
        ("unfinished", "tmp/part-old.parquet"),
        ("old-index", "index/old.parquet"),
    }
    assert [item.name for item in report.young] == ["shards/part-young.parquet"]
    assert report.deleted == 0
    assert {info.name for info in storage.list("")} == before
    report = collect_garbage(storage, delete=True)
    assert (report.deleted, report.freed_bytes) == (3, 27)
    assert before - {info.name for info in storage.list("")} == {item.name for item in report.garbage}
    collect_garbage(storage, delete=True, older_than_s=0)
    check_whole(storage, SPEC_OF_TEST, 6)


def test_a_running_build_is_safe(storage: Storage) -> None:
    writer = CacheWriter(storage, SPEC_OF_TEST)
    writer.write(make_sample(SPEC_OF_TEST, 6))
    assert collect_garbage(storage, delete=True).deleted == 0
    writer.close()
    assert same_build(storage, SPEC_OF_TEST, 7) == []
    check_whole(storage, SPEC_OF_TEST, 7)


def test_indexes_stay_while_the_manifest_is_damaged(storage: Storage) -> None:
    storage.put(MANIFEST, b"{}")
    storage.put(SPEC, b"{}")
    assert collect_garbage(storage, delete=True, older_than_s=0).deleted == 0
    assert len(storage.list("index/")) == 1


def test_a_stale_listing_deletes_no_shard(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Storage.list
    monkeypatch.setattr(Storage, "list", lambda self, prefix: [] if prefix == "commits/" else real(self, prefix))
    assert collect_garbage(storage, delete=True, older_than_s=0).deleted == 0
    storage.delete(MANIFEST)  # now no list names the records at all
    assert [item.kind for item in collect_garbage(storage, delete=True, older_than_s=0).garbage] == []
    monkeypatch.undo()
    assert len(Ledger(storage).records()) == len(storage.list("shards/"))


def test_a_record_that_comes_at_the_last_moment_saves_its_shard(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_behind(storage, "shards/part-late.parquet", age_s=2 * DAY)
    exists, asked = Storage.exists, []

    def late(self: Storage, name: str) -> bool:
        asked.append(name)
        return exists(self, name) or (name == record_name("shards/part-late.parquet") and len(asked) > 1)

    monkeypatch.setattr(Storage, "exists", late)
    assert collect_garbage(storage, delete=True).deleted == 0
    assert storage.size("shards/part-late.parquet") == 9


def test_what_repair_moved_aside_goes_only_when_named(storage: Storage) -> None:
    leave_behind(storage, "aside/20260101-000000/shards/part-bad.parquet", age_s=2 * DAY)
    assert collect_garbage(storage).garbage == ()
    assert [item.kind for item in collect_garbage(storage, aside=True).garbage] == ["aside"]


def test_a_place_without_a_cache_is_never_touched(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.put("shards/mine.parquet", b"precious")
    with pytest.raises(NotFound):
        collect_garbage(storage, delete=True, older_than_s=0)
    assert storage.exists("shards/mine.parquet")
