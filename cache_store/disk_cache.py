"""Samples of a bucket kept on a local disk: fetched once per machine, least recently used dropped first, checksummed.

One folder serves any number of processes and caches. An entry is one sample's bytes under a name made from its shard,
range and checksum, so an entry is never outdated. Entries are written and dropped under one lock, which makes the limit
exact; reading takes no lock; a fetch holds only the lock of its entry, so that others wait for it instead of fetching
the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache_store.errors import CacheError
from cache_store.shard import checksum

ENTRIES, LOCKS, UNFINISHED, USAGE = "entries", "locks", "tmp", "usage"
KEPT_AFTER_DROPPING = 0.9
"""Dropping goes on until so much of the limit is used: one look at all entries makes room for many."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskCacheOptions:
    """Where samples are kept, and how much of them."""

    path: str
    """Folder on a local disk; shared by all processes of the machine."""
    max_gb: float
    """Limit of the folder's content, in 10^9 bytes."""

    def __post_init__(self) -> None:
        if not self.path or self.max_gb <= 0:
            raise ValueError(f"disk cache {self.path!r} with {self.max_gb} GB: wanted a folder and a positive limit")

    @property
    def max_bytes(self) -> int:
        """The limit in bytes."""
        return round(self.max_gb * 1e9)

    def check(self, largest: int) -> None:
        """Raise CacheError when the limit cannot hold the largest sample, of so many bytes."""
        if largest > self.max_bytes:
            raise CacheError(
                f"disk cache {self.path}: a limit of {self.max_bytes:,} bytes cannot hold the largest sample of "
                f"{largest:,} bytes; raise max_gb, or read without a disk cache"
            )


@dataclass(slots=True)
class DiskCacheCounts:
    """What one process's disk cache did."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    """Entries whose bytes had changed; each was dropped and fetched anew."""
    not_kept: int = 0
    """Fetched samples that could not be written, for want of space or because they were damaged at their source."""


class DiskCache:
    """The folder, opened by one process; safe to use from several threads."""

    def __init__(self, options: DiskCacheOptions) -> None:
        """Raises CacheError when the folder cannot be used or the disk has no room for the limit."""
        self.folder, self.max_bytes = Path(options.path).expanduser(), options.max_bytes
        self.counts = DiskCacheCounts()
        try:
            for name in (ENTRIES, LOCKS, UNFINISHED):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            with self._locked(USAGE) as usage:
                used = self._drop_until(self.max_bytes)
                _write_number(usage, used)
        except OSError as error:
            raise CacheError(f"disk cache {self.folder}: {error.strerror or error}; choose another folder") from error
        free = shutil.disk_usage(self.folder).free
        if free < (needed := self.max_bytes - used):
            raise CacheError(
                f"disk cache {self.folder}: the limit of {self.max_bytes:,} bytes needs {needed:,} more, the disk has "
                f"{free:,} free; lower max_gb or choose another disk"
            )

    def get(self, key: str, wanted: str, fetch: Callable[[], bytes]) -> bytes:
        """The bytes of an entry whose crc32c is `wanted`, or what `fetch` returns, kept for the next time."""
        name = hashlib.sha256(f"{key} {wanted}".encode()).hexdigest()[:40]
        path = self.folder / ENTRIES / name[:2] / name
        data = self._read(path, wanted)
        if data is not None:
            return data
        with self._locked(f"{LOCKS}/{name[:3]}"):
            data = self._read(path, wanted)  # perhaps somebody else has fetched it meanwhile
            if data is None:
                self.counts.misses += 1
                data = fetch()
                if checksum(data) != wanted or not self._keep(path, data):
                    self.counts.not_kept += 1
        return data

    def _read(self, path: Path, wanted: str) -> bytes | None:
        try:
            data = path.read_bytes()
            if checksum(data) == wanted:
                os.utime(path)  # used now
                self.counts.hits += 1
                return data
            self.counts.damaged += 1
            path.unlink()
        except FileNotFoundError:  # not kept, or dropped this moment
            return None
        return None

    def _keep(self, path: Path, data: bytes) -> bool:
        try:
            with self._locked(USAGE) as usage:
                used = _read_number(usage)
                if used + len(data) > self.max_bytes:
                    used = self._drop_until(min(self.max_bytes * KEPT_AFTER_DROPPING, self.max_bytes - len(data)))
                _write_number(usage, used + len(data))  # before the file: a crash in between only counts too much
                unfinished = self.folder / UNFINISHED / path.name
                unfinished.write_bytes(data)
                path.parent.mkdir(exist_ok=True)
                os.replace(unfinished, path)
        except OSError as error:
            if error.errno in _FULL:  # others have filled the disk: training goes on without this entry
                (self.folder / UNFINISHED / path.name).unlink(missing_ok=True)
                return False
            raise CacheError(f"disk cache {self.folder}: {error.strerror or error}; choose another folder") from error
        return True

    def _drop_until(self, limit: float) -> int:
        """Bytes kept after dropping the least recently used ones; under the usage lock, where nobody else writes."""
        for left in (self.folder / UNFINISHED).iterdir():
            left.unlink(missing_ok=True)
        found = []
        for entry in (self.folder / ENTRIES).glob("*/*"):
            try:
                facts = entry.stat()
            except FileNotFoundError:  # a reader has dropped a damaged one
                continue
            found.append((facts.st_mtime_ns, facts.st_size, entry))
        used = sum(size for _, size, _ in found)
        for _, size, entry in sorted(found):
            if used <= limit:
                break
            entry.unlink(missing_ok=True)
            used -= size
        return used

    @contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # apart for every open: threads exclude each other too
            yield descriptor
        finally:
            os.close(descriptor)


def _read_number(descriptor: int) -> int:
    return int(os.pread(descriptor, 32, 0) or b"0")


def _write_number(descriptor: int, value: int) -> None:
    os.pwrite(descriptor, b"%031d\n" % value, 0)
