from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache_store.disk_cache import DiskCache, DiskCacheOptions
from cache_store.errors import CacheError
from cache_store.shard import checksum

SIZE = 1000


def open_cache(folder: Path, entries: int = 10) -> DiskCache:
    return DiskCache(DiskCacheOptions(path=str(folder), max_gb=entries * SIZE / 1e9))


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


def get(cache: DiskCache, number: int, fetched: list[int] | None = None) -> bytes:
    def fetch() -> bytes:
        if fetched is not None:
            fetched.append(number)
        return content(number)

    return cache.get(f"shard:{number}", checksum(content(number)), fetch)


def stored(folder: Path) -> list[Path]:
    return sorted((folder / "entries").glob("*/*"))


def test_second_read_comes_from_the_disk_in_any_process(tmp_path: Path) -> None:
    fetched: list[int] = []
    for _ in range(2):
        cache = open_cache(tmp_path)
        assert [get(cache, number, fetched) for number in (1, 2, 1)] == [content(1), content(2), content(1)]
    assert fetched == [1, 2]
    assert (cache.counts.hits, cache.counts.misses) == (3, 0)


def test_least_recently_used_goes_first_and_the_limit_holds(tmp_path: Path) -> None:
    cache, fetched = open_cache(tmp_path, entries=10), list[int]()
    for number in range(10):
        get(cache, number, fetched)
        os.utime(stored(tmp_path)[0])
    for path in stored(tmp_path):  # all equally old, so that only what follows decides
        os.utime(path, ns=(0, 0))
    get(cache, 3)
    get(cache, 99)
    assert sum(path.stat().st_size for path in stored(tmp_path)) <= 10 * SIZE
    fetched.clear()
    get(cache, 3, fetched)
    get(cache, 99, fetched)
    assert fetched == []
    for number in range(100, 160):
        get(cache, number)
        assert sum(path.stat().st_size for path in stored(tmp_path)) <= 10 * SIZE
    assert get(cache, 3, fetched) == content(3)
    assert fetched == [3]


def test_changed_entry_is_fetched_anew(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    get(cache, 1)
    (path,) = stored(tmp_path)
    for damage in (b"", content(1)[:-1], b"x" + content(1)[1:]):
        path.write_bytes(damage)
        assert get(cache, 1) == content(1)
        assert path.read_bytes() == content(1)
    assert cache.counts.damaged == 3


def test_damage_at_the_source_is_not_kept(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    assert cache.get("shard:1", checksum(b"good"), lambda: b"evil") == b"evil", "the reader judges"
    assert stored(tmp_path) == []
    assert cache.counts.not_kept == 1


def test_failed_fetch_blocks_nobody(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)

    def fails() -> bytes:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        cache.get("shard:1", checksum(content(1)), fails)
    assert get(cache, 1) == content(1)


def test_limits_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    options = DiskCacheOptions(path=str(tmp_path / "a"), max_gb=999 / 1e9)
    with pytest.raises(CacheError, match=r"999 bytes cannot hold the largest sample of 1,000 bytes; raise max_gb"):
        options.check(largest=SIZE)
    options.check(largest=999)
    with pytest.raises(CacheError, match=r"needs [\d,]+ more, the disk has [\d,]+ free; lower max_gb"):
        DiskCache(DiskCacheOptions(path=str(tmp_path / "b"), max_gb=1e9))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match="choose another folder"):
        open_cache(tmp_path / "file")
    with pytest.raises(ValueError, match="positive limit"):
        DiskCacheOptions(path="x", max_gb=0)


def test_lower_limit_shrinks_what_is_there(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, entries=10)
    for number in range(8):
        get(cache, number)
    open_cache(tmp_path, entries=4)
    assert len(stored(tmp_path)) == 4


def test_full_disk_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(tmp_path)

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert get(cache, 1) == content(1)
    assert cache.counts.not_kept == 1
    assert get(cache, 1) == content(1)
    assert len(stored(tmp_path)) == 1


def test_leftovers_of_a_killed_process_go(tmp_path: Path) -> None:
    open_cache(tmp_path)
    (tmp_path / "tmp" / "half").write_bytes(b"x" * SIZE)
    (tmp_path / "usage").write_bytes(b"%031d\n" % (10**9))  # it died between counting and writing
    cache = open_cache(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []
    for number in range(9):
        get(cache, number)
    assert len(stored(tmp_path)) == 9


def run_all(workers: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=worker) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_fetch_once(tmp_path: Path) -> None:
    cache, fetched = open_cache(tmp_path, entries=30), list[int]()

    def work() -> None:
        for number in range(20):
            assert get(cache, number, fetched) == content(number)

    run_all([work] * 6)
    assert sorted(fetched) == list(range(20))


def read_in_a_process(folder: str, log: str, start: int) -> None:
    cache = open_cache(Path(folder), entries=60)
    for step in range(30):
        number = (start + step) % 30

        def fetch(number: int = number) -> bytes:
            with open(log, "ab") as file:  # appending one short line is atomic
                file.write(b"%d\n" % number)
            return content(number)

        assert cache.get(f"shard:{number}", checksum(content(number)), fetch) == content(number)


def test_processes_fetch_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=read_in_a_process, args=(str(tmp_path / "cache"), str(log), 7 * number))
        for number in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(map(int, log.read_text().split())) == list(range(30))
