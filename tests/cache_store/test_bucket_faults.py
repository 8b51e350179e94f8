"""Storage through a proxy that misbehaves, before a real S3 server: nothing unnoticed, nothing lost."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cache_store.bucket import S3Backend
from cache_store.errors import AlreadyExists, NotFound, StorageError
from cache_store.gc import collect_garbage
from cache_store.retry import StorageOptions, Transfer
from cache_store.storage import Storage, open_storage
from cache_store.writer import create_cache
from tests.cache_store.fault_proxy import FaultProxy, fault_proxy
from tests.cache_store.samples import make_spec
from tests.conftest import S3Server

QUICK = StorageOptions(
    attempts=4, first_delay_s=0.02, read_timeout_s=2.0, floor_bytes_per_s=20_000, floor_window_s=0.3, part_mb=5
)
CONTENT = np.random.default_rng(0).bytes(300_000)
MIB = 1 << 20


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_server: S3Server, proxy: FaultProxy) -> Storage:
    url = f"s3://{s3_server.bucket}/{uuid.uuid4().hex}"
    return open_storage(url, endpoint_url=proxy.endpoint_url, options=QUICK)


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests")])
def test_refused_requests_are_repeated_ever_more_slowly(
    bucket: Storage, proxy: FaultProxy, status: int, code: str
) -> None:
    for method in ("PUT", "GET", "HEAD", "DELETE"):
        proxy.add("status", times=3, method=method, path_has="/object", status=status, code=code)
    bucket.put("object", CONTENT)
    assert bucket.read_range("object", 5, 1000) == CONTENT[5:1005]
    assert bucket.size("object") == len(CONTENT)
    reads = [item.at for item in proxy.seen if item.method == "GET"]
    waits = [later - earlier for earlier, later in itertools.pairwise(reads)]
    assert len(waits) == 3
    assert waits[2] > waits[0]
    bucket.delete("object")
    assert not bucket.exists("object")


def test_listing_is_repeated_page_by_page(bucket: Storage, proxy: FaultProxy) -> None:
    for number in range(3):
        bucket.put(f"a/{number}", b"x")
    proxy.add("status", times=2, path_has="list-type=2")
    proxy.add("reset", path_has="list-type=2", after_bytes=40)
    assert [info.name for info in bucket.list("a/")] == ["a/0", "a/1", "a/2"]


def test_the_last_error_names_object_attempts_and_cause(bucket: Storage, proxy: FaultProxy) -> None:
    bucket.put("object", CONTENT)
    proxy.add("status", times=99, path_has="/object")
    with pytest.raises(StorageError, match=r"/object: cannot read after 4 attempts: OSError: .*503 SlowDown") as caught:
        bucket.read_range("object", 0, 100)
    assert "\n" not in str(caught.value)
    assert len(proxy.ranges("/object")) == 4


def read_anew(bucket: Storage, name: str, offset: int, length: int) -> bytes:
    return bucket.read_range(name, offset, length)


def read_in_place(bucket: Storage, name: str, offset: int, length: int) -> bytes:
    memory = bytearray(b"?" * length)
    bucket.read_into(name, offset, memoryview(memory))
    return bytes(memory)


@pytest.mark.parametrize("read", [read_anew, read_in_place])
@pytest.mark.parametrize("kind", ["reset", "short", "less"])
def test_a_broken_body_goes_on_where_it_broke(
    bucket: Storage, proxy: FaultProxy, kind: str, read: Callable[[Storage, str, int, int], bytes]
) -> None:
    bucket.put("object", CONTENT)
    for after in (100_000, 50_000):
        proxy.add(kind, path_has="/object", after_bytes=after)  # type: ignore[arg-type]
    assert read(bucket, "object", 1_000, 290_000) == CONTENT[1_000:291_000]
    starts = [int(str(value).removeprefix("bytes=").split("-")[0]) for value in proxy.ranges("/object")]
    assert len(starts) == 3
    assert starts == sorted(starts)
    assert starts[1] > 1_000, "what has arrived is not fetched again"
    assert starts[2] > starts[1]


def test_whole_objects_survive_broken_bodies(bucket: Storage, proxy: FaultProxy) -> None:
    names = [f"object{number}" for number in range(4)]
    for name in names:
        bucket.put(name, name.encode() + CONTENT)
    proxy.add("reset", times=2, path_has="/object", after_bytes=70_000)
    proxy.add("short", times=2, path_has="/object", after_bytes=90_000)
    assert bucket.read_many(names) == [name.encode() + CONTENT for name in names]


def test_an_object_replaced_between_two_tries_is_never_mixed(bucket: Storage, proxy: FaultProxy) -> None:
    old, new = b"o" * 100_000, b"n" * 100_000
    bucket.put("manifest.json", old)
    call = S3Backend.read

    def replaced_then_read(self: S3Backend, name: str, offset: int, transfer: Transfer) -> None:
        try:
            call(self, name, offset, transfer)
        except ConnectionError:
            bucket.put("manifest.json", new)
            raise

    proxy.add("reset", path_has="/manifest.json", after_bytes=50_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Backend, "read", replaced_then_read)
        assert bucket.read("manifest.json") == new


def test_a_trickling_connection_is_left(bucket: Storage, proxy: FaultProxy) -> None:
    bucket.put("object", CONTENT)
    trickle = proxy.add("trickle", path_has="/object", after_bytes=100_000)
    assert bucket.read_range("object", 0, len(CONTENT)) == CONTENT
    assert trickle.times == 0
    resumed = str(proxy.ranges("/object")[1])
    assert int(resumed.removeprefix("bytes=").split("-")[0]) >= 100_000
    proxy.add("trickle", path_has="/object", after_bytes=100_000)
    assert bucket.read("object") == CONTENT
    proxy.add("trickle", times=99, path_has="/object")
    with pytest.raises(StorageError, match=r"after 4 attempts: TooSlow: \d+ bytes in .* floor is 20,000 bytes/s"):
        bucket.read_range("object", 0, 200_000)


def test_a_silent_connection_is_left(s3_server: S3Server, proxy: FaultProxy) -> None:
    options = StorageOptions(attempts=3, first_delay_s=0.01, read_timeout_s=0.3)
    bucket = open_storage(f"s3://{s3_server.bucket}/silent", endpoint_url=proxy.endpoint_url, options=options)
    bucket.put("object", CONTENT)
    proxy.add("silent", path_has="/object", pause_s=1.0)
    assert bucket.read_range("object", 10, 20) == CONTENT[10:30]
    assert len(proxy.ranges("/object")) == 2


def test_large_ranges_are_split_and_each_piece_resumes(bucket: Storage, proxy: FaultProxy) -> None:
    content = np.random.default_rng(1).bytes(20 * MIB)
    bucket.put("large", content)
    proxy.add("reset", times=2, path_has="/large", after_bytes=3 * MIB)
    assert bucket.read_range("large", 1, 20 * MIB - 2) == content[1:-1]
    assert len(proxy.ranges("/large")) == 5, "three pieces, two of them in two parts"


@pytest.mark.parametrize("kind", ["status", "lost-answer"])
def test_upload_in_parts_repeats_only_what_failed(
    bucket: Storage, proxy: FaultProxy, tmp_path: Path, kind: str
) -> None:
    content = np.random.default_rng(2).bytes(17 * MIB)
    file = tmp_path / "shard"
    file.write_bytes(content)
    proxy.add(kind, times=2, method="PUT", path_has="partNumber")  # type: ignore[arg-type]
    proxy.add(kind, method="POST", path_has="uploadId")  # type: ignore[arg-type]
    bucket.put("shard", file)
    assert bucket.read_range("shard", 0, len(content)) == content
    assert sum(item.method == "PUT" for item in proxy.seen) == 6, "four parts, two of them twice"
    assert bucket.unfinished_uploads("") == []
    assert not file.exists()


def test_failed_upload_leaves_no_parts(bucket: Storage, proxy: FaultProxy, tmp_path: Path) -> None:
    file = tmp_path / "shard"
    file.write_bytes(bytes(12 * MIB))
    failing = proxy.add("status", times=99, method="PUT", path_has="partNumber=2")
    with pytest.raises(StorageError, match=r"/shard: cannot write after 4 attempts: OSError: .*made by the test"):
        bucket.put("shard", file)
    assert bucket.unfinished_uploads("") == []
    assert not bucket.exists("shard")
    failing.times = 0
    bucket.put("shard", file)  # the file has stayed for another try
    assert bucket.size("shard") == 12 * MIB


def test_parts_that_cannot_be_removed_are_named_and_found_later(
    bucket: Storage, proxy: FaultProxy, tmp_path: Path
) -> None:
    file = tmp_path / "shard"
    file.write_bytes(bytes(12 * MIB))
    proxy.add("status", times=99, method="PUT", path_has="partNumber=2")
    proxy.add("status", times=99, method="DELETE")
    with pytest.raises(StorageError, match=r"its parts could not be removed .*: cache_store gc does it later"):
        bucket.put("shard", file)
    proxy.faults.clear()
    (left,) = bucket.unfinished_uploads("")
    assert left.name == "shard"
    assert left.started is not None
    create_cache(bucket, make_spec())
    assert [item.kind for item in collect_garbage(bucket).young] == ["upload"], "a running build's own is safe"
    assert collect_garbage(bucket, delete=True, older_than_s=0).deleted == 1
    assert bucket.unfinished_uploads("") == []


def test_lost_answer_to_a_conditional_put_is_no_conflict(bucket: Storage, proxy: FaultProxy) -> None:
    proxy.add("lost-answer", method="PUT", path_has="/record")
    bucket.put("record", b"mine", if_absent=True)
    assert bucket.read("record") == b"mine"
    proxy.add("lost-answer", method="PUT", path_has="/record")
    with pytest.raises(AlreadyExists):
        bucket.put("record", b"other", if_absent=True)


@pytest.mark.parametrize(("size", "path"), [(1000, "/object"), (12 * MIB, "partNumber=2")])
def test_damage_on_the_way_up_is_noticed_by_the_store_and_sent_again(
    bucket: Storage, proxy: FaultProxy, tmp_path: Path, size: int, path: str
) -> None:
    content = np.random.default_rng(3).bytes(size)
    file = tmp_path / "shard"
    file.write_bytes(content)
    damage = proxy.add("corrupt-upload", method="PUT", path_has=path)
    bucket.put("object", file)
    assert damage.times == 0
    assert bucket.read_range("object", 0, size) == content


@pytest.mark.parametrize("name", ["a b/c d.txt", "ü/+&=%25#?.jsonl"])
def test_names_with_all_kinds_of_characters(bucket: Storage, name: str) -> None:
    bucket.put(name, CONTENT)
    assert [info.name for info in bucket.list("")] == [name]
    assert bucket.read_range(name, 7, 100) == CONTENT[7:107]
    assert bucket.read_many([name]) == [CONTENT]
    bucket.move(name, f"aside/{name}")
    assert bucket.size(f"aside/{name}") == len(CONTENT)
    assert not bucket.exists(name)


def test_missing_is_not_repeated(bucket: Storage, proxy: FaultProxy) -> None:
    for call in (bucket.read, bucket.size, lambda name: bucket.read_range(name, 0, 1)):
        proxy.seen.clear()
        with pytest.raises(NotFound):
            call("nothing")
        assert len(proxy.seen) == 1


def test_upload_memory_is_bounded_by_its_parts(
    bucket: Storage, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shard"
    with file.open("wb") as sink:
        sink.truncate(40 * MIB)
    sizes: list[int] = []
    call = S3Backend._call

    def noting(self: S3Backend, method: str, size: int = 0, **arguments: object) -> object:
        sizes.append(size)
        return call(self, method, size, **arguments)

    monkeypatch.setattr(S3Backend, "_call", noting)
    bucket.put("shard", file)
    assert max(sizes) == QUICK.part_bytes


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"floor_window_s": -1.0}, {"part_mb": 4}])
def test_options_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="wanted more"):
        StorageOptions(**wrong)  # type: ignore[arg-type]
