"""A whole cache in a bucket behind a misbehaving proxy, and writers that die between any two requests."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_store.audit import verify_cache
from cache_store.bucket import S3Backend
from cache_store.dataset import TargetCacheStream, make_loader
from cache_store.disk_cache import DiskCacheOptions
from cache_store.errors import CacheIncomplete, ShardCorrupt
from cache_store.ledger import Ledger, seal
from cache_store.mixture import Source
from cache_store.packing import StreamConfig
from cache_store.reader import CacheReader
from cache_store.retry import StorageOptions
from cache_store.schema import CacheSpec, TargetSample
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store import survival
from tests.cache_store.fault_proxy import FaultProxy, fault_proxy
from tests.cache_store.samples import make_sample, make_spec
from tests.cache_store.survival import REJECTED, check_whole, put_right, same_build, same_sample, sample_ids
from tests.conftest import S3Server

QUICK = StorageOptions(
    attempts=9, first_delay_s=0.01, read_timeout_s=3.0, floor_bytes_per_s=5_000, floor_window_s=0.3, part_mb=5
)
SPEC = make_spec(shard_bytes=6000)
COUNT = 6


class Crash(BaseException):
    """The process is gone."""


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(s3_server.port) as proxy:
        yield proxy


def place(s3_server: S3Server, endpoint_url: str) -> Storage:
    return open_storage(f"s3://{s3_server.bucket}/{uuid.uuid4().hex}", endpoint_url=endpoint_url, options=QUICK)


@pytest.fixture
def bucket(s3_server: S3Server, proxy: FaultProxy) -> Storage:
    return place(s3_server, proxy.endpoint_url)


def misbehave(proxy: FaultProxy) -> None:
    """Some of everything, spread over all kinds of requests."""
    for path in ("shards/", "commits/", "cache.json", "manifest.json", "index/", "list-type=2"):
        proxy.add("status", times=2, path_has=path, status=503, code="SlowDown")
        proxy.add("reset", path_has=path, after_bytes=200)
        proxy.add("short", path_has=path, after_bytes=100)
    for method, path in (("PUT", "shards/"), ("PUT", "commits/"), ("PUT", "cache.json"), ("PUT", "manifest.json")):
        proxy.add("status", times=1, method=method, path_has=path, status=500, code="InternalError")
        proxy.add("lost-answer", times=1, method=method, path_has=path)
    proxy.add("status", times=3, method="HEAD", status=429, code="TooManyRequests")
    proxy.add("trickle", path_has="shards/", after_bytes=50, pause_s=0.02)
    proxy.add("less", path_has="shards/", after_bytes=10)


def test_a_cache_is_built_and_read_through_every_fault(bucket: Storage, proxy: FaultProxy) -> None:
    misbehave(proxy)
    same_build(bucket, SPEC, COUNT)
    happened = sum(fault.times == 0 for fault in proxy.faults)
    proxy.faults.clear()
    misbehave(proxy)
    check_whole(bucket, SPEC, COUNT)
    happened += sum(fault.times == 0 for fault in proxy.faults)
    assert happened > 30
    assert CacheReader(bucket).manifest.duplicates == 0  # type: ignore[union-attr]


def test_a_stale_listing_loses_nothing_and_is_noticed(bucket: Storage, proxy: FaultProxy) -> None:
    create_cache(bucket, SPEC)
    assert Ledger(bucket).records() == []  # the proxy remembers this empty answer
    with CacheWriter(bucket, SPEC) as writer:
        for number in range(COUNT):
            writer.write(make_sample(SPEC, number))
    stale = proxy.add("stale-listing", times=99, path_has="list-type=2")
    with pytest.raises(CacheIncomplete, match="6 inputs are neither committed nor rejected"):
        seal(bucket, expected_ids=sample_ids(COUNT))
    stale.times = 0
    manifest = seal(bucket, expected_ids=sample_ids(COUNT))
    proxy.listings.clear()
    bucket.list("commits/")
    with CacheWriter(bucket, SPEC) as writer:
        writer.write(make_sample(SPEC, COUNT))
    stale.times = 99  # the newest record is missing from listings, the sealed ones are known by name
    assert len(Ledger(bucket).records()) == len(manifest.shards)
    with pytest.raises(CacheIncomplete, match=r"1 inputs are neither committed nor rejected \(s0006\)"):
        seal(bucket, expected_ids=sample_ids(COUNT + 1))
    stale.times = 0
    assert seal(bucket, expected_ids=sample_ids(COUNT + 1)).num_samples == COUNT + 1


def test_listings_that_forget_sealed_records_change_nothing(bucket: Storage, proxy: FaultProxy) -> None:
    create_cache(bucket, SPEC)
    for prefix in ("commits/", "shards/"):
        bucket.list(prefix)  # remembered empty
    same_build(bucket, SPEC, COUNT)
    for prefix in ("commits", "shards"):
        proxy.add("stale-listing", times=999, path_has=f"%2F{prefix}%2F")
    assert bucket.list("commits/") == []
    assert verify_cache(bucket).findings == ()
    assert same_build(bucket, SPEC, COUNT) == []


def test_damage_on_the_wire_is_read_again(bucket: Storage, proxy: FaultProxy, tmp_path: Path) -> None:
    same_build(bucket, SPEC, COUNT)
    for disk_cache in (None, DiskCacheOptions(path=str(tmp_path / "kept"), max_gb=0.001)):
        proxy.add("corrupt", path_has="/shards/", after_bytes=400)
        reader = CacheReader(bucket, disk_cache=disk_cache)
        for position in range(COUNT):
            assert same_sample(reader.read(position), make_sample(SPEC, position))
    proxy.add("corrupt", path_has="/shards/", after_bytes=400)
    assert verify_cache(bucket).findings == ()
    assert all(fault.times == 0 for fault in proxy.faults)
    proxy.add("corrupt", times=999, path_has="/shards/", after_bytes=400)
    with pytest.raises(ShardCorrupt, match=r"crc32c .* record says .*read twice.*cache_store repair") as caught:
        CacheReader(bucket).read(0)
    assert "\n" not in str(caught.value)
    assert verify_cache(bucket).damaged


def test_samples_are_fetched_once_per_machine(bucket: Storage, proxy: FaultProxy, tmp_path: Path) -> None:
    same_build(bucket, SPEC, COUNT)
    options = DiskCacheOptions(path=str(tmp_path / "kept"), max_gb=0.001)
    for _ in range(2):
        proxy.seen.clear()
        reader = CacheReader(bucket, disk_cache=options, verify="always")
        for position in (*range(COUNT), 2, 4):
            assert same_sample(reader.read(position), make_sample(SPEC, position))
    samples = {f"bytes={s.offset}-{s.offset + s.length - 1}" for r in Ledger(bucket).records() for s in r.samples}
    assert not samples & set(proxy.ranges("/shards/")), "the second reader took every sample from the disk"
    counts = reader.disk_cache().counts  # type: ignore[union-attr]
    assert (counts.hits, counts.misses, counts.damaged, counts.not_kept) == (COUNT + 2, 0, 0, 0)


def test_loader_workers_share_what_they_fetch(bucket: Storage, proxy: FaultProxy, tmp_path: Path) -> None:
    same_build(bucket, SPEC, COUNT)
    kept = DiskCacheOptions(path=str(tmp_path / "kept"), max_gb=0.001)
    config = StreamConfig(seed=5, global_batch_size=2, micro_batch_size=1, max_length=64, num_steps=9)
    sums = []
    for disk_cache, workers in ((None, 0), (kept, 2)):
        proxy.seen.clear()
        stream = TargetCacheStream([Source(storage=bucket, disk_cache=disk_cache)], config)
        loader = make_loader(stream, num_workers=workers, prefetch=2)
        sums.append([(batch.sample_ids, batch.hidden_states.float().sum().item()) for batch in loader])
    assert sums[0] == sums[1]
    samples = [f"bytes={s.offset}-{s.offset + s.length - 1}" for r in Ledger(bucket).records() for s in r.samples]
    fetched = [found for found in proxy.ranges("/shards/") if found in samples]
    assert sorted(map(str, fetched)) == sorted(samples), "three epochs, two processes, one fetch of each"


def samples_of(spec: CacheSpec) -> Callable[[Any, int], TargetSample]:
    """Samples made once: large ones take their time, and a frozen spec with a dict cannot be a key."""
    made = {number: make_sample(spec, number, tokens=12) for number in range(3)}
    return lambda _, number: made[number]


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int, after: bool) -> list[str]:
    """The process is gone before or after its step-th request, and none follows. Returns the requests made."""
    real, made = S3Backend._call, list[str]()

    def dying(self: S3Backend, method: str, size: int = 0, **arguments: Any) -> Any:
        made.append(method)
        if len(made) > step or (len(made) == step and not after):
            raise Crash
        answer = real(self, method, size, **arguments)
        if len(made) == step:
            raise Crash
        return answer

    monkeypatch.setattr(S3Backend, "_call", dying)
    monkeypatch.setattr(CacheWriter, "abandon", lambda self: None)  # a dead process runs no clean-up
    return made


LARGE = make_spec(hidden_size=190_000, codec="raw", shard_bytes=1 << 30)


@pytest.mark.parametrize(
    ("spec", "count", "in_parts"), [(SPEC, 3, False), pytest.param(LARGE, 1, True, marks=pytest.mark.slow)]
)
def test_a_writer_that_dies_between_any_two_requests(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, spec: CacheSpec, count: int, in_parts: bool
) -> None:
    monkeypatch.setattr(survival, "make_sample", samples_of(spec))
    seen: set[str] = set()
    for step in range(1, 100):
        storage = place(s3_server, s3_server.endpoint_url)
        finished = False
        with monkeypatch.context() as patch:
            made = crash_at(patch, step, after=step % 2 == 1)
            try:
                same_build(storage, spec, count)
                finished = True
            except Crash:
                seen.update(made)
        same_build(storage, spec, count)
        put_right(storage, spec, count)
        if finished:
            break
    assert finished
    assert "put_object" in seen
    assert ("complete_multipart_upload" in seen) == in_parts
    assert REJECTED.sample_id in Ledger(storage).rejected()
