from __future__ import annotations

import errno
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_store import backend as backend_module
from cache_store import retry
from cache_store.errors import AlreadyExists, NotFound, SampleRejected, StorageError
from cache_store.retry import StorageOptions
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import race_to_put

ATTEMPTS = StorageOptions().attempts


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "cache") if request.param == "folder" else f"memory://{tmp_path.name}")


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", waits.append)
    return waits


def test_objects_round_trip(storage: Storage, tmp_path: Path) -> None:
    storage.put("a/b", b"0123456789")
    storage.put("a/b", b"9876543210")
    file = tmp_path / "file"
    file.write_bytes(b"moved")
    storage.put("a/c", file)
    assert not file.exists()
    assert storage.read("a/b") == b"9876543210"
    assert storage.read_many(["a/c", "a/b"]) == [b"moved", b"9876543210"]
    assert storage.read_many([]) == []
    assert storage.read_range("a/b", 2, 3) == b"765"
    assert storage.read_range("a/b", 2, 0) == b""
    memory = bytearray(b"....")
    storage.read_into("a/b", 2, memoryview(memory)[1:])
    assert memory == b".765"
    assert storage.size("a/b") == 10
    assert [(info.name, info.size) for info in storage.list("a/")] == [("a/b", 10), ("a/c", 5)]
    assert [info.name for info in storage.list("a/c")] == ["a/c"]
    assert storage.list("none/") == []
    storage.delete("a/b")
    assert not storage.exists("a/b")
    assert storage.exists("a/c")


def test_move_gives_another_name_and_overwrites(storage: Storage) -> None:
    storage.put("a/b", b"one")
    storage.put("aside/x/b", b"two")
    storage.move("a/b", "aside/x/b")
    assert storage.read("aside/x/b") == b"one"
    assert [info.name for info in storage.list("")] == ["aside/x/b"]
    with pytest.raises(NotFound):
        storage.move("a/b", "elsewhere")


def test_listings_say_when_an_object_was_written(storage: Storage) -> None:
    before = time.time()
    storage.put("a/b", b"one")
    (info,) = storage.list("a/")
    assert info.modified is not None
    assert before - 2 <= info.modified <= time.time() + 2


def test_a_file_that_vanishes_while_it_is_listed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    for name in ("a/1", "a/2", "a/3"):
        storage.put(name, b"x")
    stat = Path.stat

    def vanishing(self: Path, *args: Any, **kwargs: Any) -> os.stat_result:
        if self.name == "2":
            raise FileNotFoundError(self)
        return stat(self, *args, **kwargs)

    monkeypatch.setattr(Path, "stat", vanishing)
    assert [info.name for info in storage.list("a/")] == ["a/1", "a/3"]


def test_missing_objects_are_not_found(storage: Storage) -> None:
    for call in (storage.read, storage.size, storage.delete, lambda name: storage.read_range(name, 0, 1)):
        with pytest.raises(NotFound, match="nothing does not exist"):
            call("nothing")


def test_object_that_ends_early_is_an_error(storage: Storage) -> None:
    storage.put("short", b"0123")
    with pytest.raises(StorageError, match="found 2 bytes at 2, wanted 5"):
        storage.read_range("short", 2, 5)
    with pytest.raises(StorageError, match="found 2 bytes at 2, wanted 5"):
        storage.read_into("short", 2, memoryview(bytearray(5)))


def test_conditional_put_keeps_the_first(storage: Storage, tmp_path: Path) -> None:
    storage.put("one", b"first", if_absent=True)
    file = tmp_path / "file"
    file.write_bytes(b"second")
    for data in (b"second", file):
        with pytest.raises(AlreadyExists):
            storage.put("one", data, if_absent=True)
    assert storage.read("one") == b"first"
    assert file.read_bytes() == b"second", "a file that was not published stays where it was"


def test_one_of_many_racers_wins(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    lost = race_to_put(storage, "prize", racers=8)
    assert sorted([*lost, int(storage.read("prize"))]) == list(range(8))


def test_nothing_is_visible_before_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    seen: list[list[str]] = []
    fsync = os.fsync

    def looking(descriptor: int) -> None:
        seen.append([info.name for info in storage.list("a/")])
        fsync(descriptor)

    monkeypatch.setattr(backend_module.os, "fsync", looking)
    storage.put("a/b", b"data")
    assert seen[0] == [], "the name appears only after the bytes are on disk"
    assert seen[-1] == ["a/b"], "and the folder is synced after it"
    assert storage.list("tmp/") == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_one_clear_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, no_waiting: list[float]
) -> None:
    storage = open_storage(str(tmp_path))

    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(backend_module.os, "fsync", full)
    with pytest.raises(StorageError, match=r"no space left \([\d,]+ bytes free\); free some space") as caught:
        storage.put("a/b", b"data")
    assert "\n" not in str(caught.value)
    assert storage.list("") == []
    assert no_waiting == [], "a full disk is not worth a retry"


def failing_backend(failures: int, error: Exception) -> Callable[[], Any]:
    left = [failures]

    def call() -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "done"

    return call


@pytest.mark.parametrize(
    "error", [TimeoutError("slow"), ConnectionResetError("reset"), OSError(errno.EBUSY, "SlowDown")]
)
def test_transient_errors_are_retried_with_growing_waits(
    tmp_path: Path, no_waiting: list[float], error: Exception
) -> None:
    storage = open_storage(str(tmp_path))
    assert storage._retry("read", "x", failing_backend(ATTEMPTS - 1, error)) == "done"
    assert len(no_waiting) == ATTEMPTS - 1
    assert no_waiting[-1] > 2 * no_waiting[0]
    with pytest.raises(StorageError, match=f"cannot read after {ATTEMPTS} attempts"):
        storage._retry("read", "x", failing_backend(ATTEMPTS, error))


@pytest.mark.parametrize(
    "error", [PermissionError("no"), FileNotFoundError("no"), OSError(errno.ENOSPC, "full"), ValueError("odd")]
)
def test_permanent_errors_are_tried_once(tmp_path: Path, no_waiting: list[float], error: Exception) -> None:
    with pytest.raises(StorageError):
        open_storage(str(tmp_path))._retry("read", "x", failing_backend(1, error))
    assert no_waiting == []


def test_travels_to_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("relative/cache")
    storage.put("x", b"1")
    data = pickle.dumps(storage)
    monkeypatch.chdir("/")  # Ray workers have another working folder
    assert pickle.loads(data).read("x") == b"1"
    assert open_storage(f"file://{tmp_path}/relative/cache").read("x") == b"1"


def test_places_that_cannot_take_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for url in (str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        with pytest.raises(StorageError, match="choose another place") as caught:
            open_storage(url).check_writable()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/cache", "unknown kind of storage 'ftp'"),
        ("S3://bucket/cache", "unknown kind of storage 'S3'"),
        ("s3:/bucket/cache", "found no '://'"),
        ("s3:bucket", "found no '://'"),
        ("s3://", "names no place"),
        ("s3:///cache", "names no place"),
        ("", "names no place"),
        (" ", "names no place"),
        ("file://", "names no place"),
    ],
)
def test_a_slip_of_the_pen_does_not_become_a_folder(url: str, message: str) -> None:
    with pytest.raises(StorageError, match=f"{message}.*wanted a folder or s3://bucket/prefix"):
        open_storage(url)


def test_check_writable_leaves_no_trace(storage: Storage) -> None:
    storage.check_writable()
    assert storage.list("") == []


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert (open_storage(str(tmp_path / "a" / "b")).free_bytes() or 0) > 0
    assert open_storage("memory://x").free_bytes() is None


def test_reject_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(SampleRejected("a", "too short")))
    assert (error.sample_id, error.reason, str(error)) == ("a", "too short", "sample 'a' rejected: too short")
