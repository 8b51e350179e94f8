"""The store against a real S3 server."""

from __future__ import annotations

import pickle
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from cache_store import bucket as bucket_module
from cache_store import storage as storage_module
from cache_store.audit import verify_cache
from cache_store.bucket import S3Backend
from cache_store.dataset import StreamConfig, TargetCacheStream, make_loader
from cache_store.errors import CacheMismatch, NotFound, StorageError
from cache_store.ledger import Ledger, Reject, seal
from cache_store.mixture import Source
from cache_store.reader import CacheReader
from cache_store.storage import Storage, open_storage
from cache_store.writer import create_cache
from tests.cache_store.samples import build_cache, make_spec, race_to_put
from tests.conftest import S3Server, free_ports


@pytest.fixture
def bucket(s3_server: S3Server) -> Storage:
    return open_storage(f"s3://{s3_server.bucket}/{uuid.uuid4().hex}", endpoint_url=s3_server.endpoint_url)


def test_objects_round_trip_with_ranges(bucket: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.check_writable()
    content = np.random.default_rng(0).bytes(300_000)
    bucket.put("a/one", content)
    file = tmp_path / "two"
    file.write_bytes(content[::-1])
    bucket.put("a/two", file)
    assert not file.exists(), "a Path is moved away"
    assert bucket.read("a/one") == content
    assert bucket.read_many(["a/two", "a/one"]) == [content[::-1], content]
    assert bucket.read_range("a/one", 1000, 5000) == content[1000:6000]
    monkeypatch.setattr(storage_module, "SPLIT_BYTES", 7_000)  # one range fetched in many pieces at once
    assert bucket.read_range("a/one", 1000, 250_000) == content[1000:251_000]
    with pytest.raises(StorageError, match=r"found 10 bytes at 299990, wanted 20"):
        bucket.read_range("a/one", 299_990, 20)
    assert [(info.name, info.size) for info in bucket.list("a/")] == [("a/one", 300_000), ("a/two", 300_000)]
    assert [info.name for info in bucket.list("a/t")] == ["a/two"]
    assert bucket.list("nothing/") == []
    bucket.delete("a/one")
    assert not bucket.exists("a/one")
    with pytest.raises(NotFound):
        bucket.read("a/one")
    assert bucket.free_bytes() is None


def test_urls_are_signed_as_every_bucket_accepts(bucket: Storage) -> None:
    backend = bucket.backend
    assert isinstance(backend, S3Backend)
    assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in backend._sign("a b")


@pytest.mark.parametrize(
    ("bucket_name", "region", "host"),
    [
        ("mine", "eu-west-1", "mine.s3.eu-west-1.amazonaws.com"),
        ("mine", "us-east-1", "mine.s3.amazonaws.com"),
        ("my.own", "eu-west-1", "s3.eu-west-1.amazonaws.com"),
    ],
)
def test_urls_of_aws_name_the_region(monkeypatch: pytest.MonkeyPatch, bucket_name: str, region: str, host: str) -> None:
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", region)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(S3Backend, "FINDS_REGION", False)  # asks the bucket itself
    backend = open_storage(f"s3://{bucket_name}/cache").backend
    assert isinstance(backend, S3Backend)
    for _ in range(2):
        assert urlsplit(backend._sign("x")).hostname == host


def test_the_endpoint_may_come_from_the_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint_url)
    storage = open_storage(f"s3://{s3_server.bucket}/{uuid.uuid4().hex}")
    storage.check_writable()
    storage.put("a", b"0123")
    assert storage.read_range("a", 1, 2) == b"12"
    assert [info.name for info in storage.list("")] == ["a"]


def test_one_of_many_racing_writers_wins(bucket: Storage) -> None:
    lost = race_to_put(bucket, "prize", racers=8)
    assert sorted([*lost, int(bucket.read("prize"))]) == list(range(8))


def test_wrong_bucket_is_refused_in_one_line(s3_server: S3Server) -> None:
    # SeaweedFS would create the bucket on the first put and so hide a typing mistake.
    wrong = open_storage("s3://tset-bucket/cache", endpoint_url=s3_server.endpoint_url)
    with pytest.raises(StorageError, match="bucket 'tset-bucket' does not exist") as caught:
        wrong.check_writable()
    assert "\n" not in str(caught.value)


def test_wrong_secret_is_refused_in_one_line(bucket: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    bucket_module.fsspec.get_filesystem_class("s3").clear_instance_cache()
    fresh = pickle.loads(pickle.dumps(bucket))
    try:
        with pytest.raises(StorageError, match="check credentials") as caught:
            fresh.check_writable()
        assert "\n" not in str(caught.value)
    finally:
        bucket_module.fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_missing_endpoint_is_refused_soon(s3_server: S3Server) -> None:
    nobody = open_storage("s3://test-bucket/cache", endpoint_url=f"http://127.0.0.1:{free_ports(1)[0]}")
    started = time.monotonic()
    with pytest.raises(StorageError, match="cannot reach the endpoint"):
        nobody.check_writable()
    assert time.monotonic() - started < 60  # a bound on the retries, not a speed


@pytest.mark.usefixtures("both_formats")
def test_a_cache_lives_in_a_bucket(bucket: Storage) -> None:
    spec = make_spec(shard_bytes=6000)
    samples = build_cache(bucket, spec, 13, sealed=False)
    Ledger(bucket).reject([Reject(sample_id="bad", stage="extract", reason="no tokens")])
    manifest = seal(bucket, expected_ids=[*(sample.sample_id for sample in samples), "bad"])
    assert (manifest.num_samples, manifest.rejected) == (13, 1)
    assert len(manifest.shards) > 1
    reader = CacheReader(pickle.loads(pickle.dumps(bucket)))
    for sample in samples:
        assert np.array_equal(reader.read_id(sample.sample_id).hidden_states, sample.hidden_states)
    assert verify_cache(bucket).findings == ()
    with pytest.raises(CacheMismatch, match=r"identity\.seed: cache has 1, this run wants 2"):
        create_cache(bucket, make_spec(shard_bytes=6000, identity={**spec.identity, "seed": 2}))


@pytest.mark.usefixtures("both_formats")
def test_loader_workers_read_a_bucket(bucket: Storage) -> None:
    build_cache(bucket, make_spec(shard_bytes=6000), 9)
    config = StreamConfig(seed=3, global_batch_size=4, micro_batch_size=2, max_length=64, num_steps=3)
    orders = []
    for workers in (0, 2):  # the client of this process is already open when the loader forks
        loader = make_loader(TargetCacheStream([Source(storage=bucket)], config), num_workers=workers, prefetch=2)
        orders.append([(batch.step, batch.sample_ids, batch.hidden_states.float().sum().item()) for batch in loader])
    assert orders[0] == orders[1]
